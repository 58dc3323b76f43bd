"""A run that was stopped anywhere and started again is the run that was not: bit for bit at the same layout, and in its
samples, weights and moments at any."""

import os
import shutil
from collections.abc import Sequence
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dream_trainer as dt
from tests.trainer.arithmetic import same_bits
from tests.trainer.resumable import (
    EPOCHS,
    LAST_STEP,
    STEPS_PER_EPOCH,
    differences,
    make_config,
    run_plans,
    train,
    train_in_parts,
)
from tests.worlds import run_world

STOPS: dict[str, Sequence[int]] = {
    "at every kind of step": [1, 3, STEPS_PER_EPOCH - 1, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 1, LAST_STEP],
    "at every step": range(1, LAST_STEP),
}
SPANNING = ("at every kind of step",)  # the others run only with --all
CASES = [pytest.param(name, marks=[] if name in SPANNING else pytest.mark.slow) for name in STOPS]


@pytest.fixture(scope="module")
def plans(all_cases: bool) -> dict[str, Sequence[int]]:
    return {"straight": []} | {name: STOPS[name] for name in STOPS if all_cases or name in SPANNING}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory, plans: dict[str, Sequence[int]]) -> dict[str, Any]:
    with chdir(tmp_path_factory.mktemp("one")):
        return run_plans(".", plans, {})


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, plans: dict[str, Sequence[int]]) -> list[dict[str, Any]]:
    """The plans at 2 ranks under FSDP, each part in a process group of its own; a result of each rank."""
    return run_world(run_plans, 2, str(tmp_path_factory.mktemp("two")), plans, {"own": {"samples": 93}})


def test_the_straight_run_exercises_what_it_should(one_rank: dict[str, Any]) -> None:
    run = one_rank["straight"]
    sizes = [[len(ids) for ids in step["ids"]] for step in run["record"]]
    assert sizes == ([[4, 4]] * 5 + [[4, 2]]) * EPOCHS
    assert [step["lr"] for step in run["record"]] == [0.02] * 2 + [0.01] * 6 + [0.0025] * 2 + [0.00125] * 2
    first, second = run["record"][:STEPS_PER_EPOCH], run["record"][STEPS_PER_EPOCH:]
    orders = [[i for step in epoch for ids in step["ids"] for i in ids] for epoch in (first, second)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(46))
    assert [step for step, _ in run["history"]["validations"]] == [4, 6, 8, 12]
    lines = [line for line in run["log"] if "train/loss" in line]
    assert [line["step"] for line in lines] == list(range(1, LAST_STEP + 1))
    assert [line["samples"] for line in lines][5::6] == [46, 92]
    assert [line["step"] for line in run["log"] if "val/loss" in line] == [4, 6, 8, 12]
    draws = [draw for step in run["record"] for three in step["draws"] for draw in three]
    assert len(set(draws)) == len(draws)


@pytest.mark.pitfall(2, 6, 32, 54)
@pytest.mark.parametrize("name", CASES)
def test_stopped_and_resumed_is_the_straight_run_bit_for_bit(one_rank: dict[str, Any], name: str) -> None:
    assert differences(one_rank[name], one_rank["straight"]) == []


@pytest.mark.pitfall(2, 32, 33)
@pytest.mark.parametrize("name", CASES)
def test_at_two_sharded_ranks_too(two_ranks: list[dict[str, Any]], name: str) -> None:
    assert [differences(rank[name], rank["straight"]) for rank in two_ranks] == [[], []]


@pytest.mark.pitfall(33)
def test_two_ranks_draw_differently_and_hold_the_same_statistics(two_ranks: list[dict[str, Any]]) -> None:
    one, two = (rank["straight"] for rank in two_ranks)
    assert one["random"] != two["random"]
    assert one["record"][0]["ids"] != two["record"][0]["ids"]
    assert torch.equal(one["tensors"]["batch_norm.running_mean"], two["tensors"]["batch_norm.running_mean"])
    assert torch.equal(one["tensors"]["head.weight"], two["tensors"]["head.weight"])


