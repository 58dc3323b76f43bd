"""DTensors on a CPU draw from each rank's generator, which `keep_own_generators` leaves alone; tests/gpu has more."""

import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from tests.api import keep_own_generators
from tests.worlds import run_world


def drawn(rank_seeds: tuple[int, int]) -> tuple[list[float], list[float]]:
    """By a DTensor, and by a plain tensor with the same seed."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    seed = rank_seeds[dist.get_rank()]
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keep_own_generators(mesh)
    assert torch.equal(torch.get_rng_state(), before)
    ones = distribute_tensor(torch.ones(64), mesh, [Replicate()])
    by_dtensor = F.dropout(ones).to_local().tolist()
    torch.manual_seed(seed)
    plain = F.dropout(torch.ones(64)).tolist()
    dist.destroy_process_group()
    return by_dtensor, plain


def test_ranks_with_other_generators_draw_other_numbers_and_with_the_same_the_same() -> None:
    (first, plain_first), (second, plain_second) = run_world(drawn, 2, (1, 2))
    assert first == plain_first != second == plain_second
    (first, _), (second, _) = run_world(drawn, 2, (3, 3))
    assert first == second
