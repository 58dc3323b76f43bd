"""Merging DCP's plans of some of a job's ranks: PyTorch's own merge refuses tensors of which they have a part."""

from __future__ import annotations

from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan


def merge_plans_of_parts(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """As `DefaultSavePlanner.create_global_plan`, but nobody asks whether the parts are all of each tensor."""
    return create_default_global_save_plan(dedup_save_plans(plans))
