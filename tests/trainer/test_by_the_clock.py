"""What goes by the clock: validations, and how long ranks wait for one another before and after the first step."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dream_trainer as dt
from tests.api import DistributedDataLoader, World
from tests.trainer.small import Batch, Samples, Spread, Validates, make_config
from tests.worlds import run_world

START, STEP = 1000.0, 100.0
DEVICES = dt.DeviceParameters(device="cpu", start_timeout_seconds=START, step_timeout_seconds=STEP)


class Timed(Validates, Spread):
    """Each step takes a minute by the clocks of some ranks, and no time by the others'."""

    def __init__(self, config: Any, slow_ranks: tuple[int, ...]) -> None:
        super().__init__(config, *(DistributedDataLoader(Samples(length), 2) for length in (24, 4)))
        self.slow_ranks, self.minutes = slow_ranks, 0.0
        self.validated_at: list[int] = []
        self.patience: list[float] = []
        self.timeouts: list[set[timedelta]] = []
        schedule = self._runtime.schedule
        schedule._clock = schedule.validations._clock = lambda: 60 * self.minutes

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.minutes += self.world.rank in self.slow_ranks
        self.patience.append(self._runtime.session.watchdog.limit_seconds())
        if self.world.world_size > 1:
            self.timeouts.append(timeouts(self.world))
        return super().training_step(batch, batch_idx)

    def pre_val_epoch(self) -> None:
        self.validated_at.append(self.global_step)


def timeouts(world: World) -> set[timedelta]:
    """How long collectives may take, of every group that the step path uses."""
    groups = [dist.group.WORLD, world.cpu_group, world.data_group, *world.mesh.get_all_groups()]
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups if group is not None}


def train(slow_ranks: tuple[int, ...], minutes: float) -> Timed:
    config = make_config(n_epochs=1, val_every_minutes=minutes, val_every_n_epochs=None, devices=DEVICES)
    with Timed(config, slow_ranks) as trainer:
        trainer.fit()
        return trainer


@pytest.mark.parametrize(("minutes", "steps"), [(1.0, [2, 4, 6, 8, 10, 12]), (5.0, [6, 12]), (5.5, [7])])
def test_minutes_between_validations_are_minutes(minutes: float, steps: list[int]) -> None:
    """The clock is read before a step that takes a minute, and the validation is after it."""
    assert train((0,), minutes).validated_at == steps


def on_two_ranks() -> list[Any]:
    found: list[Any] = [train((rank,), 2.0).validated_at for rank in (0, 1)]
    trainer = train((0,), 2.0)
    return [*found, trainer.timeouts, trainer.patience]


def test_rank_0s_clock_decides_and_time_outs_are_long_until_the_first_step_is_done() -> None:
    for by_rank_0, by_rank_1, time_outs, patience in run_world(on_two_ranks, 2):
        assert by_rank_0 == [3, 6]
        assert by_rank_1 == []
        assert time_outs == [{timedelta(seconds=START)}] + [{timedelta(seconds=STEP)}] * 5
        assert patience == pytest.approx([0.9 * START] + [0.9 * STEP] * 5)


def laid() -> list[set[timedelta]]:
    world = World(replace(DEVICES, tensor_parallel=2), shard_by_default=False)
    found = [timeouts(world)]
    world.first_step_is_done()
    found.append(timeouts(world))
    world.close()
    return found


def test_groups_of_a_mesh_with_ranks_that_share_data_have_the_same_time_outs() -> None:
    assert run_world(laid, 2) == [[{timedelta(seconds=START)}, {timedelta(seconds=STEP)}]] * 2
