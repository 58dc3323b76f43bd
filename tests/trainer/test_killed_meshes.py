"""A run that is killed on any mesh, and started again, ends to the bit as one that was not."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch

import dream_trainer as dt
from tests.trainer import mixtures, sequences, stages
from tests.trainer.arithmetic import same_bits
from tests.trainer.small import run_ranks

STEPS = 4
SAVING = {"save_every_n_epochs": None, "save_every_n_steps": 1, "async_save": False}


class Killed(dt.DreamTrainer):
    """A rank of it dies in the third step of its first start."""

    dies = False

    def post_train_batch(self, result: dict[str, Any], batch_idx: int) -> None:
        if self.dies and self.global_step == 3 and self.world.rank == self.world.world_size // 2:
            os.kill(os.getpid(), SIGKILL)


class Stages(Killed, stages.Trained): ...


class Sequences(Killed, sequences.Trained): ...


class Mixtures(Killed, mixtures.Trained): ...


def trainer_of(mesh: str, experiment: str) -> Killed:
    checkpoints = dt.CheckpointParameters(**SAVING)
    if mesh == "pp 2 x dp 2":
        config: Any = stages.config_of(stages.Case(2, dp=2, shard="auto", dropout=0.3), experiment, max_steps=STEPS)
        return Stages(replace(config, checkpoint_parameters=checkpoints))
    if mesh == "ep 2":
        case = mixtures.Case(2, ep=2, accumulation=2)
        return Mixtures(mixtures.config_of(case, experiment, checkpoints=checkpoints, training={"max_steps": STEPS}))
    case = sequences.Case(2, dp=2 if mesh == "cp 2 x dp 2" else 1, shard="auto", packed=True, dropout=0.3)
    config = sequences.config_of(case, experiment, max_steps=STEPS)
    return Sequences(replace(config, checkpoint_parameters=checkpoints))


def state_of(trainer: Any) -> dict[str, torch.Tensor]:
    return mixtures.everything(trainer) if isinstance(trainer, Mixtures) else stages.state_of(trainer)


def run_to_the_end(mesh: str, experiment: str, *, dies: bool) -> None:
    Killed.dies = dies
    with trainer_of(mesh, experiment) as trainer:
        trainer.fit()
        torch.save(state_of(trainer), f"{experiment}-{trainer.world.rank}.pt")


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "n_ranks"), [("pp 2 x dp 2", 4), ("cp 2", 2), ("cp 2 x dp 2", 4), ("ep 2", 2)])
def test_a_run_that_was_killed_and_started_again_ends_as_one_that_was_not(
    mesh: str, n_ranks: int, tmp_path: Path
) -> None:
    def statuses(experiment: str, *, dies: bool) -> list[int]:
        code = "from tests.trainer.test_killed_meshes import run_to_the_end; "
        code += f"run_to_the_end({mesh!r}, {experiment!r}, dies={dies})"
        return [status for status, _ in run_ranks(code, n_ranks, tmp_path, timeout=240)]

    assert statuses("straight", dies=False) == [0] * n_ranks
    assert -SIGKILL in statuses("killed", dies=True)
    assert statuses("killed", dies=False) == [0] * n_ranks
    for rank in range(n_ranks):
        straight, killed = (torch.load(tmp_path / f"{name}-{rank}.pt") for name in ("straight", "killed"))
        assert same_bits(killed, straight)
