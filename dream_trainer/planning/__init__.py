"""Plans: what a rank of any number of ranks would hold and send, without them. `dream-trainer plan` prints one."""

from dream_trainer.planning.planned_trainer import Crossing, PlanError, RankPlan
from dream_trainer.planning.planner import MeshPlan, Tried, plan

__all__ = ["Crossing", "MeshPlan", "PlanError", "RankPlan", "Tried", "plan"]
