"""Watchers of a run's life. Names load on first use, so importing one callback imports no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from dream_trainer.callbacks.activation_stats import ActivationStats as ActivationStats
    from dream_trainer.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from dream_trainer.callbacks.every import Every as Every
    from dream_trainer.callbacks.garbage_collection import GarbageCollection as GarbageCollection
    from dream_trainer.callbacks.gradient_stats import GradientStats as GradientStats
    from dream_trainer.callbacks.gradient_stats import WeightStats as WeightStats
    from dream_trainer.callbacks.image_files import ImageFiles as ImageFiles
    from dream_trainer.callbacks.learning_rate import LearningRate as LearningRate
    from dream_trainer.callbacks.memory import Memory as Memory
    from dream_trainer.callbacks.mixture_weights_by_step import MixtureWeights as MixtureWeights
    from dream_trainer.callbacks.nonfinite_report import NonFiniteReport as NonFiniteReport
    from dream_trainer.callbacks.profiler import Profiler as Profiler
    from dream_trainer.callbacks.progress import Progress as Progress
    from dream_trainer.callbacks.summary import ModelSummary as ModelSummary
    from dream_trainer.callbacks.summary import TrainerSummary as TrainerSummary
    from dream_trainer.callbacks.throughput import Throughput as Throughput
    from dream_trainer.callbacks.weight_average import EMA as EMA
    from dream_trainer.callbacks.weight_average import SWA as SWA
    from dream_trainer.callbacks.weight_transfer import WeightTransfer as WeightTransfer
    from dream_trainer.events.callback import Callback as Callback
    from dream_trainer.events.callback import LoggingCallback as LoggingCallback
    from dream_trainer.events.callback import TimedCallback as TimedCallback
    from dream_trainer.events.collection import CallbackCollection as CallbackCollection
    from dream_trainer.events.sanity_checks import SanityChecks as SanityChecks
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "ActivationStats": "callbacks.activation_stats",
            "Callback": "events.callback",
            "CallbackCollection": "events.collection",
            "EMA": "callbacks.weight_average",
            "EarlyStopping": "callbacks.early_stopping",
            "Every": "callbacks.every",
            "GarbageCollection": "callbacks.garbage_collection",
            "GradientStats": "callbacks.gradient_stats",
            "ImageFiles": "callbacks.image_files",
            "LearningRate": "callbacks.learning_rate",
            "LoggingCallback": "events.callback",
            "Memory": "callbacks.memory",
            "ModelSummary": "callbacks.summary",
            "MixtureWeights": "callbacks.mixture_weights_by_step",
            "NonFiniteReport": "callbacks.nonfinite_report",
            "Profiler": "callbacks.profiler",
            "Progress": "callbacks.progress",
            "SWA": "callbacks.weight_average",
            "SanityChecks": "events.sanity_checks",
            "Throughput": "callbacks.throughput",
            "TimedCallback": "events.callback",
            "TrainerSummary": "callbacks.summary",
            "WeightStats": "callbacks.gradient_stats",
            "WeightTransfer": "callbacks.weight_transfer",
        },
    )
