"""MixinHooks: the hooks through which mixins take part in the loop, each declared once as a documented no-op.

A mixin overrides those it needs and calls `super()`; none knows of another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from dream_trainer.config.checkpoint_parameters import Mode
from dream_trainer.config.device_parameters import DeviceParameters
from dream_trainer.distributed.world import World
from dream_trainer.events.collection import BaseCallback
from dream_trainer.loggers.buffer import Reduction
from dream_trainer.loggers.records import Records
from dream_trainer.parallel.axis import Parallelism
from dream_trainer.trainer.hooks import Hooks
from dream_trainer.trainer.validation_metrics import ValidationMetrics

if TYPE_CHECKING:
    from dream_trainer.loggers.media import MediaLog


class NoRounds:
    steps = 1  # optimizer steps of a round

    def as_one_model(self) -> AbstractContextManager[None]:
        """Wraps what speaks of the run's model, such as an export: inside, all ranks have its weights; a collective."""
        return nullcontext()

    def tensors_to_save(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors to save: `tensors` (models' and optimizers', with names), replaced or extended; a collective."""
        return tensors

    def tensors_to_load(self, tensors: dict[str, Tensor], saved: Collection[str], *, is_own: bool) -> dict[str, Tensor]:
        """Where a checkpoint with the names `saved` is loaded to; it `is_own` unless this run begins from another's."""
        return tensors


_NO_VALUE: Any = object()  # an argument that was not given


class MixinHooks(Hooks):
    """The methods that mixins override."""

    # Mixins and BaseTrainer name the hooks they cannot do without, and the config class that carries their field.
    _required_hooks: ClassVar[dict[str, str]] = {}
    _config_class: ClassVar[type | None] = None
    # Whether parameters and gradients are kept equal over ranks (SetupMixin) and whether "auto" shards them
    # (FSDPMixin).
    _keeps_ranks_equal: ClassVar[bool] = False
    _shards_parameters: ClassVar[bool] = False
    # The way to divide work, or to change modules, that a mixin brings.
    _parallelism: ClassVar[Parallelism | None] = None
    # The callbacks that run unless `CallbackCollection(defaults=...)` says otherwise.
    _default_callbacks: ClassVar[Sequence[type[BaseCallback]]] = ()
    # Whether a dict of named validation loaders is understood (EvalMixin).
    _names_validation_loaders: ClassVar[bool] = False
    # Whether the run can be saved, at any time (CheckpointMixin).
    _saves_checkpoints: ClassVar[bool] = False

    # The trainer's own.
    _notify: Callable[..., None]
    warn_once: Callable[[str, str], None]
    backward: Callable[..., None]
    close: Callable[[], None]
    settle: Callable[[], None]

    if TYPE_CHECKING:

        @property
        def _records(self) -> Records: ...

        @property
        def training(self) -> bool: ...

    def _setup_stages(self) -> list[tuple[str, str]]:
        """The setup order as (stage, reason) pairs, for `describe`."""
        return []

    def _join_world(self, parameters: DeviceParameters, workers: int | Literal["hosts"]) -> World:
        """The ranks that train."""
        return World(parameters, shard_by_default=self._shards_parameters, workers=workers)

    def _finish_setup(self) -> None:
        """Models, data and optimizers are ready; loggers and checkpoints open here."""

    def _resume(self) -> None:
        """Loads the newest checkpoint, if the config asks for it."""

    def _wrap_step(self, step: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        """Wraps `step`, a training or validation step; the result is called with each batch and its index."""
        return step

    def _outside_forward(self) -> AbstractContextManager[None]:
        """Context that `step` runs in; a mixin with a mode in steps leaves it there."""
        return nullcontext()

    def _log_step(self, result: dict[str, Any], weight: Any) -> None:
        """Takes the result of a training micro-batch."""

    def _window_started(self) -> None:
        """Before each window's first micro-batch; not again when it runs again."""

    def _window_dropped(self) -> None:
        """A window's gradients were not finite, and it runs again: drop what it logged."""

    def _window_finished(self, *, is_last: bool) -> None:
        """Loggers flush when due: after each window and its events, after a resume, and with `is_last` where the run
        ends, which may be found out only after the window's validation."""

    def _land(self, *, is_last: bool) -> None:
        """Makes loggers write values in flight."""

    def _tell_times(self, words: str) -> None:
        """On rank 0, at the end of a run: its time by activity, in one line."""

    def _validation_context(self) -> AbstractContextManager[None]:
        """Wraps a complete validation."""
        return nullcontext()

    def _validated(self, metrics: dict[str, float]) -> None:
        """Takes the exact metrics of a validation, before `post_val_epoch`."""

    def _tell_end(self, event: str, *args: Any) -> None:
        """Calls everyone who listens to the end of a validation, `post_val_epoch`, or of an epoch, `post_epoch`."""
        self._notify(event, *args)

    def _start_loader_metrics(self) -> list[ValidationMetrics]:
        """A validation loader starts: what its further metrics will come to, each asked for at its end."""
        return []

    def _metrics_of_training(self) -> dict[str, Any]:
        """Maps names to the metrics that training has updated on this rank; a checkpoint keeps their state."""
        return {}

    def _best_modes(self) -> dict[str, Mode]:
        """The validation metrics whose best values are kept, each with whether "min" or "max" is best."""
        return {}

    def _save_was_lost(self) -> None:
        """The last save did not reach the disk, and its state is lost."""

    def _close(self) -> None:
        """Releases the mixins' resources."""

    # -- what training code calls; of models in stages a mixin does it in another way

    def forward_backward(
        self,
        model: nn.Module,
        inputs: tuple[Any, ...],
        targets: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        weight: Callable[[Any], Tensor | float] | Tensor | float | None = None,
    ) -> Tensor:
        """The loss of a batch, and its gradients: `loss = loss_fn(model(*inputs), targets)`, then `backward(loss)`.

        With a model in stages, a batch's micro-batches pass through them forward and backward, and the same
        `training_step` serves both. In a validation, or under `torch.no_grad()`, it only computes the loss.

        Args:
            model: Called with `inputs`.
            inputs: Positional arguments; in stages every tensor in them is cut along its first dimension.
            targets: Other inputs of the loss; cut the same way.
            loss_fn: Gives the mean loss, a scalar, of outputs and targets.
            weight: Over how many tokens or samples that is the mean, as `backward` takes it: a number, or a function of
                targets, which stages ask for each micro-batch and need.

        Returns:
            The loss of the whole batch.

        Raises:
            StepError: As `backward` does; or stages cannot do what is asked for.
        """
        loss = loss_fn(model(*inputs), targets)
        if self.training and torch.is_grad_enabled():
            self.backward(loss, weight=weight(targets) if callable(weight) else weight, model=model)
        return loss

    # -- what training code calls; without LoggerMixin these do nothing, and warn of it once

    def log(
        self,
        name: str | Mapping[str, Any],
        value: Tensor | float | None = _NO_VALUE,
        *,
        weight: Tensor | float | None = None,
        reduce: Reduction = "mean",
    ) -> None:
        """Logs a value, or a dict of them; the loggers get it reduced over all micro-batches and ranks since the last
        flush.

        Nothing waits for the device. Ranks need not log the same names. A tensor that you will change in place
        afterwards must be logged as its `clone()`.

        Args:
            name: Shown by the loggers. In validation `val/` (and the loader's name) is prepended if missing, except in
                `post_val_epoch` and `post_epoch`, whose values form a separate line at the step where the validation or
                the epoch ends. You can also pass a dict of values; nested ones become `outer/inner`.
            value: A number or a tensor of one element. None, such as of a `step` that waits, is passed over.
            weight: Weight in the mean; zero counts for nothing under any reduction. Default: the micro-batch's backward
                weight if it has one, otherwise its batch size; 1 before the first batch.
            reduce: "mean", "sum", "min", "max" or "last" (on the highest rank that logged it).

        Raises:
            TypeError: The value is not a scalar, or both a dict and a value are given.
            ValueError: The name belongs to the stamp of a line, or had another reduction before.
        """
        if self._records.media is None:
            self._media_log("log")  # warns
        elif isinstance(name, Mapping):
            if value is not _NO_VALUE:
                raise TypeError("log() was given a dict and a value. Log a name and its value, or only a dict.")
            self.log_dict(name, weight=weight, reduce=reduce)
        elif value is _NO_VALUE:
            raise TypeError(f"log({name!r}) has no value. Log a number or a tensor of one element under that name.")
        elif value is not None:
            self._records.current.add(name, value, weight, reduce)

    def log_dict(
        self,
        values: Mapping[str, Any],
        *,
        weight: Tensor | float | None = None,
        reduce: Reduction = "mean",
    ) -> None:
        """Logs several values, nested dicts under `outer/inner`, as `log` does with a dict."""
        for name, value in values.items():
            if isinstance(value, Mapping):
                inner = {f"{name}/{key}": item for key, item in value.items()}
                self.log_dict(inner, weight=weight, reduce=reduce)
            else:
                self.log(name, value, weight=weight, reduce=reduce)

    def log_image(self, name: str, image: Any, caption: str | None = None) -> None:
        """Logs an image; `log_images` has the rules.

        Args:
            name: As the loggers will show it.
            image: A Pillow image, or a tensor or array `[channels, height, width]` of 1, 3 or 4 channels, or
                `[height, width]`. Any device. Floating point from 0 to 1, uint8 from 0 to 255, or bool.
            caption: Text for the image, if the logger can show it.
        """
        self.log_images(name, [image], [caption])

    def log_images(self, name: str, images: Iterable[Any], captions: Sequence[str | None] | None = None) -> None:
        """Logs images side by side, as rank 0 has them; `log_image(name, image, caption=None)` logs a single one.

        Like all media, they are copied to the host now, which waits for the device: log them now and then. They are
        written with the step that the running window completes; in a validation under `val/` with its numbers. A
        DTensor is gathered, so all ranks of its mesh must log it; of other tensors only rank 0's count.

        Args:
            name: As the loggers will show it.
            images: Pillow images, or tensors or arrays `[channels, height, width]` of 1, 3 or 4 channels, or
                `[height, width]`. Any device. Floating point from 0 to 1 (values beyond are clamped, with one
                warning; NaN is 0), uint8 from 0 to 255, or bool (True is white). Other integers raise an error.
            captions: One text for each image, or None for it; where the logger can show them.

        Raises:
            RuntimeError: A DTensor is logged where only rank 0 runs, as in a main_process_only callback.
            ValueError: A shape is not that of an image, or there are more or fewer captions than images.
            TypeError: An image is not a tensor or array, or of another dtype.
        """
        if media := self._media_log("log_images"):
            media.images(name, images, captions)

    def log_image_grid(
        self, name: str, images: Iterable[Any], *, columns: int | None = None, caption: str | None = None
    ) -> None:
        """Logs images as a grid in a single image, as `log_images` does.

        Args:
            name: As the loggers will show it.
            images: `[n, channels, height, width]`, or single ones as in `log_images`. Smaller ones lie in the upper
                left of their cells; grey ones become colour in a grid with colour images.
            columns: Images per row; None makes the grid as near to a square as `n` allows.
            caption: Text for the grid, if the logger can show it.

        Raises:
            ValueError: A shape is not that of an image, some have an alpha channel and some do not, or there is no
                column.
            TypeError: An image is not a tensor or array, or of another dtype.
        """
        if media := self._media_log("log_image_grid"):
            media.image_grid(name, images, columns, caption)

    def log_video(self, name: str, frames: Any, fps: float) -> None:
        """Logs a video, as `log_images` does.

        Args:
            name: As the loggers will show it.
            frames: `[time, channels, height, width]`, with values as of images.
            fps: Frames per second.

        Raises:
            ValueError: The shape is not that of a video, or `fps` is not positive.
        """
        if media := self._media_log("log_video"):
            media.video(name, frames, fps)

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
        if media := self._media_log("log_audio"):
            media.audio(name, samples, sample_rate)

    def log_table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Logs rows under named columns, as `log_images` does; cells are numbers, strings, or shown by `str`.

        Raises:
            ValueError: A row has more or fewer cells than there are columns.
            TypeError: The columns are a string, or the rows or one of them are not a sequence.
        """
        if media := self._media_log("log_table"):
            media.table(name, columns, rows)

    def log_histogram(self, name: str, values: Any, bins: int = 64) -> None:
        """Logs how the finite elements of a tensor of any shape are distributed, as `log_images` does.

        They are counted on their device, in `bins` bins of one width from the lowest to the highest.

        Raises:
            ValueError: There is no bin.
        """
        if media := self._media_log("log_histogram"):
            media.histogram(name, values, bins)

    def log_text(self, name: str, text: str) -> None:
        """Logs text, as Markdown where it can be shown; with the step, as `log_images` does.

        Raises:
            TypeError: It is not a string.
        """
        if media := self._media_log("log_text"):
            media.text(name, text)

    def _media_log(self, method: str) -> MediaLog | None:
        """Where media go; None, with a warning for each method, if there is no log."""
        if self._records.media is None:
            self.warn_once(method, f"{type(self).__name__}.{method} does nothing: the trainer has no LoggerMixin.")
        return self._records.media


def unlogged(step: str, result: Mapping[str, Any]) -> str | None:
    """The warning of a `step` that logged nothing though its result has a tensor of several elements, or None."""
    for name, value in result.items():
        if isinstance(value, Tensor) and value.numel() > 1:
            return (
                f"nothing that {step} returned is logged: {name!r} is a tensor of shape {tuple(value.shape)}. "
                "Return tensors of one element, such as its mean()."
            )
    return None
