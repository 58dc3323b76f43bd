"""Watchers of a run's life. Names load on first use, so importing one callback imports no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from dream_trainer.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from dream_trainer.callbacks.every import Every as Every
    from dream_trainer.callbacks.learning_rate import LearningRate as LearningRate
    from dream_trainer.callbacks.memory import GarbageCollection as GarbageCollection, Memory as Memory
    from dream_trainer.callbacks.nonfinite_report import NonFiniteReport as NonFiniteReport
    from dream_trainer.callbacks.profiler import Profiler as Profiler
    from dream_trainer.callbacks.summary import ModelSummary as ModelSummary, TrainerSummary as TrainerSummary
    from dream_trainer.callbacks.tensor_stats import (
        ActivationStats as ActivationStats,
        GradientStats as GradientStats,
        WeightStats as WeightStats,
    )
    from dream_trainer.callbacks.throughput import Throughput as Throughput
    from dream_trainer.callbacks.weight_average import EMA as EMA, SWA as SWA
    from dream_trainer.callbacks.weight_transfer import WeightTransfer as WeightTransfer
    from dream_trainer.events.callback import (
        Callback as Callback,
        LoggingCallback as LoggingCallback,
        TimedCallback as TimedCallback,
    )
    from dream_trainer.events.collection import CallbackCollection as CallbackCollection
    from dream_trainer.events.sanity_checks import SanityChecks as SanityChecks
    from dream_trainer.loggers.progress import Progress as Progress
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
