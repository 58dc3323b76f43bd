"""Watchers of a run's life. Names load on first use, so importing one callback imports no other."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "Callback": "base",
    "CallbackCollection": "base",
    "EMA": "ema",
    "ModelSummary": "summary",
    "Progress": "progress",
    "TrainerSummary": "summary",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
