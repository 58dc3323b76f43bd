"""Watchers of a run's life. Names load on first use, so importing one callback imports no other."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "ActivationStats": "activation_stats",
    "Callback": "base",
    "CallbackCollection": "base",
    "CompileReport": "compile_report",
    "EMA": "ema",
    "EarlyStopping": "early_stopping",
    "Every": "every",
    "GarbageCollection": "garbage_collection",
    "GradientStats": "gradient_stats",
    "ImageFiles": "image_files",
    "LearningRate": "learning_rate",
    "LoggingCallback": "base",
    "Memory": "memory",
    "ModelSummary": "summary",
    "NonFiniteReport": "nonfinite_report",
    "Profiler": "profiler",
    "Progress": "progress",
    "SWA": "swa",
    "Throughput": "throughput",
    "TimedCallback": "base",
    "TrainerSummary": "summary",
    "WeightStats": "weight_stats",
    "WeightTransfer": "weight_transfer",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
