"""Runs over streams and mixtures, stopped or killed and continued on other ranks: each step's samples stay the same."""

import json
import os
import signal
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import dream_trainer as dt
from tests.api import DataError, DistributedDataLoader, Map, Mixture, Shuffle, Stage, StreamLoader
from tests.data.lane_truth import GLOBAL_BATCH, KINDS, digest, identity, lengths, make_source, write_tar
from tests.trainer.small import Built, Validates, fit, outcome, run_config, run_ranks
from tests.worlds import run_world

COUNTS = lengths(8, most=17)
STEPS = 24
SOURCES = {"code": range(500), "docs": range(1000, 1040), "talk": range(2000, 2020)}
WEIGHTS = {"code": 4, "docs": 2, "talk": 1}
CHANGED_AFTER = 15


def mixture(**options: Any) -> Mixture:
    stages = [Stage(at=60, weights={"code": 1, "docs": 1, "talk": 1}, ramp=30)]
    return Mixture(SOURCES, WEIGHTS, stages=stages, max_epochs={"talk": 5}, **options)


class OtherWeights(dt.Callback):
    """Also where a run resumes at the step, which may have been saved before."""

    def pre_fit(self, trainer: Any) -> None:
        self.post_train_step(trainer)

    def post_train_step(self, trainer: Any) -> None:
        if trainer.global_step == CHANGED_AFTER:
            trainer.train_dataloader.dataset.set_weights({"docs": 1, "code": 1})


class Streamed(Built, dt.DreamTrainer):
    """Writes down the samples of each step, and may be killed in the middle of one."""

    make_model = staticmethod(lambda: nn.Linear(1, 1))

    def __init__(self, config: Any, loader: Any, kill_in: int | None = None) -> None:
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


def make_config(max_steps: int, callbacks: Sequence[dt.Callback] = (), **training: Any) -> dt.DreamTrainerConfig:
    return run_config(
        "resume",
        seed=7,
        callbacks=callbacks,
        logger_parameters=dt.LoggerParameters(loggers=(), log_every_n_steps=3),
        training_parameters=dt.TrainingParameters(**({"max_steps": max_steps, "n_epochs": None} | training)),
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_epochs=None, save_every_n_steps=2),
    )


def loader_of(kind: str, directory: Path, layout: tuple[int, int, int]) -> Any:
    ranks, accumulation, workers = layout
    size = GLOBAL_BATCH // (ranks * accumulation)
    how: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    if kind == "mixture":
        return DistributedDataLoader(mixture(), size, **how)
    return StreamLoader(
        make_source("live" if kind == "passes" else kind, directory, COUNTS),
        size,
        lanes=4,
        transforms=[Shuffle(5), Map(identity)],
        shuffle_shards=True,
        repeat=kind != "passes",
        **how,
    )


def train(
    directory: str, kind: str, layout: tuple[int, int, int], stop: int, kill_in: int | None = None
) -> list[dict[str, float]]:
    """Trains up to step `stop`, or until it is killed, from where the last call in the directory stopped."""
    os.chdir(directory)
    callbacks = [OtherWeights()] if kind == "mixture" else []
    config = make_config(stop, callbacks, gradient_accumulation_steps=layout[1])
    trainer = fit(Streamed(config, loader_of(kind, Path(directory).parent / kind, layout), kill_in))
    return [dict(line) for line in trainer.history]


Part = tuple[tuple[int, int, int], int]
"""A layout, and the step to stop at; killed in the step after it if it is negative."""


def steps_of(directory: Path, kind: str, parts: Sequence[Part]) -> dict[int, str]:
    """Trains in parts, and gives a digest of each step's samples; a step that was trained twice was the same."""
    directory.mkdir(parents=True)
    if kind in KINDS:
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


@pytest.fixture(scope="module", params=[*KINDS, "mixture"])
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """A directory named as the kind, and what is read there."""
    directory = tmp_path_factory.mktemp("streams")
    (directory / request.param).mkdir()
    return directory / request.param, steps_of(directory / "straight", request.param, [((1, 1, 0), STEPS)])


PARTS: dict[str, list[Part]] = {
    "other ranks": [((1, 1, 2), 3), ((2, 2, 0), 10), ((4, 1, 0), CHANGED_AFTER), ((1, 4, 0), STEPS)],
    "killed": [((2, 1, 2), -7), ((2, 2, 0), -12), ((1, 2, 0), STEPS)],
}


@pytest.mark.parametrize("name", ["other ranks", pytest.param("killed", marks=pytest.mark.slow)])
def test_each_step_has_the_straight_run_s_samples(name: str, straight: tuple[Path, dict[int, str]]) -> None:
    data, expected = straight
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert steps_of(data.parent / name, data.name, PARTS[name]) == expected


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


def test_a_run_over_a_mixture_draws_and_logs_what_it_says(tmp_path: Path) -> None:
    (history,) = run_world(train, 1, str(tmp_path), "mixture", (1, 1, 0), STEPS)
    steps = written(tmp_path)
    plain = Mixture(SOURCES, WEIGHTS)
    plain.begin(7, None)
    for step in range(60 // GLOBAL_BATCH):
        assert sorted(steps[step + 1]) == sorted(plain[step * GLOBAL_BATCH + index] for index in range(GLOBAL_BATCH))
    drawn = Counter[str]()
    for step in range(1, STEPS + 1):
        names = ["code" if sample < 1000 else "docs" if sample < 2000 else "talk" for sample in steps[step]]
        assert step <= CHANGED_AFTER or "talk" not in names
        drawn.update(names)
        if step % 3 == 0:
            line = next(line for line in history if line["step"] == step)
            logged = {name: line[f"data/{name}/samples"] for name in SOURCES}
            assert sum(logged.values()) == step * GLOBAL_BATCH
            assert line["data/docs/epochs"] == logged["docs"] / 40
    assert drawn["talk"] > 10


class Validated(Validates, Streamed):
    pass


def test_validation_on_the_mixture_that_is_trained_on_is_refused() -> None:
    loader = DistributedDataLoader(mixture(num_samples=100), GLOBAL_BATCH)
    trainer = Validated(make_config(2), loader)
    trainer.val_data = DistributedDataLoader(loader.dataset, 4)
    with pytest.raises(DataError, match="the validation loader read the same Mixture"):
        fit(trainer)


def train_with_own_seed() -> str:
    loader = DistributedDataLoader(mixture(seed=int(os.environ["RANK"])), GLOBAL_BATCH // 2)
    with Streamed(make_config(2), loader) as trainer:
        return outcome(trainer)


def test_ranks_with_other_mixtures_are_an_error_before_the_first_step() -> None:
    for told in run_world(train_with_own_seed, 2):
        assert "training loader: order.mixture.seed (0 on rank 0; 1 on rank 1)" in told
