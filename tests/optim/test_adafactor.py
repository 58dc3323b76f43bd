"""Our Adafactor steps as PyTorch's in one process, however its parameters lie on ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer.optim import Adafactor
from tests.worlds import run_world

# Matrices, a vector, a scalar, a row, a column (whose statistics have the parameter's shape), and a convolution's. On
# four ranks some have no row.
SHAPES = ((5, 3), (3, 6), (8, 8), (7,), (), (1, 4), (4, 1), (5, 3, 2, 2))
UNUSED = (1, 2)  # place and step: the parameter has no gradient then
STEPS, LR = 4, 0.5


def drawn(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def gradients(step: int) -> list[Tensor | None]:
    return [None if (place, step) == UNUSED else gradient for place, gradient in enumerate(drawn(1 + step))]


def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": parameters[:3], "weight_decay": 0.1},
        {"params": parameters[3:], "lr": 0.01, "d": 1.5, "eps": (1e-5, 1e-2), "beta2_decay": -0.5, "maximize": True},
    ]


def stepped(parameters: list[nn.Parameter], cls: type[torch.optim.Adafactor]) -> list[Tensor]:
    """Weights and statistics after some steps, as whole tensors."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    optimizer = cls(groups(parameters), lr=LR, foreach=True)
    for step in range(STEPS):
        for p, gradient in zip(parameters, gradients(step), strict=True):
            if isinstance(p, DTensor) and gradient is not None:
                p.grad = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
            else:
                p.grad = gradient
        optimizer.step()
    found = [*parameters, *(value for p in parameters for _, value in sorted(optimizer.state[p].items()))]
    return [tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach() for tensor in found]


def by_pytorch() -> list[Tensor]:
    return stepped([nn.Parameter(value) for value in drawn(0)], torch.optim.Adafactor)


def layouts() -> dict[str, Any]:
    """On each of four ranks: results under every layout."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    cases: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "rows over four": (line, (Shard(0),)),
        "columns over four": (line, (Shard(1),)),
        "rows over two, copied over two": (square, (Replicate(), Shard(0))),
        "rows and columns": (square, (Shard(0), Shard(1))),
    }
    results: dict[str, Any] = {}
    for name, (mesh, placements) in cases.items():
        parameters = []
        for value in drawn(0):
            if value.ndim == 1 and name == "rows and columns":  # a plain one among sharded ones
                parameters.append(nn.Parameter(value))
                continue
            fitting = [p if not isinstance(p, Shard) or p.dim < value.ndim else Replicate() for p in placements]
            parameters.append(nn.Parameter(distribute_tensor(value, mesh, fitting, src_data_rank=None)))
        results[name] = stepped(parameters, Adafactor)
    results["beside tensor parallelism"] = trained(sharded=True)
    dist.destroy_process_group()
    return results


LAYOUTS = ("rows over four", "columns over four", "rows over two, copied over two", "rows and columns")


def trained(*, sharded: bool = False) -> list[Tensor]:
    """Two linear layers after three steps, over (2, 2) ranks with strided shards, or in one process by PyTorch's."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    cls = torch.optim.Adafactor
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(module, mesh=mesh["dp"])
        x = x.chunk(2)[mesh["dp"].get_local_rank()]
        cls = Adafactor
    optimizer = cls(module.parameters(), lr=0.1)
    for _ in range(3):
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    from torch.distributed.tensor import DTensor

    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in module.parameters()]


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    return run_world(layouts, 4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_and_statistics_are_pytorchs_in_one_process(layout: str, world: list[dict[str, Any]]) -> None:
    for results in world:
        for found, expected in zip(results[layout], by_pytorch(), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_beside_tensor_parallelism_steps_are_those_of_one_process(world: list[dict[str, Any]]) -> None:
    for results in world:
        for found, expected in zip(results["beside tensor parallelism"], trained(), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


def test_in_one_process_steps_are_those_of_pytorch_bit_for_bit() -> None:
    ours = stepped([nn.Parameter(value) for value in drawn(0)], Adafactor)
    assert all(torch.equal(found, expected) for found, expected in zip(ours, by_pytorch(), strict=True))


def test_a_copy_and_a_closure_step_too() -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = copy.deepcopy(Adafactor([parameter]))
    (copied,) = optimizer.param_groups[0]["params"]
    copied.grad = torch.ones(3, 2)
    assert optimizer.step(lambda: 7.0) == 7.0
    assert not torch.equal(copied, parameter)
