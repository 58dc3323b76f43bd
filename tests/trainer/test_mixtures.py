"""Runs over a mixture, alone and on ranks: their samples, logs and checkpoints."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import dream_trainer as dt
from tests.api import DataError, DistributedDataLoader, Mixture
from tests.trainer.mixed import CHANGED_AFTER, GLOBAL_BATCH, SOURCES, STEPS, Mixed, steps_in, train
from tests.trainer.small import Config, run_config
from tests.worlds import run_world


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


def test_after_a_kill_the_steps_since_the_checkpoint_have_their_samples(tmp_path: Path, reference: Any) -> None:
    with pytest.raises(RuntimeError, match="ranks ended without a result|failed"):
        run_world(train, 2, str(tmp_path), STEPS, 1, {"workers": 0, "dies_after": 11})
    assert max(steps_in(tmp_path, 2)) < 12
    run_world(train, 2, str(tmp_path), STEPS, 2, {"workers": 0})
    assert steps_in(tmp_path, 2) == reference[0]


class Validated(Mixed):
    """Validates on rows of the mixture that it trains on."""

    def configure_dataloaders(self) -> tuple[Any, Any]:
        loader, _ = super().configure_dataloaders()
        return loader, DistributedDataLoader(loader.dataset, 4)

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {}


def test_validation_on_the_mixture_that_is_trained_on_is_refused() -> None:
    config = run_config(
        "shared",
        Config,
        training_parameters=dt.TrainingParameters(n_epochs=None, max_steps=2),
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_epochs=None),
    )
    with (
        Validated(config, {"workers": 0, "mixture": {"num_samples": 100}}) as trainer,
        pytest.raises(DataError, match="the validation loader read the same Mixture"),
    ):
        trainer.fit()


def test_another_mixture_is_refused_on_resume_or_begins_there(tmp_path: Path, reference: Any) -> None:
    run_world(train, 1, str(tmp_path), 8, 1, {"workers": 0})
    changed = {"mixture": {"num_samples": None, "seed": 77}, "workers": 0}
    with pytest.raises(RuntimeError, match=r"exit code: \{0: 1, 1: 1\}"):
        run_world(train, 2, str(tmp_path), STEPS, 1, changed)
    for rank in range(2):
        told = (tmp_path / f"stderr_{rank}.txt").read_text()
        assert "the checkpoint is of another mixture (seed was None, and is 77)" in told
    changed["mixture"]["on_change"] = "continue"  # type: ignore[index]
    run_world(train, 2, str(tmp_path), STEPS, 1, changed)
    found = steps_in(tmp_path, 2)
    assert {step: found[step] for step in range(8)} == {step: reference[0][step] for step in range(8)}
    assert all(found[step] != reference[0][step] for step in range(8, STEPS))


def test_ranks_with_other_mixtures_are_an_error_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"exit code: \{0: 1, 1: 1\}"):
        run_world(train_with_own_seed, 2, str(tmp_path))
    for rank in range(2):
        told = (tmp_path / f"stderr_{rank}.txt").read_text()
        assert "training loader: order.mixture.seed (0 on rank 0; 1 on rank 1)" in told


def train_with_own_seed(directory: str) -> Any:
    import os

    return train(directory, 2, 1, {"workers": 0, "mixture": {"seed": int(os.environ["RANK"])}})
