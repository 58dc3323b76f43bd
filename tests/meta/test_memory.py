"""A rank's memory peaks at its shard plus one block."""

import resource

import pytest
import torch.distributed as dist
from torch import nn

from tests.api import materialize
from tests.worlds import gloo_group, run_world

from .building import planned


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _deep(width: int, depth: int) -> nn.Module:
    layers = (nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True) for _ in range(depth))
    return nn.Sequential(*layers)


@gloo_group()
def measure(width: int, depth: int) -> dict[str, float]:
    """Peak resident memory above the start, and what it is made of, in MB."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(nn.Linear(2, 2), mesh=mesh)
    small, plan = planned(lambda: _deep(8, 1))
    materialize({"model": small}, plan, "cpu")  # what a first use imports is not the model's
    base = _peak_mb()
    model, plan = planned(lambda: _deep(width, depth))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    materialize({"model": model}, plan, "cpu")
    shard = sum(p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes for p in model.parameters()) / 2**20
    block = sum(p.numel() * p.element_size() for p in model[0].parameters()) / 2**20
    peak = _peak_mb() - base
    return {"peak": peak, "shard": shard, "block": block}


@pytest.mark.slow
def test_memory_peaks_at_the_shard_plus_one_block() -> None:
    for rank in run_world(measure, 2, 1024, 8, fresh=True):
        assert rank["shard"] > 190
        assert rank["peak"] <= 1.15 * (rank["shard"] + rank["block"]), rank
