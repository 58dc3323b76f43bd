"""Configs: dataclasses that are validated when built, and their ways to a dict, a file and the command line.

Names load when first used, so that `import dream_trainer` pays for none of the libraries behind them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dream_trainer.config.base import BaseTrainerConfig, check_config
    from dream_trainer.config.command_line import parse
    from dream_trainer.config.device import DeviceParameters, MeshShape, resolve_mesh
    from dream_trainer.config.serialize import difference, from_dict, to_dict
    from dream_trainer.config.training import TrainingParameters, accumulation_steps

_HOMES = {
    "BaseTrainerConfig": "base",
    "check_config": "base",
    "parse": "command_line",
    "DeviceParameters": "device",
    "MeshShape": "device",
    "resolve_mesh": "device",
    "difference": "serialize",
    "from_dict": "serialize",
    "to_dict": "serialize",
    "TrainingParameters": "training",
    "accumulation_steps": "training",
}

__all__ = [
    "BaseTrainerConfig",
    "DeviceParameters",
    "MeshShape",
    "TrainingParameters",
    "accumulation_steps",
    "check_config",
    "difference",
    "from_dict",
    "parse",
    "resolve_mesh",
    "to_dict",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
