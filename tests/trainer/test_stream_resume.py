"""Runs over streams, stopped or killed and continued on other ranks: the samples of each step stay the same."""

import json
import os
import signal
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import dream_trainer as dt
from tests.api import Map, Shuffle, StreamLoader
from tests.data.lane_truth import GLOBAL_BATCH, KINDS, digest, identity, lengths, make_source, write_tar
from tests.trainer.small import Built, fit, run_config, run_ranks
from tests.worlds import run_world

COUNTS = lengths(8, most=17)
STEPS = 24


class Streamed(Built, dt.DreamTrainer):
    """Writes down the samples of each step, and may be killed in the middle of one."""

    make_model = staticmethod(lambda: nn.Linear(1, 1))

    def __init__(self, config: Any, loader: StreamLoader, kill_in: int | None = None) -> None:
        super().__init__(config, loader)
        self.kill_in = kill_in
        self.samples: list[list[int]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> dict[str, Any]:
        if self.global_step + 1 == self.kill_in:
            os.kill(os.getpid(), signal.SIGKILL)
        self.samples.append(batch.tolist())
        loss = 1e-9 * self.model(batch[:, None].float()).square().mean()
        self.backward(loss)
        if not self.is_accumulating_gradients:
            self.step(self.model, self.optimizer)
            line = json.dumps({"step": self.global_step + 1, "samples": list(chain.from_iterable(self.samples))})
            with Path(f"steps.{self.world.rank}.jsonl").open("a") as file:
                file.write(line + "\n")
            self.samples = []
        return {"loss": loss}


def make_config(max_steps: int, **training: Any) -> dt.DreamTrainerConfig:
    return run_config(
        "resume",
        seed=7,
        training_parameters=dt.TrainingParameters(**({"max_steps": max_steps, "n_epochs": None} | training)),
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_epochs=None, save_every_n_steps=2),
    )


def train(directory: str, kind: str, layout: tuple[int, int, int], stop: int, kill_in: int | None = None) -> None:
    """Trains up to step `stop`, or until it is killed, from where the last call in the directory stopped."""
    os.chdir(directory)
    ranks, accumulation, workers = layout
    loader = StreamLoader(
        make_source("live" if kind == "passes" else kind, Path(directory).parent / kind, COUNTS),
        GLOBAL_BATCH // (ranks * accumulation),
        lanes=4,
        transforms=[Shuffle(5), Map(identity)],
        shuffle_shards=True,
        repeat=kind != "passes",
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    config = make_config(stop, gradient_accumulation_steps=accumulation)
    fit(Streamed(config, loader, kill_in))


Part = tuple[tuple[int, int, int], int]
"""A layout, and the step to stop at; killed in the step after it if it is negative."""


def steps_of(directory: Path, kind: str, parts: Sequence[Part]) -> dict[int, str]:
    """Trains in parts, and gives a digest of each step's samples; a step that was trained twice was the same."""
    directory.mkdir(parents=True)
    if kind != "passes":
        make_source(kind, directory.parent / kind, COUNTS)
    records: dict[int, set[str]] = {}
    for layout, stop in parts:
        if stop > 0:
            run_world(train, layout[0], str(directory), kind, layout, stop)
        else:
            with pytest.raises(RuntimeError, match=r"ranks ended without a result, by exit code: .*-9"):
                run_world(train, layout[0], str(directory), kind, layout, STEPS, 1 - stop)
        for step, samples in written(directory).items():
            records.setdefault(step, set()).add(digest(samples))
    assert all(len(digests) == 1 for digests in records.values())
    return {step: next(iter(digests)) for step, digests in sorted(records.items())}


def written(directory: Path) -> dict[int, list[int]]:
    """Takes what the ranks wrote down; steps that only some of them came to are left out."""
    by_step: dict[int, list[list[int]]] = {}
    files = sorted(directory.glob("steps.*.jsonl"))
    for file in files:
        for line in map(json.loads, file.read_text().splitlines()):
            by_step.setdefault(line["step"], []).append(line["samples"])
        file.unlink()
    return {step: list(chain.from_iterable(found)) for step, found in by_step.items() if len(found) == len(files)}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def straight(kind: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    directory = tmp_path_factory.mktemp("streams")
    (directory / kind).mkdir()
    return directory, steps_of(directory / "straight", kind, [((1, 1, 0), STEPS)])


PARTS: dict[str, list[Part]] = {
    "other ranks": [((1, 1, 2), 3), ((2, 2, 0), 10), ((4, 1, 0), 17), ((1, 4, 0), STEPS)],
    "killed": [((2, 1, 2), -7), ((2, 2, 0), -12), ((1, 2, 0), STEPS)],
}


@pytest.mark.parametrize("name", ["other ranks", pytest.param("killed", marks=pytest.mark.slow)])
def test_each_step_has_the_straight_run_s_samples(name: str, kind: str, straight: tuple[Path, dict[int, str]]) -> None:
    directory, expected = straight
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert steps_of(directory / name, kind, PARTS[name]) == expected


def test_passes_that_end_go_on_before_at_and_after_their_end(tmp_path: Path) -> None:
    """12 steps in a pass, since the shortest lane has 24 samples."""
    expected = steps_of(tmp_path / "straight", "passes", [((1, 1, 0), STEPS)])
    assert sorted(expected) == list(range(1, STEPS + 1))
    parts: list[Part] = [((2, 2, 0), 11), ((4, 1, 0), 12), ((1, 1, 2), 13), ((2, 1, 0), -20), ((1, 4, 0), STEPS)]
    assert steps_of(tmp_path / "parts", "passes", parts) == expected


def reads(counts: Sequence[int], batch_size: int) -> None:
    """A run over tar files, or where there are none over shards of so many numbers."""
    kind = "live" if counts else "webdataset"
    loader = StreamLoader(make_source(kind, Path("tars"), counts), batch_size, transforms=[Map(identity)])
    Streamed(make_config(STEPS), loader).fit()


def test_ranks_that_cannot_divide_the_lanes_are_refused_on_all_of_them(tmp_path: Path) -> None:
    ranks = run_ranks("from tests.trainer.test_stream_resume import reads; reads([9, 9, 9], 3)", 2, tmp_path)
    for status, text in ranks:
        assert status == 1
        assert "lanes=3 cannot be dealt evenly to dp_size=2 data-parallel ranks (3 shards" in text


@pytest.mark.pitfall(86)
def test_all_ranks_end_where_one_reads_a_damaged_shard_which_is_named(tmp_path: Path) -> None:
    (tmp_path / "tars").mkdir()
    for shard in range(2):
        write_tar(tmp_path / "tars" / f"{shard}.tar", {f"{index}.txt": b"1" for index in range(9)})
    path = tmp_path / "tars" / "1.tar"
    path.write_bytes(path.read_bytes()[:5000])
    one, two = run_ranks("from tests.trainer.test_stream_resume import reads; reads([], 1)", 2, tmp_path)
    assert (one[0], two[0]) == (1, 1)
    assert "stops because of rank 1" in one[1]
    assert "sample 4 of tars/1.tar cannot be read: tars/1.tar is damaged" in two[1]
