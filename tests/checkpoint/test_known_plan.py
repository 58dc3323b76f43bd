"""A save whose tensors lie as the last one's did is not planned again, and holds what it should."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.api import KnownPlan, Ranks, load_tensors, write_checkpoint
from tests.checkpoint.states import make_snapshot
from tests.trainer.arithmetic import full
from tests.worlds import gloo_group, run_world


class Saves:
    """Saves one after the other, counting those that are planned on this rank."""

    def __init__(self, root: Path, world: Ranks) -> None:
        self.root = root
        self.world = world
        self.known = KnownPlan()
        self.planned = 0

    def save(self, step: int, tensors: dict[str, Tensor]) -> bool:
        """Returns whether the save was planned, after it was read back and compared."""
        original = DefaultSavePlanner.create_local_plan
        planned = self.planned

        def counted(planner: DefaultSavePlanner) -> Any:
            self.planned += 1
            return original(planner)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DefaultSavePlanner, "create_local_plan", counted)
            snapshot = make_snapshot(step, tensors=tensors)
            path = write_checkpoint(self.root, snapshot, world=self.world, known=self.known)
        loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        load_tensors(path, loaded, world=self.world)
        for name, tensor in tensors.items():
            assert torch.equal(full(loaded[name]), full(tensor)), name
        return self.planned > planned


def test_only_a_save_of_other_tensors_is_planned(tmp_path: Path) -> None:
    saves = Saves(tmp_path, Ranks.alone())
    assert saves.save(1, {"a": torch.ones(3), "b": torch.zeros(2, 2)})
    assert not saves.save(2, {"a": torch.full((3,), 2.0), "b": torch.ones(2, 2)})
    assert not saves.save(3, {"b": torch.full((2, 2), 3.0), "a": torch.ones(3)})
    assert saves.save(4, {"a": torch.ones(4), "b": torch.zeros(2, 2)})
    assert saves.save(5, {"a": torch.ones(4).double(), "b": torch.zeros(2, 2)})
    assert saves.save(6, {"a": torch.ones(4).double()})
    assert not saves.save(7, {"a": torch.ones(4).double() * 7})


@gloo_group()
def over_two_ranks(root: Path) -> list[bool]:
    saves, mesh, rank = Saves(root, Ranks.of_default_group()), init_device_mesh("cpu", (2,)), dist.get_rank()

    def tensors(value: float, placement: Any, *, mine: bool = False) -> dict[str, Tensor]:
        whole = torch.arange(10).view(5, 2) * value
        found = {"a": distribute_tensor(whole, mesh, [placement]), "b": torch.full((3,), value)}
        return found | {"c": torch.full((2,), value)} if mine and rank == 1 else found

    return [
        saves.save(1, tensors(1.0, Shard(0))),
        saves.save(2, tensors(2.0, Shard(0))),
        saves.save(3, tensors(3.0, Replicate())),
        saves.save(4, tensors(4.0, Replicate(), mine=True)),
        saves.save(5, tensors(5.0, Replicate(), mine=True)),
    ]


def test_ranks_plan_again_if_the_tensors_of_one_of_them_lie_otherwise(tmp_path: Path) -> None:
    assert run_world(over_two_ranks, 2, tmp_path) == [[True, False, True, True, False]] * 2
