"""Where numbers and media go: the buffer they are collected in, and the loggers. Names load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from dream_trainer.loggers.buffer import MetricBuffer as MetricBuffer
    from dream_trainer.loggers.interface import Logger as Logger
    from dream_trainer.loggers.interface import Stamp as Stamp
    from dream_trainer.loggers.line_files import ConsoleLogger as ConsoleLogger
    from dream_trainer.loggers.line_files import CSVLogger as CSVLogger
    from dream_trainer.loggers.line_files import JSONLLogger as JSONLLogger
    from dream_trainer.loggers.line_files import read_jsonl as read_jsonl
    from dream_trainer.loggers.media_files import ImageFilesLogger as ImageFilesLogger
    from dream_trainer.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
    from dream_trainer.loggers.trackers import MLflowLogger as MLflowLogger
    from dream_trainer.loggers.trackers import TrackioLogger as TrackioLogger
    from dream_trainer.loggers.trackers import WandbLogger as WandbLogger
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "CSVLogger": "loggers.line_files",
            "ConsoleLogger": "loggers.line_files",
            "ImageFilesLogger": "loggers.media_files",
            "JSONLLogger": "loggers.line_files",
            "Logger": "loggers.interface",
            "MLflowLogger": "loggers.trackers",
            "MetricBuffer": "loggers.buffer",
            "Stamp": "loggers.interface",
            "TensorBoardLogger": "loggers.tensorboard",
            "TrackioLogger": "loggers.trackers",
            "WandbLogger": "loggers.trackers",
            "read_jsonl": "loggers.line_files",
        },
    )
