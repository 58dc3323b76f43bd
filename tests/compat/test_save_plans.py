"""Plans of some ranks are merged as PyTorch merges those of all, but for what it refuses."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from tests.api import merge_plans_of_parts


def plan_of(**tensors: torch.Tensor) -> SavePlan:
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(tensors, is_coordinator=True)
    return planner.create_local_plan()


def half_of(plan: SavePlan) -> SavePlan:
    """As of a rank that has the first half of the rows."""
    (item,) = plan.items
    assert item.tensor_data is not None
    chunk = replace(item.tensor_data.chunk, sizes=torch.Size((2, 3)))
    return replace(plan, items=[replace(item, tensor_data=replace(item.tensor_data, chunk=chunk))])


def test_what_several_ranks_have_is_written_by_one_and_parts_are_taken() -> None:
    both = plan_of(a=torch.zeros(4, 3), b=torch.zeros(2))
    merged, metadata = merge_plans_of_parts([both, both])
    theirs, their_metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan([both, both])
    assert (merged, metadata) == (theirs, their_metadata)
    assert sorted(item.index.fqn for plan in merged for item in plan.items) == ["a", "b"]

    half = half_of(plan_of(a=torch.zeros(4, 3)))
    with pytest.raises(ValueError, match="Failed to validate"):
        DefaultSavePlanner(flatten_state_dict=False).create_global_plan([half, half])
    _, metadata = merge_plans_of_parts([half, half])
    record = metadata.state_dict_metadata["a"]
    assert record.size == torch.Size((4, 3))
    assert [chunk.sizes for chunk in record.chunks] == [torch.Size((2, 3))]
