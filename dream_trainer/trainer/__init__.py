"""What a trainer is: the abstract interface, the loop, and the mixins."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "AbstractTrainer": "abstract",
    "BaseTrainer": "base",
    "DreamTrainer": "dream",
    "DreamTrainerConfig": "dream",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
