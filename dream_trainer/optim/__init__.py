"""Named optimizers, parameter groups and learning rate schedules: config in, PyTorch's own objects out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from dream_trainer.optim.learning_rates import (
        ScheduleParameters as ScheduleParameters,
        TokenAxis as TokenAxis,
        build_schedule as build_schedule,
        build_schedules as build_schedules,
        rate_factor as rate_factor,
    )
    from dream_trainer.optim.muon import Muon as Muon
    from dream_trainer.optim.optimizers import (
        GroupParameters as GroupParameters,
        OptimizerParameters as OptimizerParameters,
        build_optimizer as build_optimizer,
        build_optimizers as build_optimizers,
        freeze as freeze,
        parameter_groups as parameter_groups,
        refuse_unshardable as refuse_unshardable,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
