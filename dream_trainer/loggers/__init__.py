"""The loggers, for numbers and media. Names load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from dream_trainer.loggers.buffer import Stamp as Stamp
    from dream_trainer.loggers.interface import Logger as Logger
    from dream_trainer.loggers.line_files import (
        ConsoleLogger as ConsoleLogger,
        CSVLogger as CSVLogger,
        ImageFilesLogger as ImageFilesLogger,
        JSONLLogger as JSONLLogger,
        read_jsonl as read_jsonl,
    )
    from dream_trainer.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
    from dream_trainer.loggers.trackers import (
        MLflowLogger as MLflowLogger,
        TrackioLogger as TrackioLogger,
        WandbLogger as WandbLogger,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
