"""A run that is killed on any mesh, and started again, ends to the bit as one that was not."""

from __future__ import annotations

import json
import os
import sys
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
    if mesh.startswith("pp 2"):
        case = stages.Case(2, dp=2, shard="auto", dropout=0.3) if "dp 2" in mesh else stages.Case(2, tied=True)
        if "memory" in mesh:  # of which the newest checkpoint is that of the first step
            checkpoints = replace(
                checkpoints, save_every_n_steps=20, save_local_every_n_steps=1, local_directory="~/memory"
            )
        config: Any = stages.config_of(case, experiment, max_steps=STEPS)
        return Stages(replace(config, checkpoint_parameters=checkpoints))
    if mesh == "ep 2":
        case = mixtures.Case(2, ep=2, accumulation=2)
        return Mixtures(mixtures.config_of(case, experiment, checkpoints=checkpoints, training={"max_steps": STEPS}))
    case = sequences.Case(2, dp=2 if mesh == "cp 2 x dp 2" else 1, shard="auto", packed=True, dropout=0.3)
    config = sequences.config_of(case, experiment, max_steps=STEPS)
    return Sequences(replace(config, checkpoint_parameters=checkpoints))


def state_of(trainer: Any) -> dict[str, torch.Tensor]:
    return mixtures.everything(trainer) if isinstance(trainer, Mixtures) else stages.state_of(trainer)


def divide_hosts() -> None:
    """Says that the first half of the ranks is one host and the second another, each with a home of its own."""
    rank, per_host = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) // 2
    host, local_rank = divmod(rank, per_host)
    home = Path(f"host_{host}").absolute()
    home.mkdir(exist_ok=True)
    os.environ |= {"GROUP_RANK": str(host), "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(per_host)}
    os.environ["HOME"] = str(home)


def run_to_the_end(mesh: str, experiment: str, *, dies: bool) -> None:
    Killed.dies = dies
    if "memory" in mesh:
        divide_hosts()
    with trainer_of(mesh, experiment) as trainer:
        trainer.fit()
        torch.save(state_of(trainer), f"{experiment}-{trainer.world.rank}.pt")
        if experiment == "killed" and "memory" in mesh:
            print(
                "resumed from", json.loads((trainer.run_dir / "run.json").read_text())["resumed_from"], file=sys.stderr
            )


MESHES = [("pp 2 x dp 2", 4), ("cp 2", 2), ("cp 2 x dp 2", 4), ("ep 2", 2)]
MESHES += [("pp 2, memory", 2), ("pp 2 x dp 2, memory", 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "n_ranks"), MESHES)
def test_a_run_that_was_killed_and_started_again_ends_as_one_that_was_not(
    mesh: str, n_ranks: int, tmp_path: Path
) -> None:
    said: list[str] = []

    def statuses(experiment: str, *, dies: bool) -> list[int]:
        code = "from tests.trainer.test_killed_meshes import run_to_the_end; "
        code += f"run_to_the_end({mesh!r}, {experiment!r}, dies={dies})"
        ranks = run_ranks(code, n_ranks, tmp_path, timeout=240)
        said[:] = [error for _, error in ranks]
        return [status for status, _ in ranks]

    assert statuses("straight", dies=False) == [0] * n_ranks
    assert -SIGKILL in statuses("killed", dies=True)
    hosts = ["ranks_0-0", "ranks_1-1"] if n_ranks == 2 else ["ranks_0-1", "ranks_2-3"]  # a stage each
    assert sorted(path.name for path in tmp_path.glob("host_*/memory/*/*/*")) == hosts * ("memory" in mesh)
    assert statuses("killed", dies=False) == [0] * n_ranks, said
    if "memory" in mesh:  # and not from the run's only checkpoint, of the first step
        assert all("host_0/memory/" in error and "step_00000001" not in error for error in said), said
    for rank in range(n_ranks):
        straight, killed = (torch.load(tmp_path / f"{name}-{rank}.pt") for name in ("straight", "killed"))
        assert same_bits(killed, straight)
