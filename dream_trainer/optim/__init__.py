"""Optimizers, parameter groups and learning rate schedules by name: config in, PyTorch's own objects out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from dream_trainer.optim.groups import GroupParameters as GroupParameters
    from dream_trainer.optim.groups import freeze as freeze
    from dream_trainer.optim.groups import parameter_groups as parameter_groups
    from dream_trainer.optim.learning_rates import ScheduleParameters as ScheduleParameters
    from dream_trainer.optim.learning_rates import TokenAxis as TokenAxis
    from dream_trainer.optim.learning_rates import build_schedule as build_schedule
    from dream_trainer.optim.learning_rates import build_schedules as build_schedules
    from dream_trainer.optim.learning_rates import rate_factor as rate_factor
    from dream_trainer.optim.muon import Muon as Muon
    from dream_trainer.optim.optimizer_parameters import OptimizerParameters as OptimizerParameters
    from dream_trainer.optim.optimizers import build_optimizer as build_optimizer
    from dream_trainer.optim.optimizers import build_optimizers as build_optimizers
    from dream_trainer.optim.optimizers import refuse_unshardable as refuse_unshardable
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "GroupParameters": "optim.groups",
            "Muon": "optim.muon",
            "OptimizerParameters": "optim.optimizer_parameters",
            "ScheduleParameters": "optim.learning_rates",
            "build_optimizer": "optim.optimizers",
            "build_optimizers": "optim.optimizers",
            "TokenAxis": "optim.learning_rates",
            "build_schedule": "optim.learning_rates",
            "build_schedules": "optim.learning_rates",
            "freeze": "optim.groups",
            "parameter_groups": "optim.groups",
            "rate_factor": "optim.learning_rates",
            "refuse_unshardable": "optim.optimizers",
        },
    )
