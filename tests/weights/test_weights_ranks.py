"""Ranks read what their own shards need, whatever the layout, and come to one outcome."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests import api
from tests.api import local_tensor as local
from tests.checkpoint.states import flip, save
from tests.trainer.arithmetic import full, same_bits
from tests.weights.weight_cases import KINDS, Net, State, expected, weights
from tests.worlds import gloo_group, run_world


def fsdp(model: Net) -> None:
    """Over four ranks: 3, 5 and 11 rows, so uneven shards and empty ones."""
    mesh = init_device_mesh("cpu", (4,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def hsdp(model: Net) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def replicas(model: Net) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard")))


def last_dimension(model: Net) -> None:
    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(parameter.ndim - 1)

    # Other dimensions than the first have to be even.
    mesh = init_device_mesh("cpu", (4,))
    model.wide, model.narrow = nn.Linear(4, 8), nn.Linear(8, 4)
    fully_shard(model.wide, mesh=mesh, shard_placement_fn=placement)
    fully_shard(model.narrow, mesh=mesh, shard_placement_fn=placement)


def tensor_parallel(model: Net) -> None:
    """FSDP over tensor parallel: `fully_shard` makes strided placements of what is cut already."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel(), "head": ColwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    model.embed.weight = model.head.weight
    fully_shard(model, mesh=mesh["dp"])


Outcomes = dict[str, list[dict[str, Any]]]

LAYOUTS: dict[str, Callable[[Net], None]] = {
    layout.__name__: layout for layout in (fsdp, hsdp, replicas, last_dimension, tensor_parallel)
}

ONE_OF_EACH_READER = ["hf_sharded", "bare_pt", "checkpoint"]


def same(model: nn.Module, truth: State) -> bool:
    return same_bits({name: full(value) for name, value in model.state_dict().items()}, truth)


def shapes_of(state: State, model: nn.Module) -> State:
    """Values for a layout that needed other sizes."""
    return {
        name: state[name] if name in state and state[name].shape == value.shape else torch.randn(value.shape)
        for name, value in model.state_dict().items()
        if name != "head.weight"
    }


def load_into_every_layout(root: Path, kinds: list[str]) -> dict[str, Any]:
    torch.manual_seed(0)  # the same on all ranks, who write alike and each to a directory of its own
    own = root / str(dist.get_rank())
    own.mkdir()
    outcome: dict[str, Any] = {}
    for layout_name, layout in LAYOUTS.items():
        for kind in kinds:
            model = Net()
            layout(model)
            state = shapes_of(weights(), model)
            path = KINDS[kind](own / f"{layout_name}-{kind}", state)
            report = api.load_weights(model, path)
            truth = {**state, "head.weight": state["embed.weight"]}
            outcome[f"{layout_name}, {kind}"] = same(model, truth) and report.is_complete
        locals_ = [value.to_local() for value in model.parameters() if isinstance(value, DTensor)]
        outcome[f"{layout_name} is sharded"] = len(locals_) > 0
        outcome[f"{layout_name} has empty shards"] = any(part.numel() == 0 for part in locals_)
        outcome[f"{layout_name} is strided"] = any(
            api.shard_dim(placement) is not None and not placement.is_shard()
            for value in model.parameters()
            if isinstance(value, DTensor)
            for placement in value.placements
        )
    return outcome


def come_to_one_outcome(root: Path) -> dict[str, Any]:
    world = api.World(api.DeviceParameters(device="cpu"), shard_by_default=True)
    rank = world.rank
    state = weights()
    outcome: dict[str, Any] = {}

    def attempt(case: str, model: nn.Module, path: Path, **options: Any) -> None:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        try:
            outcome[case] = str(api.load_weights(model, path, world=world, **options))
        except api.CheckpointError as error:
            untouched = all(torch.equal(local(before[name]), local(now)) for name, now in model.state_dict().items())
            outcome[case] = (type(error), str(error), untouched)

    model = Net()
    fully_shard(model, mesh=world.mesh["dp_shard"] if world.mesh is not None else None)
    # Rank 2 alone has no file.
    here = root / f"of rank {rank}"
    if rank != 2:
        KINDS["hf_sharded"](here, state)
    attempt("one rank has no file", model, here)
    # Values of tied names that differ in one row, so in one rank's part.
    other = state["embed.weight"].clone()
    other[0] += 1
    path = KINDS["bare_pt"](root / f"tied of rank {rank}", {**state, "head.weight": other})
    attempt("one rank sees tied names differ", model, path)
    # A checkpoint that four ranks wrote; a shard that one rank alone reads is damaged.
    saved = Net()
    saved.load_state_dict(expected(state))
    fully_shard(saved, mesh=world.mesh["dp_shard"] if world.mesh is not None else None)
    step = save(root, 1, tensors=api.model_tensors({"net": saved}), world=world)
    attempt("checkpoint of four ranks", model, step)
    outcome["checkpoint of four ranks is right"] = same(model, expected(state))
    world.barrier()
    if rank == 0:
        flip(step / "__3_0.distcp")
    world.barrier()
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).zero_()
    attempt("a shard is damaged", model, step)
    # Under a pipeline each rank holds other layers; the file has one more than all ranks together.
    stage: nn.Module = nn.ModuleDict({f"layer{rank}": nn.Linear(2, 2)})
    layers = {f"layer{index}.weight": torch.ones(2, 2) for index in range(5)}
    layers |= {f"layer{index}.bias": torch.ones(2) for index in range(4)}
    path = KINDS["safetensors_file"](root / f"stages of rank {rank}", layers)
    attempt("a layer of no stage", stage, path)
    attempt("a layer of no stage, not strict", stage, path, strict=False)
    outcome["stage is right"] = all((value == 1).all() for value in stage.parameters())
    world.close()
    return outcome


