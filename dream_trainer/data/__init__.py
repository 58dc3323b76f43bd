"""Data loading that knows the world and can resume. Names are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dream_trainer.data.loader import DistributedDataLoader, PerRankLoader
    from dream_trainer.data.stream import DataPosition, TrainStream, Window, train_stream
    from dream_trainer.data.validation import validation_batches

__all__ = [
    "DataPosition",
    "DistributedDataLoader",
    "PerRankLoader",
    "TrainStream",
    "Window",
    "train_stream",
    "validation_batches",
]

_HOMES = {
    "DistributedDataLoader": "loader",
    "PerRankLoader": "loader",
    "DataPosition": "stream",
    "TrainStream": "stream",
    "Window": "stream",
    "train_stream": "stream",
    "validation_batches": "validation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = vars(import_module(f"{__name__}.{_HOMES[name]}"))[name]
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
