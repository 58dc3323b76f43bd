"""LoggerMixin: the log behind `self.log` and its kin (loggers/run_log.py), and the loggers that it writes to."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from typing_extensions import override

from dream_trainer.config.logger_parameters import LoggerConfigMixin, LoggerParameters
from dream_trainer.config.serialize import to_dict
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.errors import followed_by
from dream_trainer.loggers.buffer import Scalar, Stamp, TrainingRecord
from dream_trainer.loggers.interface import Logger
from dream_trainer.loggers.line_files import ConsoleLogger
from dream_trainer.loggers.progress import shows_a_bar
from dream_trainer.loggers.run_log import LoggerGroup, RunLog, check_loggers
from dream_trainer.trainer.abstract import AbstractTrainer


class LoggerMixin(AbstractTrainer):
    """Logging from anywhere in the trainer.

    Results of `training_step` are logged under `train/`: numbers and tensors of one element, nested dicts as
    `train/outer/inner`. Other results are for `post_train_batch` and not logged. Names given to `log` are kept.
    Override `configure_loggers` to write to your own logger.
    """

    _config_class: ClassVar[type | None] = LoggerConfigMixin

    def __init__(self, config: BaseTrainerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        parameters: LoggerParameters = self._runtime.config.logger_parameters
        check_loggers(parameters)
        self.__has_bar = "console" in parameters.loggers and shows_a_bar(self._runtime.config.callbacks)
        self.__run_log = self._runtime.log = RunLog(
            parameters,
            self.run_dir,
            (config.project, config.group, config.experiment),
            records=self._runtime.records,
            training=TrainingRecord(self._weight_of_batch, self._stamp_of_media),
            config=partial(to_dict, config),
            stamp=self._stamp,
            notify=partial(self._notify, "on_log"),
            of_data=self._numbers_of_data,
            warn_once=self.warn_once,
        )
        load = self.__run_log.load_state
        self._runtime.state_registry.register("logger", self.__state, load, goes_with_counters=True)

    @property
    def history(self) -> list[dict[str, float]]:
        """The lines that were logged, in order: `step`, `epoch`, `samples`, `time`, then the metrics under their names.

        A sequence that grows; it keeps the last `logger_parameters.history_lines`, and metrics.jsonl has all. It is the
        same on all ranks except for `time` (each rank's own clock), also without any logger. After a resume the
        earlier lines come first, read from metrics.jsonl; without that file it begins at the resume.
        """
        return self.__run_log.history

    def history_of(self, name: str) -> list[tuple[int, float]]:
        """The values of one metric with their steps, in order: `history_of("val/loss")`.

        None yet is an empty list where they may come: inside `fit`, and of "val/..." before the first validation.

        Raises:
            KeyError: Others were logged, and none of that name.
        """
        lines = self.__run_log.history
        curve = [(int(line["step"]), line[name]) for line in lines if name in line]
        if not curve and lines and not self._runtime.session.is_training:
            names = sorted({key for line in lines for key in line if key not in Stamp._fields})
            has_validated = any(key.startswith("val/") for key in names)
            if name.startswith("val/") and self._runtime.data.validation and not has_validated:
                return []
            raise KeyError(f"no metric {name!r} was logged; there are {', '.join(names)}.")
        return curve

    def configure_loggers(self) -> list[Logger]:
        """The loggers, by `logger_parameters.loggers`. Called on rank 0 only; an override may add to `super()`'s."""
        parameters: LoggerParameters = self._runtime.config.logger_parameters
        loggers = [logger.configured(parameters) for logger in check_loggers(parameters)]
        for console in (one for one in loggers if isinstance(one, ConsoleLogger)):
            console.is_beside_bar = self.__has_bar
        return loggers

    # -- what the log asks

    def _stamp(self) -> Stamp:
        return Stamp(self.global_step, self.current_epoch, self.samples_seen, time.time())

    def _stamp_of_media(self) -> Stamp | None:
        """None for what the running window, or the first one, completes."""
        return self._stamp() if self.local_batches > 0 and not self._runtime.accumulation.is_open else None

    def _weight_of_batch(self) -> tuple[Scalar | None, int]:
        """The micro-batch's backward weight, None as long as it has none, and its samples."""
        if self._runtime.window.batch is None:
            return 1.0, 1
        return self._runtime.accumulation.batch_weight, self._runtime.window.batch_samples

    def _numbers_of_data(self) -> Mapping[str, float]:
        numbers = self._runtime.data.feed.numbers_at(self.progress.data)
        return {"tokens_seen": self.tokens_seen} | dict(numbers) if self.tokens_seen else numbers

    # -- called by the loop

    @override
    def _finish_setup(self) -> None:
        super()._finish_setup()
        loggers = self.configure_loggers() if self.world.is_main else []
        strict = self._runtime.config.logger_parameters.strict
        self.__run_log.connect(self.world, LoggerGroup(loggers, self.warn_once, strict=strict))

    @override
    def _window_started(self) -> None:
        super()._window_started()
        self.__run_log.window_started()

    @override
    def _window_finished(self, *, is_last: bool) -> None:
        super()._window_finished(is_last=is_last)
        step, is_stopped = self._runtime.progress.global_step, self._runtime.coordinator.stopped
        self.__run_log.window_finished(step, is_last=is_last, is_stopped=is_stopped)

    def __state(self) -> dict[str, Any]:
        is_last, has_failed = self._runtime.schedule.is_last_window(), self._runtime.session.has_failed
        return self.__run_log.state(self.global_step, is_last=is_last, has_failed=has_failed)

    @override
    def _close(self) -> None:
        with followed_by(super()._close):
            self.__run_log.close(self.global_step, has_trained=self.local_batches > 0)
