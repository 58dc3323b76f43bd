"""Host copies: what was copied stays as it was, in memory that is allocated once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.api import HostCopies
from tests.checkpoint.states import assert_same_bits
from tests.operations import Operations
from tests.worlds import gloo_group, run_world

CPU = torch.device("cpu")


def some_tensors() -> dict[str, Tensor]:
    """Of several types and layouts, with a scalar, an empty one and views."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return {
        "plain": base.clone(),
        "transposed": base.t(),
        "slice": base[:, 1:4],
        "half": torch.randn(3).to(torch.bfloat16),
        "count": torch.tensor(7),
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 5),
        "trained": torch.nn.Parameter(torch.randn(2, 2)),
    }


def new_memory(operations: Operations) -> list[str]:
    makers = ("empty", "clone", "zeros", "_to_copy", "new_")
    return [name for name in operations.names if any(part in name for part in makers)]


@pytest.mark.pitfall(31)
def test_after_warming_no_copy_allocates_and_every_copy_is_in_the_same_place_beside_the_original() -> None:
    tensors, copies = some_tensors(), HostCopies(CPU)
    with Operations() as first:
        copies.warm(tensors)
    assert len(new_memory(first)) == len(tensors)
    with Operations() as later:
        copied = [copies.copy(tensors, at_once=()) for _ in range(3)]
    assert new_memory(later) == []
    assert_same_bits(copied[0], tensors)
    assert not any(copy.requires_grad for copy in copied[0].values())
    places = [{name: copy.data_ptr() for name, copy in each.items()} for each in copied]
    assert places[0] == places[1] == places[2]
    filled = [t.data_ptr() for t in (*copied[0].values(), *tensors.values()) if t.numel()]
    assert len(set(filled)) == len(filled)


@pytest.mark.parametrize("other", [torch.ones(3, 3), torch.ones(2, 2, dtype=torch.float64)], ids=["shape", "dtype"])
def test_a_tensor_that_changed_its_shape_or_type_gets_new_memory(other: Tensor) -> None:
    copies = HostCopies(CPU)
    copies.warm({"a": torch.zeros(2, 2)})
    (copy,) = copies.copy({"a": other}, at_once=()).values()
    assert copy.dtype == other.dtype
    assert torch.equal(copy, other)


@gloo_group()
def copy_shards() -> dict[str, Any]:
    """Copies a tensor sharded unevenly over two ranks, changes the original and puts the copies together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(15.0).reshape(5, 3)
    sharded = distribute_tensor(full.clone(), mesh, [Shard(0)])
    copies = HostCopies(CPU)
    copies.warm({"a": sharded})
    (copy,) = copies.copy({"a": sharded}, at_once=()).values()
    sharded.zero_()
    assert isinstance(copy, DTensor)
    return {
        "same layout": (copy.placements, copy.device_mesh) == (sharded.placements, sharded.device_mesh),
        "bytes": copy.to_local().nbytes,
        "whole": copy.full_tensor(),
    }


def test_each_rank_copies_its_shard_alone() -> None:
    ranks = run_world(copy_shards, 2)
    assert [rank["bytes"] for rank in ranks] == [3 * 3 * 4, 2 * 3 * 4]
    for rank in ranks:
        assert rank["same layout"]
        assert torch.equal(rank["whole"], torch.arange(15.0).reshape(5, 3))
