"""All callbacks together, throughput, statistics and reports of non-finite numbers on two ranks, in one world."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

import dream_trainer as dt
from tests.api import GradientStats, NonFiniteReport, Throughput, WeightStats
from tests.callbacks import test_activation_stats as activations
from tests.callbacks.recording import Clock, LoggedSharded, names, record
from tests.callbacks.test_every_callback import all_together, trained
from tests.callbacks.test_stats import by_hand
from tests.late_norms import norms_are_read_late
from tests.trainer.small import Batch, Samples, Spread, assert_same_weights, batches, fit, fused_adamw, make_config
from tests.worlds import run_world

Logs = dict[int, dict[str, float]]


def throughput() -> dict[str, dict[int, float]]:
    clock = Clock()

    class Runs(LoggedSharded):
        def batch_tokens(self, batch: Batch) -> int:
            return int(batch[2].sum())

        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            clock.now += 2.0
            return super().training_step(batch, batch_idx)

    callback = Throughput(every_n_steps=1, warm_up_steps=1, flops_per_token=100.0, device_flops=1e3, clock=clock)
    recorder = record(Runs, DataLoader(Samples(8), 2), callback)
    return {name.removeprefix("throughput/"): recorder.values(name) for name in names(recorder, "throughput")}


def stats(cls: type[dt.BaseTrainer], data: Any) -> Logs:
    callbacks = GradientStats(1, depth=None), WeightStats(1, depth=None)
    return record(cls, data, *callbacks, gradient_clip_norm=2.0).under("gradients/", "weights/")


class Replicated(Spread, dt.LoggerMixin):
    """Whole copies on each rank."""


class Bad(LoggedSharded):
    """Sample 5 makes the loss of whoever has it NaN."""

    def loss_of(self, batch: Batch) -> Tensor:
        return super().loss_of(batch) * (float("nan") if 5 in batch[2].tolist() else 1.0)


@norms_are_read_late()
def nonfinite() -> Path:
    config = make_config(callbacks=[NonFiniteReport()], n_epochs=1, on_nonfinite="skip")
    # Long enough for a look in the midst of training.
    trainer = Bad(config, DataLoader(Samples(64), 1), make_optimizer=fused_adamw)
    fit(trainer)
    return trainer.run_dir.absolute() / "nonfinite"


def on_a_rank(directory: str) -> tuple[Any, ...]:
    os.chdir(directory)
    return (
        all_together(directory),
        throughput(),
        stats(LoggedSharded, DataLoader(Samples(12), 1)),
        stats(Replicated, DataLoader(Samples(12), 1)),
        nonfinite(),
        activations.on_two_ranks(),
    )


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_world(on_a_rank, 2, str(tmp_path_factory.mktemp("two")))


def test_all_callbacks_together_leave_training_as_one_rank_without(two_ranks: list[Any], tmp_path: Path) -> None:
    (first, logged_first), (second, logged_second) = (found[0] for found in two_ranks)
    alone = trained([], tmp_path)
    assert_same_weights(first, alone)
    assert_same_weights(second, alone)
    assert logged_first == logged_second  # reduced over ranks, equal on all of them
    assert {"train/loss", "lr", "gradients/model.0/norm", "weights/teacher.2/max", "memory/resident"} <= set(
        logged_first
    )


def test_throughput_counts_both_ranks_and_divides_by_devices(two_ranks: list[Any]) -> None:
    first, second = (found[1] for found in two_ranks)
    assert first == second
    # Of 8 samples in order, step 2 takes 4, ..., 7: their numbers are the tokens.
    assert first["samples_per_second"] == pytest.approx({2: 4 / 2.0})
    assert first["samples_per_second_per_device"] == pytest.approx({2: 4 / 4.0})
    assert first["tokens_per_second"] == pytest.approx({2: 22 / 2.0})
    assert first["tokens_per_second_per_device"] == pytest.approx({2: 22 / 4.0})
    assert first["mfu"] == pytest.approx({2: 22 / 4.0 * 100 / 1e3})


@pytest.mark.parametrize("kind", [2, 3], ids=["sharded", "replicated"])
def test_statistics_are_those_of_whole_tensors_on_one_process(kind: int, two_ranks: list[Any]) -> None:
    first, second = (found[kind] for found in two_ranks)
    assert first == second
    truth = by_hand(batches(6), None)
    assert set(first) == set(truth)
    for step, metrics in truth.items():
        assert first[step] == pytest.approx(metrics, rel=1e-12)


def test_a_bad_sample_is_told_by_the_rank_that_had_it(two_ranks: list[Any]) -> None:
    directory = two_ranks[0][4]
    found = {path.name: json.loads(path.read_text()) for path in directory.iterdir()}
    # Sample 5 is the second of step 3, so rank 1's; reduced, its gradient is in everyone's shards.
    assert sorted(found) == ["step_00000003_rank_0.json", "step_00000003_rank_1.json"]
    first, second = found["step_00000003_rank_0.json"], found["step_00000003_rank_1.json"]
    assert not first["has_bad_values"]
    assert second["has_bad_values"]
    assert second["batches"] == [{"batch_idx": 2, "values": {"loss": "nan"}, "indices": [5]}]
    # Of the head, which has one row, rank 1 holds nothing.
    assert set(first["gradients"]) - set(second["gradients"]) == {"model.1.weight", "model.1.bias"}
    assert first["n_gradients"] == len(first["gradients"]) == 6


def test_activations_are_those_of_all_ranks_and_of_whole_outputs(two_ranks: list[Any]) -> None:
    assert two_ranks[0][5] == two_ranks[1][5]
    for found, expected in zip(two_ranks[0][5], activations.alone(), strict=True):
        activations.assert_same(found, expected)
