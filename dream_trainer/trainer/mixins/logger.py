"""LoggerMixin: `self.log` and its kin from anywhere, and the loggers that what they get is written to.

The way of a number is loggers/run_log.py's: `log` -> buffer (on the device) -> flush every n steps -> `history` and
`on_log` (on every rank) and the loggers (on rank 0). Here is what the trainer tells it: batches, windows, validations,
saves. Images and other media go to the host when they are logged, on rank 0 (trainer/mixins/logger.py), and wait in
loggers/media_files.py until their window, or their validation, is through. A sanity validation, `evaluate` and
`predict` write nothing. It saves what was logged and not yet flushed, so that a resumed run writes the same numbers at
the same steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median_low
from typing import TYPE_CHECKING, Any, ClassVar, Never, cast

from torch import Tensor

from dream_trainer.cleanup import followed_by
from dream_trainer.config.logger_parameters import LoggerConfigMixin, LoggerParameters
from dream_trainer.config.serialize import to_dict
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.errors import HookError
from dream_trainer.loggers import media
from dream_trainer.loggers.buffer import Reduction
from dream_trainer.loggers.group import LoggerGroup, check_loggers
from dream_trainer.loggers.interface import Logger, Stamp
from dream_trainer.loggers.media_files import MediaQueue
from dream_trainer.loggers.run_log import History, RunLog
from dream_trainer.trainer.abstract import AbstractTrainer
from dream_trainer.trainer.cooperation import refuse_unknown, unlogged
from dream_trainer.trainer.event_table import anyone_listens


class LoggerMixin(AbstractTrainer):
    """Logging from anywhere in the trainer.

    What `training_step` returns is logged under `train/`: numbers and tensors of one element, nested dicts as
    `train/outer/inner`; anything else in it is for `post_train_batch` and passed over. What `log` gets keeps its name.
    Override `configure_loggers` to write somewhere of your own.
    """

    _config_class: ClassVar[type | None] = LoggerConfigMixin

    if TYPE_CHECKING:
        config = cast(Any, ...)  # see AbstractTrainer

    def __init__(self, config: BaseTrainerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        check_loggers(self.config.logger_parameters)
        stragglers = Stragglers(self, self.config.logger_parameters)
        self._run_log = RunLog(
            self.config.logger_parameters,
            self.run_dir,
            (self.project, self.group, self.experiment),
            config=partial(to_dict, config),
            stamp=self._stamp,
            notify=partial(self._notify, "on_log"),
            of_data=self._numbers_of_data,
            of_rank=stragglers.measured,
            hear=stragglers.hear,
        )

    @property
    def history(self) -> History:
        """The lines that were logged, in order: `step`, `epoch`, `samples`, `time`, then the metrics by name.

        A sequence that grows; it keeps the last `logger_parameters.history_lines`, and metrics.jsonl has all. The same
        on all ranks but for `time`, which is each rank's own clock, and also without any logger. After a resume the
        lines of before come first, read from metrics.jsonl; without that file it begins at the resume.
        """
        return self._run_log.history

    def history_of(self, name: str) -> list[tuple[int, float]]:
        """The values of one metric with their steps, in order: `history_of("val/loss")`.

        None yet is an empty list where they may come: inside `fit`, and of "val/..." before the first validation.

        Raises:
            KeyError: Others were logged, and none of that name.
        """
        lines = self._run_log.history
        curve = [(int(line["step"]), line[name]) for line in lines if name in line]
        if not curve and lines and not self._session.is_training:
            names = sorted({key for line in lines for key in line if key not in Stamp._fields})
            has_validated = any(key.startswith("val/") for key in names)
            if name.startswith("val/") and self._data.validation and not has_validated:
                return []
            raise KeyError(f"no metric {name!r} was logged; there are {', '.join(names)}.")
        return curve

    def configure_loggers(self) -> list[Logger]:
        """The loggers, by `logger_parameters.loggers`. Called on rank 0 alone; an override may add to `super()`'s."""
        parameters: LoggerParameters = self.config.logger_parameters
        return [logger.configured(parameters) for logger in check_loggers(parameters)]

    def log(
        self,
        name: str | Mapping[str, Any],
        value: Tensor | float | None = None,
        *,
        weight: Tensor | float | None = None,
        reduce: Reduction = "mean",
        **unknown: Never,
    ) -> None:
        """Logs a value, or a dict of them; the loggers get it reduced over all micro-batches and ranks since the last
        flush.

        Nothing waits for the device. Ranks need not log the same names. A tensor that you will change in place
        afterwards is to be logged as its `clone()`.

        Args:
            name: As the loggers will show it. In validation `val/` (and the loader's name) is put before it, if it is
                not there; not in `post_val_epoch` and `post_epoch`, whose values are a line of their own at the step of
                the validation's or the epoch's end. Or values by their names, nested ones as `outer/inner`.
            value: A number or a tensor of one element.
            weight: Weight in the mean; zero counts for nothing under any reduction. Default: the micro-batch's backward
                weight if it has one, else its batch size; 1 before the first batch.
            reduce: "mean", "sum", "min", "max" or "last" (on the highest rank that logged it).

        Raises:
            TypeError: The value is not a scalar, or there is one beside a dict.
            ValueError: The name belongs to the stamp of a line, or had another reduction before.
        """
        if unknown:
            refuse_unknown(unknown)
        if isinstance(name, Mapping):
            if value is not None:
                raise TypeError("log() was given a dict and a value. Log a name and its value, or a dict alone.")
            self.log_dict(name, weight=weight, reduce=reduce)
            return
        if value is None:
            raise TypeError(f"log({name!r}) has no value. Log a number or a tensor of one element under that name.")
        if self._validation.buffer is not None:
            if weight is None and reduce == "mean" and self.world.mesh_shape.cp > 1:
                raise HookError(
                    f"log({name!r}) without weight= in a validation under context_parallel, where ranks have different "
                    "numbers of labels in their parts of a sequence. Pass weight=the number of labels."
                )
            weight_in_validation = self._validation.weight if weight is None else weight
            self._validation.buffer.add(name.removeprefix("val/"), value, weight_in_validation, reduce)
            return
        if not self.training:
            where = "a sanity validation" if self.is_sanity_validation else "predict or before a validation's loaders"
            self.warn_once("log outside", f"log({name!r}) was called in {where}, where nothing is logged: ignored.")
            return
        if name in Stamp._fields:
            raise ValueError(
                f"metric {name!r} would hide the {name} that each line has. Use another name, such as 'my/{name}'."
            )
        run_log = self._run_log
        if run_log.own_line is not None:
            run_log.own_line.add(name, value, 1.0 if weight is None else weight, reduce)
            return
        if weight is None and self._session.is_ready and self._window.batch is not None:
            weight = self._accumulation.batch_weight
            if weight is None:
                run_log.add_undecided(name, value, reduce, self._window.batch_samples)
                return
        run_log.metrics.add(name, value, 1.0 if weight is None else weight, reduce)

    # -- media

    def log_images(self, name: str, images: Iterable[Any], captions: Sequence[str | None] | None = None) -> None:
        """Logs images side by side, as rank 0 has them; `log_image(name, image, caption=None)` logs a single one.

        Like all media, they are copied to the host now, which waits for the device: log them now and then. They are
        written with the step that the running window completes; in a validation under `val/` with its numbers. A
        DTensor is gathered, so all ranks of its mesh must log it; of other tensors only rank 0's count.

        Args:
            name: As the loggers will show it.
            images: Images of Pillow's, or tensors or arrays `[channels, height, width]` of 1, 3 or 4 channels, or
                `[height, width]`, on any device: floating point from 0 to 1 (values beyond are clamped, which is said
                once; NaN is 0), uint8 from 0 to 255, or bool, where True is white. Other integers are an error.
            captions: One text for each image, or None for it; where the logger can show them.

        Raises:
            RuntimeError: A DTensor is logged where rank 0 runs alone, as in a main_process_only callback.
            ValueError: A shape is not that of an image, or there are more or fewer captions than images.
            TypeError: An image is not a tensor or array, or of another dtype.
        """
        tensors = [self._media.gathered(name, image) for image in images]
        captions = [None] * len(tensors) if captions is None else captions
        if len(captions) != len(tensors):
            raise ValueError(f"{name!r} has {len(tensors)} images and {len(captions)} captions. Give one for each.")
        for image in tensors:
            if image.dim() > 3:
                raise ValueError(
                    f"{name!r} has shape {tuple(image.shape)}, more than one image's [channels, height, width]. "
                    f"Log several with log_images({name!r}, images)."
                )
        if tensors and self._media.is_taken:
            shown = tuple(
                media.Image(self._media.pixels(name, image), text)
                for image, text in zip(tensors, captions, strict=True)
            )
            self._media.add(name, media.Images(shown))

    def log_image_grid(
        self, name: str, images: Iterable[Any], *, columns: int | None = None, caption: str | None = None
    ) -> None:
        """Logs images beside and below each other as a single one, as `log_images` does.

        Args:
            name: As the loggers will show it.
            images: `[n, channels, height, width]`, or single ones as in `log_images`. Smaller ones lie in the upper
                left of their cells; grey ones become colour beside others.
            columns: How many are beside each other; None for as near to a square as `n` allows.
            caption: Text of the whole, where the logger can show it.

        Raises:
            ValueError: A shape is not that of an image, some have an alpha channel and some do not, or there is no
                column.
            TypeError: An image is not a tensor or array, or of another dtype.
        """
        if columns is not None and columns < 1:
            raise ValueError(f"columns={columns} of {name!r} is too small. Use 1 or more.")
        if isinstance(images, Tensor):  # gathered at once
            images = self._media.gathered(name, images)
        tensors = [self._media.gathered(name, image) for image in images]
        if tensors and self._media.is_taken:
            page = media.grid(name, [self._media.pixels(name, image) for image in tensors], columns)
            self._media.add(name, media.Images((media.Image(page, caption),)))

    def log_video(self, name: str, frames: Any, fps: float) -> None:
        """Logs a video, as `log_images` does.

        Args:
            name: As the loggers will show it.
            frames: `[time, channels, height, width]`, with values as of images.
            fps: Frames per second.

        Raises:
            ValueError: The shape is not that of a video, or `fps` is not positive.
        """
        tensor = self._media.gathered(name, frames)
        if tensor.dim() != 4 or not fps > 0:
            shape = tuple(tensor.shape)
            raise ValueError(
                f"{name!r} has shape {shape}, fps={fps}. Log [time, channels, height, width], fps above 0."
            )
        if self._media.is_taken:
            self._media.add(name, media.Video(self._media.pixels(name, tensor), fps))

    def log_audio(self, name: str, samples: Any, sample_rate: int) -> None:
        """Logs sound, as `log_images` does.

        Args:
            name: As the loggers will show it.
            samples: `[samples]` or `[channels, samples]` of 1 or 2 channels, floating point from -1 to 1.
            sample_rate: Samples per second.

        Raises:
            ValueError: The shape is not that of a sound.
            TypeError: The samples are not floating point.
        """
        tensor = self._media.gathered(name, samples)
        if self._media.is_taken:
            self._media.add(name, media.audio(name, tensor, sample_rate))

    def log_table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Logs rows under named columns, as `log_images` does; cells are numbers, strings, or shown by `str`.

        Raises:
            ValueError: A row has more or fewer cells than there are columns.
            TypeError: The columns are a string, or the rows or one of them are not a sequence.
        """
        item = media.table(name, columns, rows)
        if self._media.is_taken:
            self._media.add(name, item)

    def log_histogram(self, name: str, values: Any, bins: int = 64) -> None:
        """Logs how the finite elements of a tensor of any shape are distributed, as `log_images` does.

        They are counted on their device, in `bins` bins of one width from the lowest to the highest.

        Raises:
            ValueError: There is no bin.
        """
        if bins < 1:
            raise ValueError(f"bins={bins} of histogram {name!r} is too small. Use 1 or more.")
        tensor = self._media.gathered(name, values)
        if self._media.is_taken:
            self._media.add(name, media.histogram(tensor, bins))

    def log_text(self, name: str, text: str) -> None:
        """Logs text, as Markdown where it can be shown; with the step, as `log_images` does.

        Raises:
            TypeError: It is not a string.
        """
        if not isinstance(text, str):
            raise TypeError(f"{name!r} is of type {type(text).__name__}, no text. Log a string, such as str(x).")
        if self._media.is_taken:
            self._media.add(name, media.Text(text))

    @property
    def _media(self) -> MediaLog:
        return MediaLog(self, self._run_log.media, self._stamp)

    # -- what the loop tells

    def _finish_setup(self) -> None:
        super()._finish_setup()
        loggers = None
        if self.world.is_main:
            strict = self.config.logger_parameters.strict
            loggers = LoggerGroup(self.configure_loggers(), self.warn_once, strict=strict)
        self._run_log.connect(self.world, loggers)

    def _stamp(self) -> Stamp:
        return Stamp(self.global_step, self.current_epoch, self.samples_seen, time.time())

    def _numbers_of_data(self) -> Mapping[str, float]:
        numbers = self._data.feed.numbers_at(self.progress.data)
        return {"tokens_seen": self.tokens_seen} | dict(numbers) if self.tokens_seen else numbers

    def _log_step(self, result: dict[str, Any], weight: Any) -> None:
        super()._log_step(result, weight)
        run_log = self._run_log
        if result:
            batch_weight = self._window.batch_samples if weight is None else weight
            run_log.metrics.add_result(result, batch_weight, "train/")
        run_log.batch_finished(weight)
        # In the first step, which no measurement of the pace counts, and not at the first flush: it may take seconds.
        if run_log.is_to_be_opened and not run_log.open_if_needed() and not self._events["post_train_batch"]:
            message = unlogged("training_step", result)
            if message is not None:
                self.warn_once("unlogged training_step", message)

    def _window_started(self) -> None:
        super()._window_started()
        self._run_log.window_started()

    def _window_dropped(self) -> None:
        super()._window_dropped()
        self._run_log.window_dropped()

    def _window_finished(self, *, is_last: bool) -> None:
        super()._window_finished(is_last=is_last)
        self._run_log.window_finished(self.progress.global_step, is_last=is_last, is_stopped=self._agreement.stopped)

    def _land(self, *, is_last: bool) -> None:
        super()._land(is_last=is_last)
        self._run_log.land()
        if is_last:
            self._run_log.fit_ended(self.global_step)

    @contextmanager
    def _validation_context(self) -> Iterator[None]:
        if self._session.is_training:
            self._run_log.open_early()
        self._run_log.media.validation_started()
        with super()._validation_context():
            yield

    def _validated(self, metrics: dict[str, float]) -> None:
        super()._validated(metrics)
        self._run_log.validated(metrics)

    def _tell_end(self, event: str, *args: Any) -> None:
        if not anyone_listens(self, event):
            super()._tell_end(event, *args)
            return
        self._run_log.land()
        with self._run_log.line_of_its_own(counts=not (self.is_sanity_validation or self.is_evaluating)):
            super()._tell_end(event, *args)

    def _save_was_lost(self) -> None:
        super()._save_was_lost()
        self._run_log.save_was_lost()

    def _mixin_state(self) -> dict[str, Any]:
        state = self._run_log.state(
            self.global_step, is_last=self._schedule.is_last_window(), has_failed=self._session.has_failed
        )
        return super()._mixin_state() | {"logger": state}

    def _load_mixin_state(self, state: dict[str, Any]) -> None:
        super()._load_mixin_state(state)
        if "logger" in state:
            self._run_log.load_state(state["logger"])

    def _close(self) -> None:
        with followed_by(super()._close):
            self._run_log.close(self.global_step, has_trained=self.local_batches > 0)


class MediaLog:
    """The media of one trainer."""

    def __init__(self, trainer: AbstractTrainer, queue: MediaQueue, stamp: Callable[[], Stamp]) -> None:
        self._trainer, self._queue, self._stamp = trainer, queue, stamp

    @property
    def is_taken(self) -> bool:
        """Whether this rank writes what is logged now."""
        trainer = self._trainer
        return trainer.world.is_main and not (trainer.is_padding_batch or trainer.is_sanity_validation)

    def gathered(self, name: str, value: Any) -> Tensor:
        """`value` as a whole tensor; a collective where it is a DTensor.

        Raises:
            RuntimeError: It is one, and only rank 0 runs here.
        """
        world = self._trainer._world
        if world is not None and world.forbidden is not None and world.mesh is not None:
            from torch.distributed.tensor import DTensor

            if isinstance(value, DTensor):
                world.refuse_if_forbidden()
        return media.gathered(name, value)

    def pixels(self, name: str, value: Tensor) -> Tensor:
        """Of an image or a video, as it is shown; values beyond 0 to 1 are said once."""
        pixels, was_clamped = media.pixels(name, value)
        if was_clamped:
            self._trainer.warn_once(
                f"clamped {name}", f"{name!r} has values outside of 0 to 1, which are clamped for display."
            )
        return pixels

    def add(self, name: str, item: media.Media) -> None:
        """Puts it where it is written from, with the running window or validation."""
        trainer = self._trainer
        if not trainer.training:
            prefix = f"val/{trainer.val_name}/" if trainer.val_name else "val/"
            self._queue.add_in_validation(prefix + name.removeprefix("val/"), item)
            return
        if trainer.is_evaluating:  # in its post_val_epoch
            return
        is_between_windows = trainer.local_batches > 0 and not trainer._accumulation.is_open
        self._queue.add(name, item, self._stamp() if is_between_windows else None)


_WORK, _DATA = "seconds of work", "seconds of data"
LEAST_SECONDS = 0.02
"""How much longer than the median a step of a slow rank takes at least: less is noise, or does no harm."""
_NAMED = 8


# -- Stragglers: which rank holds the others up, and by what, told from numbers that cross with each line of the log.
#
# In synchronous training the step takes as long on every rank, since they wait for one another in collectives. So what
# is compared is each rank's own time: that of its windows, without what it spends in collectives (own_time.py), and
# what it waits for its data, in which there are none. What a collective of the user's own waits counts as own time, on
# all ranks alike: then nobody is named, never a wrong one.


class Stragglers:
    """What one rank measures, and what it hears of all."""

    def __init__(self, trainer: AbstractTrainer, parameters: LoggerParameters) -> None:
        self._trainer = trainer
        self._factor, self._lines = parameters.straggler_factor, parameters.straggler_lines
        self._before = (0, 0.0, 0.0)
        self._slow_for: dict[int, int] = {}  # lines in a row, by rank
        self._named: set[int] = set()

    def measured(self) -> dict[str, float]:
        """Seconds of a step, on average since the last call: of this rank's own work, and of waiting for its data."""
        if self._factor is None or self._trainer.world.world_size == 1:
            return {}
        own = self._trainer._parallel.gradients.own_time
        now = own.windows, own.seconds, self._trainer.seconds_waiting_for_data
        windows, work, data = (new - old for new, old in zip(now, self._before, strict=True))
        self._before = now
        return {_WORK: work / windows, _DATA: data / windows} if windows else {_WORK: 0.0, _DATA: 0.0}

    def hear(self, ranks: Mapping[str, Sequence[float]]) -> None:
        """Takes what all ranks measured, equal on all; a collective where one is to be named."""
        work, data = ranks[_WORK], ranks[_DATA]
        own = [sum(parts) for parts in zip(work, data, strict=True)]
        if not any(own):  # a save has flushed the log, and there was no window since
            return
        usual = median_low(own)
        assert self._factor is not None  # else nothing was measured
        limit = max(self._factor * usual, usual + LEAST_SECONDS)
        slow = [rank for rank, seconds in enumerate(own) if seconds > limit]
        self._slow_for = {rank: self._slow_for.get(rank, 0) + 1 for rank in slow}
        found = [rank for rank in slow if self._slow_for[rank] >= self._lines and rank not in self._named]
        if found:
            self._named.update(found)
            self._tell(found, work, data)

    def _tell(self, slow: list[int], work: Sequence[float], data: Sequence[float]) -> None:
        hosts = self._trainer.world.all_gather_object(self._trainer.world.host)
        worst = max(slow, key=lambda rank: work[rank] + data[rank])
        waits_for_data = data[worst] - median_low(data) > work[worst] - median_low(work)
        names = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in slow[:_NAMED])
        more = f" and {len(slow) - _NAMED} more" if len(slow) > _NAMED else ""
        advice = (
            "Look at its storage, and at num_workers of its loader."
            if waits_for_data
            else "Look at what else runs on that host, at its clocks, and at what this rank alone does in a step."
        )
        self._trainer.warn_once(
            f"slow {slow}",
            f"{names}{more} has been slower than the others for {self._lines} lines of the log, and all wait for it in "
            f"each step. Rank {worst} loads data for {_spelled(data[worst])} of a step and works for "
            f"{_spelled(work[worst])}; usual are {_spelled(median_low(data))} and {_spelled(median_low(work))}: it is "
            f"slow in its {'data' if waits_for_data else 'work'}. {advice}",
        )


def _spelled(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
