"""A run over a mixture of three sources that writes down the samples of each of its steps."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

import dream_trainer as dt
from tests.api import DistributedDataLoader, Mixture, Stage
from tests.trainer.small import Built, Config, run_config

GLOBAL_BATCH, STEPS = 8, 24
SOURCES = {"code": range(500), "docs": range(1000, 1040), "talk": range(2000, 2020)}
CHANGED_AFTER = 15


class OtherWeights(dt.Callback):
    """Also where a run resumes at the step, which may have been saved before."""

    def pre_fit(self, trainer: Any) -> None:
        self.post_train_step(trainer)

    def post_train_step(self, trainer: Any) -> None:
        if trainer.global_step == CHANGED_AFTER:
            trainer.train_dataloader.dataset.set_weights({"docs": 1, "code": 1})


class Mixed(Built, dt.DreamTrainer):
    """Notes its samples in a file of each rank. With `dies_after` it is killed after that step, with `raises_after` it
    raises."""

    def __init__(self, config: Config, options: dict[str, Any]) -> None:
        super().__init__(config)
        self.options = options

    make_model = staticmethod(lambda: nn.Linear(1, 1))

    def configure_dataloaders(self) -> tuple[Any, Any]:
        mixture = Mixture(
            SOURCES,
            {"code": 4, "docs": 2, "talk": 1},
            stages=[Stage(at=60, weights={"code": 1, "docs": 1, "talk": 1}, ramp=30)],
            max_epochs={"talk": 5},
            **self.options.get("mixture", {}),
        )
        workers: dict[str, Any] = {"num_workers": self.options["workers"]}
        if self.options["workers"]:
            workers["multiprocessing_context"] = "fork"
        size = GLOBAL_BATCH // (self.world.dp_size * self.config.training_parameters.gradient_accumulation_steps)
        return DistributedDataLoader(mixture, size, **workers), None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> dict[str, Any]:
        with open(f"samples_{self.world.rank}.txt", "a") as file:
            file.write(f"{self.global_step} {batch.tolist()}\n")
        self.backward(1e-9 * self.model(batch.float()[:, None]).mean())
        self.step(self.model, self.optimizer)
        return {}

    def post_train_step(self) -> None:
        if self.global_step == self.options.get("dies_after"):
            os.kill(os.getpid(), signal.SIGKILL)


def train(directory: str, steps: int, accumulation: int, options: dict[str, Any]) -> list[dict[str, float]]:
    """Trains in this world to `steps` in all, resuming what is in `directory`; what was logged."""
    os.chdir(directory)
    told = os.open(f"stderr_{os.environ['RANK']}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(told, 2)  # of a rank that fails for all, this is what there is to read
    os.close(told)
    config = run_config(
        cls=Config,
        seed=options.get("seed", 5),
        callbacks=[OtherWeights()],
        training_parameters=dt.TrainingParameters(
            n_epochs=None, max_steps=steps, gradient_accumulation_steps=accumulation
        ),
        logger_parameters=dt.LoggerParameters(loggers=(), log_every_n_steps=3),
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_steps=4, save_every_n_epochs=None),
    )
    with Mixed(config, options) as trainer:
        trainer.fit()
        return [dict(line) for line in trainer.history]


def steps_in(directory: Path, ranks: int) -> dict[int, set[int]]:
    """The samples of each step of the ranks' files. A step that was trained twice had the same ones."""
    found: dict[int, set[int]] = {}
    for rank in range(ranks):
        path = directory / f"samples_{rank}.txt"
        for line in path.read_text().splitlines():
            step, samples = line.split(" ", 1)
            found.setdefault(int(step), set()).update(eval(samples))
    return found