@pytest.fixture(scope="module")
def saved_at_each_step(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    with chdir(directory := tmp_path_factory.mktemp("saved")):
        return directory, train(make_config("run", **saving()))


def saving() -> dict[str, Any]:
    return {"checkpoint": dt.CheckpointParameters(save_every_n_steps=1), "log_every": 5}


@pytest.mark.pitfall(44)
@pytest.mark.parametrize("step", [4, 6])
def test_a_run_that_was_killed_between_two_flushes_writes_the_same_curve_and_ends_alike(
    step: int, saved_at_each_step: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    directory, straight = saved_at_each_step
    shutil.copytree(directory / "runs", tmp_path / "runs")
    for later in range(step + 1, LAST_STEP + 1):
        shutil.rmtree(make_config("run").run_dir / "checkpoints" / f"step_{later:08d}")
    found = train(make_config("run", **saving()))
    assert [entry["step"] for entry in found["record"]] == list(range(step + 1, LAST_STEP + 1))
    found["record"] = straight["record"][:step] + found["record"]
    assert differences(found, straight) == []


@pytest.mark.pitfall(34)
@pytest.mark.parametrize(
    ("loader", "workers", "noise"),
    [
        ("plain", 2, 0.1),
        ("stateful", 0, 0.1),
        ("live", 0, 0.1),
        # Its own state does not have its workers' generators, so there is no augmentation.
        pytest.param("stateful", 2, 0.0, marks=pytest.mark.slow),
    ],
)
def test_other_loaders_resume_bit_for_bit(loader: str, workers: int, noise: float) -> None:
    own = {"loader": loader, "workers": workers, "noise": noise}
    straight = train(make_config("straight", own=own))
    assert differences(train_in_parts("parts", [2, 6, 7], own=own), straight) == []


@pytest.mark.pitfall(75)
def test_live_state_and_unequal_data_of_ranks_resume_bit_for_bit(tmp_path: Path) -> None:
    own = {"loader": "live", "workers": 0}
    ranks = run_world(run_plans, 2, str(tmp_path), {"straight": [], "parts": [2, 6, 7]}, {"own": own})
    for found in ranks:
        assert len(found["straight"]["record"]) == LAST_STEP
        assert differences(found["parts"], found["straight"]) == []
    assert ranks[0]["straight"]["record"][0]["ids"] != ranks[1]["straight"]["record"][0]["ids"]


GLOBAL_BATCH = 8
RESHAPED: dict[str, Any] = {
    "gradient_accumulation_steps": 1,
    "global_batch_size": GLOBAL_BATCH,
    "val_every_n_steps": None,
    "own": {"samples": 44, "batch_size": 2, "double": True, "random_layers": False, "drop_last": True, "workers": 0},
}


def train_in_each(directory: str, steps: Sequence[int], *, stops: bool) -> list[dict[str, Any]]:
    """Goes on in a directory of each step, or stops at it there, after which the last result is of the straight run."""
    results = []
    for step in steps:
        path = Path(directory) / f"at {step}"
        path.mkdir(exist_ok=True)
        os.chdir(path)
        results.append(train(make_config("run", **RESHAPED), step if stops else None))
    os.chdir(directory)
    return [*results, train(make_config("straight", **RESHAPED))] if stops else results


def global_order(ranks: Sequence[dict[str, Any]]) -> dict[int, list[int]]:
    """Samples of each optimizer step: the micro-batches in order, in each the ranks' parts."""
    steps = [entry["step"] for entry in ranks[0]["record"]]
    windows = [[rank["record"][index]["ids"] for rank in ranks] for index in range(len(steps))]
    return {
        step: [i for micro in zip(*window, strict=True) for ids in micro for i in ids]
        for step, window in zip(steps, windows, strict=True)
    }


def mean_losses(ranks: Sequence[dict[str, Any]]) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for rank in ranks:
        for entry in rank["record"]:
            found.setdefault(entry["step"], []).extend(entry["losses"])
    return {step: sum(losses) / len(losses) for step, losses in found.items()}


@pytest.mark.pitfall(21, 34)
def test_saved_at_two_ranks_resumes_at_one_and_at_four(tmp_path: Path) -> None:
    steps = [3, 5]  # in the middle of an epoch, and at the end of one
    *saved, straight = zip(*run_world(partial(train_in_each, stops=True), 2, str(tmp_path), steps), strict=True)
    for step in steps:
        shutil.copytree(tmp_path / f"at {step}", tmp_path / "one" / f"at {step}")
    going_on = partial(train_in_each, steps=steps, stops=False)
    one = [[result] for result in going_on(str(tmp_path / "one"))]
    four = list(zip(*run_world(going_on, 4, str(tmp_path)), strict=True))
    order, losses = global_order(straight), mean_losses(straight)
    assert list(order) == list(range(1, 11))
    for index, step in enumerate(steps):
        written = saved[index][0]["tensors"]
        assert {"head.weight.exp_avg", "head.weight.exp_avg_sq", "head.weight.step"} <= written.keys()
        for ranks in (one[index], four[index]):
            later = {number: ids for number, ids in order.items() if number > step}
            assert global_order(ranks) == later
            assert mean_losses(ranks) == pytest.approx({n: losses[n] for n in later}, rel=0, abs=1e-10)
            for rank in ranks:
                assert same_bits(rank["loaded"], written)
                torch.testing.assert_close(rank["tensors"], straight[0]["tensors"], rtol=0, atol=1e-10)
                assert rank["progress"]["samples_seen"] == straight[0]["progress"]["samples_seen"]
