"""Several ranks write one checkpoint, any number of them reads it, and all come to one outcome."""

import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests import api
from tests.checkpoint.states import assert_same_bits, flip, outcome, save, some_tensors
from tests.trainer.arithmetic import full
from tests.worlds import run_world

Bits = dict[str, Tensor]


class Net(nn.Module):
    """Dimensions that no world size divides, tied weights, and BatchNorm statistics that differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 7)
        self.norm = nn.BatchNorm1d(7)
        self.second = nn.Linear(7, 3)
        self.tied = nn.Linear(3, 7)
        self.tied.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.tied(self.second(self.norm(self.first(inputs)).tanh()))


def build(seed: int, mesh: DeviceMesh) -> dict[str, nn.Module]:
    torch.manual_seed(seed)
    models = {"net": Net(), "critic": nn.Linear(7, 1)}
    for model in models.values():
        fully_shard(model, mesh=mesh)
    return models


def bits(tensors: dict[str, Tensor]) -> Bits:
    """The full values of all tensors; every rank must ask for them."""
    return {name: full(value).detach().clone() for name, value in tensors.items()}


def open_world() -> api.World:
    return api.World(api.DeviceParameters(device="cpu"), shard_by_default=True)


def save_two(root: Path) -> dict[str, Any]:
    world = open_world()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    models = build(0, mesh)
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(world.rank))
    models["net"](inputs).sum().backward()  # after which what was gathered is sharded again
    tensors = api.model_tensors(models)
    buffers = api.rank_buffers(models, world=world)
    mean = models["net"].norm.running_mean
    path = save(
        root / "checkpoints",
        3,
        tensors=tensors,
        rank_state={"position": world.rank + 10},
        rank_tensors=buffers,
        world=world,
    )
    report: dict[str, Any] = {"path": path, "bits": bits(tensors), "buffers": sorted(buffers), "mean": mean.tolist()}

    again = build(1, mesh)
    api.load_tensors(path, api.model_tensors(again), world=world)
    state, mine = api.read_rank(path, world.rank)
    api.load_rank_buffers(again, mine)
    report |= {"position": state["position"], "mean again": again["net"].norm.running_mean.tolist()}
    report["faults"] = faults(root / "faults", world)
    world.close()
    return report


def faults(root: Path, world: api.World) -> dict[str, Any]:
    """Each fault is on rank 1 only; what each rank was told, and what is left in the directory."""
    second = world.rank == 1
    told: dict[str, Any] = {}
    save(root, 1, world=world)
    meta = {"x": torch.zeros(1, device="meta" if second else "cpu")}
    told["state"] = outcome(lambda: save(root, 2, rank_tensors=meta, world=world))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if second:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    rank_tensors = {"noise": torch.zeros(1 << 17)}
    told["rank file"] = outcome(lambda: save(root, 2, rank_tensors=rank_tensors, world=world))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    world.barrier()
    told["left"] = sorted(entry.name for entry in root.iterdir())
    world.barrier()  # rank 0's next save begins with a temporary directory
    told["later"] = outcome(lambda: save(root, 2, world=world))

    wrong = some_tensors() if not second else {**some_tensors(), "models.net.steps": torch.tensor(1.0)}
    told["dtype"] = outcome(lambda: api.load_tensors(root / "step_00000002", wrong, world=world))
    return told


def damage_on_four(path: Path, damaged: Path, expected: Bits) -> dict[str, str]:
    """Loads onto FSDP over four and HSDP 2x2, then a checkpoint of which one shard is damaged."""
    world = open_world()
    meshes = {
        "fsdp": init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",)),
        "hsdp": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")),
    }
    told = {}
    for name, mesh in meshes.items():
        models = build(2, mesh)
        tensors = api.model_tensors(models)
        api.load_tensors(path, tensors, world=world)
        assert_same_bits(bits(tensors), expected)
        assert models["net"].tied.weight is models["net"].first.weight
        told[name] = "ok"
    told["verify"] = outcome(lambda: api.verify_checkpoint(damaged, world=world))
    told["load"] = outcome(lambda: api.load_tensors(damaged, tensors, world=world))
    world.close()
    return told


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two ranks of one world report, who saved with FSDP2."""
    return run_world(save_two, 2, tmp_path_factory.mktemp("two"))


def test_all_ranks_write_one_checkpoint(saved: list[dict[str, Any]]) -> None:
    path = saved[0]["path"]
    manifest = api.verify_checkpoint(path, world=api.Ranks.alone())
    assert manifest.world_size == 2
    assert {"__0_0.distcp", "__1_0.distcp", "rank_00000.json", "rank_00001.json"} < set(manifest.files)
    assert saved[1]["path"] == path


@pytest.mark.pitfall(33)
def test_each_rank_gets_its_own_state_back(saved: list[dict[str, Any]]) -> None:
    assert [report["position"] for report in saved] == [10, 11]


def test_statistics_that_differ_between_ranks_come_back_to_each(saved: list[dict[str, Any]]) -> None:
    assert saved[0]["mean"] != saved[1]["mean"]
    assert [report["mean again"] for report in saved] == [report["mean"] for report in saved]
    assert [report["buffers"] for report in saved] == [
        [],
        ["models.net.norm.running_mean", "models.net.norm.running_var"],
    ]


@pytest.mark.pitfall(68)
def test_two_sharded_ranks_load_onto_four_and_onto_hsdp(saved: list[dict[str, Any]], tmp_path: Path) -> None:
    path = saved[0]["path"]
    damaged = shutil.copytree(path, tmp_path / path.name)
    flip(damaged / "__1_0.distcp")
    told = run_world(damage_on_four, 4, path, damaged, saved[0]["bits"])
    assert told == [told[0]] * 4
    assert told[0]["fsdp"] == told[0]["hsdp"] == "ok"
    for fault in (told[0]["verify"], told[0]["load"]):
        assert fault.startswith("DamagedCheckpointError: ")
        assert f"{damaged / '__1_0.distcp'} is damaged" in fault


def test_a_fault_on_one_rank_is_told_alike_on_all_and_leaves_nothing(saved: list[dict[str, Any]]) -> None:
    first, second = (report["faults"] for report in saved)
    assert first == second
    assert first["state"].startswith("CheckpointError: Could not write the checkpoint of step 2")
    assert "rank 1: NotImplementedError: Cannot copy out of meta tensor" in first["state"]
    assert "rank 1: OSError: [Errno 27] File too large" in first["rank file"]
    assert first["left"] == ["step_00000001"]
    assert first["later"] == "ok"
    assert first["dtype"].startswith("CheckpointError: ")
    assert "rank 1: shapes or dtypes differ: models.net.steps" in first["dtype"]
