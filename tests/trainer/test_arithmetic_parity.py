"""Weights, losses and gradient norms equal a loop written by hand, to 1e-10 in float64, over modes and ranks."""

import itertools
from dataclasses import replace

import pytest

from tests.trainer.arithmetic import Case, assert_as_by_hand, run_trainer
from tests.worlds import run_each

LAYOUTS = [("single", 1), ("replicate", 2), ("fsdp", 2), ("replicate", 4), ("fsdp", 4), ("hsdp", 4)]
POLICIES = ("reduce_scatter_each", "defer_all_reduce")  # the default is in all others
OPTIONS = {
    "accumulation": (1, 3),
    "short_window": (False, True),
    "weighted": (False, True),
    "clip": (None, 0.05),
    "tied": (False, True),
}
PARTS = ("branches", "scalar", "frozen")
RECOMPUTES = ("none", "full", "selective")


def cases_of_parts(mode: str, world_size: int) -> list[Case]:
    """All combinations of unusual parts, under changing options."""
    chosen = []
    for number, flags in enumerate(itertools.product((False, True), repeat=len(PARTS))):
        for index, recompute in enumerate(RECOMPUTES):
            case = Case(mode, world_size, accumulation=1 + (number + index) % 3, recompute=recompute)
            options = {"weighted": bool(number % 2 ^ index % 2), "clip": 0.05 if index == 1 else None}
            optimizer = "adamw" if (number + index) % 2 else "sgd"
            chosen.append(replace(case, **dict(zip(PARTS, flags, strict=True)), **options, optimizer=optimizer))
    return chosen


def every_case() -> list[Case]:
    cases = [
        Case(mode, world_size, *values, optimizer="adamw" if number % 4 == 3 else "sgd")
        for mode, world_size in LAYOUTS
        for number, values in enumerate(itertools.product(*OPTIONS.values()))
    ]
    accumulating = [case for case in cases if case.accumulation > 1 and case.world_size > 1]
    cases += [replace(case, sync_policy=policy) for case in accumulating for policy in POLICIES]
    return cases + [case for layout in LAYOUTS for case in cases_of_parts(*layout)]


def spanning_cases() -> list[Case]:
    """Few cases in which every pair of option values meets, in every layout order rotated by one."""
    rows = [
        (0, 0, 0, 0, 0),
        (0, 1, 1, 1, 1),
        (1, 0, 1, 1, 0),
        (1, 1, 0, 0, 1),
        (1, 0, 0, 1, 1),
        (1, 1, 1, 0, 0),
        (0, 0, 1, 0, 1),
    ]
    chosen = []
    for mode, world_size in LAYOUTS:
        for number, row in enumerate(rows):
            values = [options[i] for options, i in zip(OPTIONS.values(), row, strict=True)]
            chosen.append(Case(mode, world_size, *values, optimizer="adamw" if number % 3 == 2 else "sgd"))
    for mode, world_size in (("fsdp", 2), ("hsdp", 4)):
        for policy in POLICIES:
            short = Case(mode, world_size, accumulation=3, short_window=True, clip=0.05, sync_policy=policy)
            chosen += [short, replace(short, short_window=False, weighted=True, clip=None, optimizer="adamw")]
    for mode, world_size in LAYOUTS:
        chosen += [
            Case(mode, world_size, 2, branches=True, scalar=True, recompute="full", tied=True, optimizer="adamw"),
            Case(mode, world_size, 2, weighted=True, frozen=True, recompute="full", clip=0.05),
            Case(mode, world_size, 3, short_window=True, branches=True, recompute="selective"),
        ]
    return chosen


@pytest.mark.pitfall(1)
@pytest.mark.pitfall(3)
@pytest.mark.pitfall(15)
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_equals_a_loop_written_by_hand(world_size: int, all_cases: bool) -> None:
    cases = [case for case in (every_case() if all_cases else spanning_cases()) if case.world_size == world_size]
    for case, ranks in run_each(run_trainer, world_size, cases, timeout=900 if all_cases else 240):
        assert_as_by_hand(case, ranks)
