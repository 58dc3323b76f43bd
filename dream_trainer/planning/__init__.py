"""Plans: what a rank of any number of ranks would hold and send, without them. `dream-trainer plan` prints one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from dream_trainer.planning.planned_trainer import Crossing as Crossing, PlanError as PlanError
    from dream_trainer.planning.planner import MeshPlan as MeshPlan, RankPlan as RankPlan, Tried as Tried, plan as plan
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
