"""What PyTorch's schedules do with stages of ours: every micro-batch once, gradients that add up, reduced when told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from dream_trainer.compat.pipelining import ONE_STAGE, ScheduledStage, as_tuple, new_schedule
from tests.worlds import run_world

ROWS, WIDTH = 3, 4


def run_batches(schedule: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    layers, x = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), torch.randn(4, ROWS, WIDTH, dtype=torch.float64)
    expected = [p.detach().clone() for p in layers.parameters()]
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    fully_shard(layers, mesh=mesh["dp"], reshard_after_forward=False)
    ran: list[int] = []

    def run(args: tuple[Any, ...], micro_batch: int) -> Any:
        assert rank == 1 or int(args[0]) == micro_batch
        ran.append(micro_batch)
        # Turned, so that neither what is sent on nor what is sent back lies in order.
        output = layers(x[int(args[0])] if rank == 0 else args[0].T).T
        return output.square().sum() if rank == 1 else output

    between = torch.empty(WIDTH, ROWS, dtype=torch.float64, device="meta", requires_grad=True)
    stage = ScheduledStage(
        layers,
        run,
        place=(rank, 2),
        inputs=[torch.arange(1)] if rank == 0 else [between],
        outputs=[between] if rank == 0 else [torch.empty(())],
        device=torch.device("cpu"),
        group=dist.group.WORLD,  # type: ignore[arg-type]
    )
    batch = new_schedule(schedule, [stage], 4)
    stage.reduces = False
    batch(rank == 0, rank == 1)
    layers.reshard()  # what is gathered has gradients that nobody has reduced
    before = [p.grad for p in layers.parameters()]
    stage.reduces = True
    batch(rank == 0, rank == 1)
    found = {
        "ran": ran,
        "before": before,
        "x": x,
        "weights": expected,
        "gradients": [p.grad.full_tensor() for p in layers.parameters()],  # type: ignore[union-attr]
    }
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("schedule", ONE_STAGE)
def test_gradients_of_two_batches_add_up_and_are_reduced_at_the_last(schedule: str) -> None:
    first, last = run_world(run_batches, 2, schedule)
    weights = [w.requires_grad_() for part in (first, last) for w in part["weights"]]
    x = first["x"].flatten(0, 1)
    output = (x @ weights[0].T + weights[1]) @ weights[2].T + weights[3]
    (2 * output.square().sum()).backward()
    for found, expected in zip([*first["gradients"], *last["gradients"]], weights, strict=True):
        torch.testing.assert_close(found, expected.grad, rtol=1e-12, atol=1e-12)
    assert first["before"] == last["before"] == [None, None]
    assert sorted(first["ran"]) == sorted(last["ran"]) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_what_a_stage_gives_becomes_the_next_ones_arguments() -> None:
    x = torch.zeros(1)
    assert as_tuple(x) == as_tuple([x]) == as_tuple((x,)) == (x,)
