"""Trainers drawn at random train what a plain PyTorch loop does, to 1e-10 in float64, stopped and resumed or not.

`--all` runs 2,000 examples, 1,700 alone and 300 on two ranks; otherwise there are 38. The seed is fixed, so what fails
once fails again, and hypothesis prints the smallest case it finds.
"""

import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.configuration import set_hypothesis_home_dir

from dream_trainer.trainer.step import buckets
from tests.trainer.drawn import Case, by_hand, cases, run, windows_of
from tests.worlds import KeptWorld

SEED = 20261122
Runner = Callable[[Case, str, tuple[int | None, ...]], list[dict[str, Any]]]
COUNTER = itertools.count()


def run_there(directory: str, case: Case, experiment: str, stops: tuple[int | None, ...]) -> dict[str, Any]:
    """On a rank of the kept world."""
    os.chdir(directory)
    buckets.BUCKET_BYTES = 100  # so that some leave before a backward is over
    return run(case, experiment, stops)


def check(case: Case, train: Runner) -> None:
    """Trains `case` straight and in parts, and compares both with each other and with the loop by hand."""
    name = f"case-{next(COUNTER)}"
    straight = train(case, f"{name}-straight", (None,))
    try:
        compare_with_the_loop_by_hand(case, straight)
        if case.stops:
            parts = train(case, f"{name}-parts", case.stops if case.moves else (*case.stops, None))
            if case.moves:
                finish_on_one_rank(case, f"{name}-parts", straight)
            else:
                for found, expected in zip(parts, straight, strict=True):
                    assert_equal_bits(found, expected)
    finally:
        for left in Path("runs/tests/drawn").glob(f"{name}-*"):
            shutil.rmtree(left)


def compare_with_the_loop_by_hand(case: Case, ranks: list[dict[str, Any]]) -> None:
    seen = [rank["seen"] for rank in ranks]
    windows = windows_of(case, seen)
    for number, batches in enumerate(seen):
        assert batches == [micro[number] for window in windows for micro in window]
    samples = sum(len(numbers) for window in windows for micro in window for numbers in micro)
    for rank in ranks:
        assert rank["counters"][:2] == (len(windows), samples)
    expected = by_hand(case, windows)
    for number, rank in enumerate(ranks):
        close(rank["losses"], expected["losses"][number], "losses")
        close(rank["norms"], expected["norms"], "norms")
        assert_same_weights(rank, expected["weights"])


def finish_on_one_rank(case: Case, experiment: str, straight: list[dict[str, Any]]) -> None:
    alone = replace(case, ranks=1, accumulation=case.accumulation * case.ranks, sync_policy="no_sync")
    assert_same_weights(run(alone, experiment, (None,)), straight[0]["tensors"])


def assert_same_weights(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found["tensors"][name], value, rtol=1e-10, atol=1e-10, msg=name)


def close(found: list[float], expected: list[float], name: str) -> None:
    assert len(found) == len(expected), name
    assert found == pytest.approx(expected, rel=1e-10, abs=1e-10), name


def assert_equal_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("seen", "losses", "norms", "counters"):
        assert found[name] == expected[name], name
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, value in expected["tensors"].items():
        assert torch.equal(found["tensors"][name], value), name


def check_many(ranks: int, count: int, train: Runner) -> None:
    @seed(SEED)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(ranks))
    def holds(case: Case) -> None:
        check(case, train)

    holds()


@pytest.fixture(autouse=True)
def directory(tmp_path: Path) -> Path:
    set_hypothesis_home_dir(tmp_path / "hypothesis")
    return tmp_path


@pytest.mark.timeout(1800)
def test_alone(all_cases: bool) -> None:
    check_many(1, 1700 if all_cases else 30, lambda *what: [run(*what)])


@pytest.mark.timeout(1800)
def test_on_two_ranks(all_cases: bool, directory: Path) -> None:
    with KeptWorld() as world:
        check_many(2, 300 if all_cases else 8, lambda *what: world.call(run_there, 2, str(directory), *what))
