"""Optimizers, parameter groups and learning rate schedules by name: config in, PyTorch's own objects out.

Called in `configure_optimizers` and `configure_schedulers`, where building them by hand stays the plain way. Names load
when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dream_trainer.optim.groups import GroupParameters, freeze, parameter_groups
    from dream_trainer.optim.optimizers import build_optimizer, build_optimizers
    from dream_trainer.optim.parameters import OptimizerParameters
    from dream_trainer.optim.schedules import ScheduleParameters, build_schedule, build_schedules, rate_factor
    from dream_trainer.optim.sharded import refuse_unshardable

_HOMES = {
    "GroupParameters": "groups",
    "OptimizerParameters": "parameters",
    "ScheduleParameters": "schedules",
    "build_optimizer": "optimizers",
    "build_optimizers": "optimizers",
    "build_schedule": "schedules",
    "build_schedules": "schedules",
    "freeze": "groups",
    "parameter_groups": "groups",
    "rate_factor": "schedules",
    "refuse_unshardable": "sharded",
}

__all__ = [
    "GroupParameters",
    "OptimizerParameters",
    "ScheduleParameters",
    "build_optimizer",
    "build_optimizers",
    "build_schedule",
    "build_schedules",
    "freeze",
    "parameter_groups",
    "rate_factor",
    "refuse_unshardable",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
