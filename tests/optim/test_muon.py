"""Our Muon steps as PyTorch's in one process, bit for bit, however its matrices lie on ranks, and each on one rank."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dream_trainer.optim import muon
from tests.api import Muon, deal
from tests.trainer.arithmetic import full
from tests.worlds import gloo_group, run_world

# Tall, wide, square, a single row or column; 5 rows on 4 ranks leave one without any.
SHAPES = ((5, 3), (3, 5), (8, 8), (1, 4), (4, 1), (16, 7), (6, 6))
UNUSED = (1, 2)  # place and step: the matrix has no gradient then
LR = 0.1


def matrices(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def gradients(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(1 + step)
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    return [None if (place, step) == UNUSED else gradient for place, gradient in enumerate(drawn)]


def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 2 * LR, "nesterov": False, "ns_steps": 4}]


def matrices_as_parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(matrix) for matrix in matrices(dtype)]


def after_four_steps(cls: type[torch.optim.Muon], given: list[Any], **options: Any) -> list[Tensor]:
    """Weights and momentum of parameters of any layout, or of groups of them, as whole tensors."""
    optimizer = cls(given, lr=LR, **options)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in range(4):
        for p, gradient in zip(parameters, gradients(step, parameters[0].dtype), strict=True):
            if isinstance(p, DTensor) and gradient is not None:
                p.grad = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
            else:
                p.grad = gradient
        optimizer.step()
    found = [*parameters, *(optimizer.state[p]["momentum_buffer"] for p in parameters)]
    return [full(tensor).detach() for tensor in found]


SHARDED: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "rows over four": ((4,), (Shard(0),)),
    "columns over four": ((4,), (Shard(1),)),
    "copied over four": ((4,), (Replicate(),)),
    "rows over two, copied over two": ((2, 2), (Replicate(), Shard(0))),
    "columns over two, copied over two": ((2, 2), (Shard(1), Replicate())),
    "rows and columns": ((2, 2), (Shard(0), Shard(1))),
}
LAYOUTS = (*SHARDED, "plain, shared", "plain, each for itself")
REPEATED = ("rows and columns", "plain, each for itself")


@gloo_group()
def layouts() -> dict[str, Any]:
    """On each of four ranks: results under every layout, and how many matrices this rank orthogonalised in all."""
    meshes = {shape: init_device_mesh("cpu", shape) for shape in ((4,), (2, 2))}
    results: dict[str, Any] = {}
    counted, calls = muon.orthogonalised, 0

    def count(*args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return counted(*args)

    muon.orthogonalised = count
    for name, (shape, placements) in SHARDED.items():
        parameters = [
            nn.Parameter(distribute_tensor(matrix, meshes[shape], placements, src_data_rank=None))
            for matrix in matrices()
        ]
        calls = 0
        results[name] = after_four_steps(Muon, groups(parameters)), calls
    for name, replicas in (("plain, shared", dist.group.WORLD), ("plain, each for itself", None)):
        calls = 0
        results[name] = after_four_steps(Muon, groups(matrices_as_parameters()), replicas=replicas), calls
    muon.orthogonalised = counted
    results["beside tensor parallelism"] = [p.full_tensor().detach() for p in trained(sharded=True)]
    return results


def trained(*, sharded: bool = False) -> list[Any]:
    """Two linear layers after three steps in float64, iterated in float64; or over (2, 2) ranks.

    `fully_shard` cuts rows that are cut already into strided shards.
    """
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    if sharded:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(module, mesh=mesh["dp"])
        x = x.chunk(2)[mesh["dp"].get_local_rank()]
    optimizer = Muon(module.parameters(), lr=LR, iteration_dtype=torch.float64)
    for _ in range(3):
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(module.parameters())


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    return run_world(layouts, 4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_and_momentum_are_pytorchs_bits_in_one_process(layout: str, world: list[dict[str, Any]]) -> None:
    expected = after_four_steps(torch.optim.Muon, groups(matrices_as_parameters()))
    for results in world:
        assert all(map(torch.equal, results[layout][0], expected))


def test_beside_tensor_parallelism_steps_are_those_of_one_process(world: list[dict[str, Any]]) -> None:
    for results in world:
        for found, expected in zip(results["beside tensor parallelism"], trained(), strict=True):
            torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-11)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_matrix_is_orthogonalised_on_one_rank(layout: str, world: list[dict[str, Any]]) -> None:
    calls = [results[layout][1] for results in world]
    once = 4 * len(SHAPES) - 1  # one has no gradient in one step
    assert sum(calls) == (4 * once if layout in REPEATED else once)
    assert min(calls) > 0


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float64, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}),
        (torch.bfloat16, {"momentum": 0.8, "adjust_lr_fn": "original"}),
    ],
)
def test_in_one_process_steps_are_those_of_pytorch_bit_for_bit(dtype: torch.dtype, options: dict[str, Any]) -> None:
    ours, theirs = (after_four_steps(cls, matrices_as_parameters(dtype), **options) for cls in (Muon, torch.optim.Muon))
    assert all(map(torch.equal, ours, theirs))


def test_a_step_with_found_inf_changes_nothing_and_one_without_all() -> None:
    guarded, free = matrices_as_parameters(), matrices_as_parameters()
    ours, theirs = Muon(guarded, lr=LR), Muon(free, lr=LR)
    for step in (0, 1):
        for p, q, gradient in zip(guarded, free, gradients(step), strict=True):
            p.grad, q.grad = gradient, gradient
        ours.found_inf = torch.zeros(())
        ours.step()
        theirs.step()
        for p in guarded:
            p.grad = torch.full_like(p, float("nan"))
        ours.found_inf = torch.ones(())
        ours.step()
    for p, q in zip(guarded, free, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(ours.state[p]["momentum_buffer"], theirs.state[q]["momentum_buffer"])


def test_state_of_pytorchs_muon_loads() -> None:
    theirs, ours = matrices_as_parameters(), matrices_as_parameters()
    optimizer, resumed = torch.optim.Muon(theirs, lr=LR), Muon(ours, lr=1.0)
    for step in range(4):
        for p, q, gradient in zip(theirs, ours, gradients(step), strict=True):
            p.grad, q.grad = gradient, gradient
        if step == 2:
            with torch.no_grad():
                for p, q in zip(theirs, ours, strict=True):
                    q.copy_(p)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()
        resumed.step()
    for p, q in zip(theirs, ours, strict=True):
        assert torch.equal(p, q)


def test_matrices_are_dealt_by_cost_and_alike_on_every_rank() -> None:
    assert deal([5, 1, 4, 1, 3], 2) == [0, 0, 1, 0, 1]
    costs = [float(1 + i * 7 % 13) for i in range(100)]
    owners = deal(costs, 8)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == hand) for hand in range(8)]
    assert max(loads) - min(loads) <= 1
    assert deal([], 4) == []
