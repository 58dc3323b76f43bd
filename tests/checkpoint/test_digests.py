"""A digest of values: equal where dtype, shape and bits are, however a tensor is sharded, and else another."""

import pytest
import torch
from torch import Tensor

from tests.api import Ranks, value_digests
from tests.worlds import gloo_group, run_world

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex128, torch.int64, torch.bool)


def digest(tensor: Tensor) -> str:
    return value_digests({"it": tensor}, world=Ranks.alone())["it"]


def some(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_element_decides(dtype: torch.dtype) -> None:
    tensor = some(5, 7).to(dtype)
    before = digest(tensor)
    assert digest(tensor.clone()) == digest(tensor.t().contiguous().t()) == before
    first, last = tensor[0, 0].item(), tensor[4, 6].item()
    tensor[4, 6] = not last if dtype is torch.bool else last + 1
    assert digest(tensor) != before
    tensor[4, 6] = last
    assert digest(tensor) == before
    if first != last:
        tensor[0, 0], tensor[4, 6] = last, first
        assert digest(tensor) != before


def test_what_is_equal_as_numbers_but_not_as_bits_differs() -> None:
    ones = torch.ones(4)
    assert len({digest(t) for t in (ones, ones.double(), ones.view(2, 2), torch.ones(5), ones * -1)}) == 5
    assert digest(torch.zeros(2)) != digest(-torch.zeros(2))
    assert digest(torch.empty(0, 3)) == digest(torch.empty(0, 3)) != digest(torch.empty(3, 0))
    assert digest(torch.tensor(1.0)) != digest(torch.tensor(2.0))


@gloo_group()
def digests_of_layouts() -> list[dict[str, str]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    wholes = {"matrix": some(7, 10), "row": some(3), "cube": some(5, 2, 6)}
    layouts = [
        lambda t: t,
        lambda t: distribute_tensor(t, mesh, [Shard(0)]),
        lambda t: distribute_tensor(t, mesh, [Shard(t.ndim - 1)]),
        lambda t: distribute_tensor(t, square, [Replicate(), Shard(0)]),
        lambda t: distribute_tensor(t, square, [Shard(0), Shard(t.ndim - 1)]),
        lambda t: distribute_tensor(t, square, [Shard(0), Shard(0)]),
    ]
    return [value_digests({n: cut(t) for n, t in wholes.items()}, world=Ranks.of_default_group()) for cut in layouts]


def test_sharding_does_not_show() -> None:
    alone = {"matrix": digest(some(7, 10)), "row": digest(some(3)), "cube": digest(some(5, 2, 6))}
    for rank in run_world(digests_of_layouts, 4):
        assert rank == [alone] * 6