LAYERS, WIDTH = 12, 2048  # 16 MiB each, 192 MiB together


def peak_of(function: Callable[[], object]) -> int:
    """Bytes by which this process's resident memory, mapped files included, grows at most while `function` runs."""
    process = psutil.Process()
    before = process.memory_info().rss
    samples, done = [before], threading.Event()

    def sample() -> None:
        while not done.wait(0.0005):
            samples.append(process.memory_info().rss)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        function()
    finally:
        samples.append(process.memory_info().rss)
        done.set()
        sampler.join()
    return max(samples) - before


def measure_loading(paths: dict[str, Path]) -> dict[str, tuple[int, bool]]:
    mesh = init_device_mesh("cpu", (4,))
    outcome = {}
    for kind, path in paths.items():
        with torch.device("meta"):
            model = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.zeros_(parameter)  # so that its pages are there
        peak = peak_of(lambda model=model, path=path: api.load_weights(model, path))  # type: ignore[misc]
        mine = torch.arange(WIDTH).view(4, -1)[dist.get_rank()] / WIDTH
        right = all(
            torch.equal(local(layer.weight), (index + mine)[:, None].expand(-1, WIDTH))
            for index, layer in enumerate(model)
        )
        outcome[kind] = (peak, right)
    return outcome


def large_state() -> State:
    """Layer i has the values i + row / WIDTH."""
    rows = torch.arange(WIDTH)[:, None] / WIDTH
    return {f"{index}.weight": (index + rows).expand(-1, WIDTH).contiguous() for index in range(LAYERS)}


def on_each_rank(root: Path, large: dict[str, Path], kinds: list[str]) -> dict[str, Any]:
    with gloo_group():
        memory = measure_loading(large)  # first, while the heap has no room left by others
        layouts = load_into_every_layout(root, kinds)
    return {"memory": memory, "layouts": layouts, "agreement": come_to_one_outcome(root)}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, all_cases: bool) -> Outcomes:
    root, large = tmp_path_factory.mktemp("weights"), tmp_path_factory.mktemp("large")
    state = large_state()
    paths = {kind: KINDS[kind](large / kind, state) for kind in ONE_OF_EACH_READER}
    del state
    results = run_world(on_each_rank, 4, root, paths, list(KINDS) if all_cases else ONE_OF_EACH_READER, timeout=280)
    shutil.rmtree(large)
    return {part: [result[part] for result in results] for part in results[0]}


def test_a_load_takes_no_more_than_the_ranks_shard_twice_and_one_tensor(outcomes: Outcomes) -> None:
    tensor = WIDTH * WIDTH * 4
    shard = LAYERS * tensor // 4
    for outcome in outcomes["memory"]:
        for kind, (peak, right) in outcome.items():
            assert right, kind
            # Files are mapped, in pages of up to 2 MiB, and the pages that were read count as memory: 74 MiB of the 192
            # here. Reading whole tensors takes more than all 192.
            assert peak < 2 * shard + tensor, f"{kind}: {peak / 2**20:.0f} MiB"


def test_every_layout_is_filled_from_every_kind_as_one_process_would_be(outcomes: Outcomes) -> None:
    for outcome in outcomes["layouts"]:
        wrong = [case for case, right in outcome.items() if "," in case and not right]
        assert not wrong
        assert all(outcome[f"{layout} is sharded"] for layout in LAYOUTS)
        strided = {layout for layout in LAYOUTS if outcome[f"{layout} is strided"]}
        assert strided == {"tensor_parallel"}
    assert any(outcome["fsdp has empty shards"] for outcome in outcomes["layouts"])


def test_ranks_come_to_one_outcome_and_write_nothing_if_one_of_them_fails(outcomes: Outcomes) -> None:
    told = {
        "one rank has no file": (api.CheckpointError, "rank 2: "),
        "one rank sees tied names differ": (api.CheckpointError, "1 mismatched: head.weight (tied to embed.weight"),
        "a shard is damaged": (api.DamagedCheckpointError, "__3_0.distcp is damaged"),
        "a layer of no stage": (api.CheckpointError, "1 unexpected (not in the model): layer4.weight"),
    }
    for outcome in outcomes["agreement"]:
        for case, (kind, words) in told.items():
            raised, message, untouched = outcome[case]
            assert raised is kind, case
            assert words in message
            assert untouched, case
        assert outcome["checkpoint of four ranks is right"]
        assert outcome["a layer of no stage, not strict"].startswith("8 of the model's 8 tensors loaded")
        assert outcome["stage is right"]
        assert outcome["a layer of no stage, not strict"] == outcomes["agreement"][0]["a layer of no stage, not strict"]
