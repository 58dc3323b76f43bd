"""The examples that people start from, as programs: they learn, draw their picture, and do not depend on the ranks."""

import math
import os
import runpy
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sklearn.datasets  # noqa: F401  # sets an environment variable, which an example's import would do inside a test

import dream_trainer as dt
from tests.examples.launch import EXAMPLES, metric, modules_of, run_script
from tests.worlds import run_world


class Example(NamedTuple):
    """How an example is run in a few seconds, and what it has to reach."""

    name: str
    steps: int
    arguments: str
    metric: str
    reaches: tuple[float, float]
    gallery: float  # it is better at full size; negative if the lowest is best
    loss: str = "train/loss"
    stops_at: int | None = None

    @property
    def compared(self) -> int:
        """Steps in which both have to be the same: five, and where there is a resume, five after it."""
        return (self.stops_at or 0) + 5

    @property
    def every(self) -> list[str]:
        shared = "--logger-parameters.log-every-n-steps 1 --device-parameters.device cpu"
        return [*shared.split(), *self.arguments.split()]


SHORT = [
    # A schedule that knows the end has no shorter run that goes on as the longer one: no `stops_at`.
    Example("image_classification", 40, "--width 16 --depth 1", "val/accuracy", (0.7, 1.0), 0.95),
    Example(
        "text_classification",
        60,
        "--training-parameters.val-every-n-steps 60 --training-parameters.val-steps-per-epoch 4",
        "val/accuracy",
        (0.3, 1.0),
        0.6,
    ),
    Example("gan", 112, "--width 16 --learning-rate 2e-3", "energy_distance", (0.0, 1.0), -0.5, "train/distance", 28),
    Example("diffusion", 100, "--width 64 --depth 1", "val/loss", (0.0, 0.6), -0.32, stops_at=50),
    Example("ppo", 10, "--learning-rate 5e-3", "val/return", (60, 200), 190, "train/return", 5),
    Example("contrastive", 20, "--width 16", "val/accuracy", (0.6, 1.0), 0.82, stops_at=10),
    Example(
        "sparse_language",
        30,
        "--width 32 --depth 2 --training-parameters.val-every-n-steps 30",
        "val/loss",
        (0.0, 3.9),
        -2.3,
        stops_at=20,
    ),
]
BY_NAME = {example.name: example for example in SHORT}


def run_here(directory: Path, example: Example, max_steps: int) -> None:
    """Runs an example as `python examples/<name>.py` does, in this process."""
    os.chdir(directory)
    with pytest.MonkeyPatch.context() as patch, modules_of(EXAMPLES):
        patch.setattr(sys, "argv", [example.name, *example.every, "--training-parameters.max-steps", str(max_steps)])
        runpy.run_path(str(EXAMPLES / f"{example.name}.py"), run_name="__main__")


def run_all(directory: Path) -> None:
    """Runs them no further than they are compared; a schedule that knows its end is not told of it."""

    def stop(trainer: Any) -> None:
        if trainer.global_step >= example.compared:
            trainer.request_stop("the others are not compared")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dt.DreamTrainer, "post_train_step", stop)
        for example in SHORT:
            run_here(directory, example, example.steps)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of them have run on two ranks, straight, and no longer than needed."""
    directory = tmp_path_factory.mktemp("two")
    run_world(run_all, 2, directory)
    return directory


def run_of(directory: Path, name: str) -> Path:
    """The only run of an example in `directory`."""
    (run,) = (directory / "runs" / "examples" / name).iterdir()
    return run


@pytest.mark.parametrize("name", BY_NAME)
def test_it_learns_and_draws_and_ranks_or_a_resume_change_nothing(
    name: str, two_ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = BY_NAME[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    for max_steps in (example.stops_at, example.steps):
        if max_steps is not None:
            run_here(tmp_path, example, max_steps)
    lowest, highest = example.reaches
    found = metric(run_of(tmp_path, name), example.metric)
    assert lowest <= found[max(found)] <= highest
    for directory in (tmp_path, two_ranks):
        (picture,) = run_of(directory, name).glob("*.png")
        assert picture.read_bytes().startswith(b"\x89PNG")
    # Rounding differs, and grows from step to step.
    alone, both = (list(metric(run_of(each, name), example.loss).values()) for each in (tmp_path, two_ranks))
    assert len(alone) == example.steps
    assert alone[: example.compared] == pytest.approx(both[: example.compared], rel=2e-3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("n_processes", [1, 2])
def test_it_is_as_in_the_gallery(name: str, n_processes: int, tmp_path: Path) -> None:
    run_script(EXAMPLES / f"{name}.py", cwd=tmp_path, n_processes=n_processes, timeout=250)
    example = BY_NAME[name]
    found = list(metric(run_of(tmp_path, name), example.metric).values())[-1]
    assert math.copysign(1, example.gallery) * found > example.gallery
