"""Runs over a mixture, alone and on ranks: their samples, logs and checkpoints."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import dream_trainer as dt
from tests.api import DataError, DistributedDataLoader, Mixture, Stage
from tests.trainer.small import Built, Config, make_config
from tests.worlds import run_world

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
    """Notes its samples in a file of each rank."""

    make_model = staticmethod(lambda: nn.Linear(1, 1))

    def __init__(self, config: Config, options: dict[str, Any]) -> None:
        super().__init__(config)
        self.options = options

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
        self.backward(self.model(batch.float()[:, None]).mean())
        self.step(self.model, self.optimizer)
        return {}


def train(directory: str, steps: int, accumulation: int, options: dict[str, Any]) -> list[dict[str, float]]:
    """Trains in this world to `steps` in all, resuming what is in `directory`; what was logged."""
    os.chdir(directory)
    told = os.open(f"stderr_{os.environ['RANK']}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(told, 2)  # of a rank that fails for all, this is what there is to read
    os.close(told)
    config = make_config(
        seed=5,
        callbacks=[OtherWeights()],
        log_every=3,
        checkpoint=dt.CheckpointParameters(save_every_n_steps=4, save_every_n_epochs=None),
        max_steps=steps,
        gradient_accumulation_steps=accumulation,
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


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, set[int]], list[dict[str, float]]]:
    """One rank that is never stopped."""
    directory = tmp_path_factory.mktemp("straight")
    (history,) = run_world(train, 1, str(directory), STEPS, 1, {"workers": 0})
    return steps_in(directory, 1), history


def test_a_run_draws_and_logs_what_it_says(reference: tuple[dict[int, set[int]], list[dict[str, float]]]) -> None:
    steps, history = reference
    mixture = Mixture(SOURCES, {"code": 4, "docs": 2, "talk": 1})
    mixture.begin(5, None)
    for step in range(60 // GLOBAL_BATCH):
        assert steps[step] == {mixture[step * GLOBAL_BATCH + index] for index in range(GLOBAL_BATCH)}
    drawn = Counter[str]()
    for step in range(STEPS):
        names = ["code" if sample < 1000 else "docs" if sample < 2000 else "talk" for sample in steps[step]]
        assert step < CHANGED_AFTER or "talk" not in names
        drawn.update(names)
        if step % 3 == 2:
            line = next(line for line in history if line["step"] == step + 1)
            logged = {name: line[f"data/{name}/samples"] for name in SOURCES}
            assert sum(logged.values()) == (step + 1) * GLOBAL_BATCH
            assert line["data/docs/epochs"] == logged["docs"] / 40
    assert drawn["talk"] > 10


@pytest.mark.parametrize(
    ("parts", "workers"),
    [([(1, 2, 7), (2, 1, 8), (4, 2, STEPS)], 0), ([(2, 4, 14), (1, 1, 15), (1, 4, STEPS)], 2)],
    ids=["1-2-4", "2-1-1 with workers"],
)
def test_stopped_and_resumed_on_other_ranks_each_step_has_the_same_samples(
    parts: list[tuple[int, int, int]], workers: int, tmp_path: Path, reference: Any
) -> None:
    for ranks, accumulation, until in parts:
        run_world(train, ranks, str(tmp_path), until, accumulation, {"workers": workers})
    assert steps_in(tmp_path, max(ranks for ranks, _, _ in parts)) == reference[0]


class Validated(Mixed):
    """Validates on rows of the mixture that it trains on."""

    def configure_dataloaders(self) -> tuple[Any, Any]:
        loader, _ = super().configure_dataloaders()
        return loader, DistributedDataLoader(loader.dataset, 4)

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {}


def test_validation_on_the_mixture_that_is_trained_on_is_refused() -> None:
    config = make_config(max_steps=2, checkpoint=dt.CheckpointParameters(save_every_n_epochs=None))
    with (
        Validated(config, {"workers": 0, "mixture": {"num_samples": 100}}) as trainer,
        pytest.raises(DataError, match="the validation loader read the same Mixture"),
    ):
        trainer.fit()


def test_ranks_with_other_mixtures_are_an_error_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"exit code: \{0: 1, 1: 1\}"):
        run_world(train_with_own_seed, 2, str(tmp_path))
    for rank in range(2):
        told = (tmp_path / f"stderr_{rank}.txt").read_text()
        assert "training loader: order.mixture.seed (0 on rank 0; 1 on rank 1)" in told


def train_with_own_seed(directory: str) -> Any:
    return train(directory, 2, 1, {"workers": 0, "mixture": {"seed": int(os.environ["RANK"])}})
