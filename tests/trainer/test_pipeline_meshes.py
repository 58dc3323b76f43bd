"""Stages whose ranks share layers, sequences or experts train as one process does, in half precision too."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.api import INITIAL_SCALE
from tests.trainer.arithmetic import same_bits
from tests.trainer.meshes import Case, assert_as_alone, train, travel, united
from tests.worlds import run_each, run_world

WORLD_4 = [
    Case(2, tp=2, plan="dtensors", loss_parallel=True, steps=3),
    Case(2, cp=2, attention="ulysses", short=True, packed=True, steps=3),
    Case(2, dp=2, ep=2, experts=True, schedule="DualPipeV", blocks=4, steps=3),
    Case(2, tp=2, plan="dtensors", schedule="ZBVZeroBubble", accumulation=2, changing=True, blocks=4, steps=1),
    Case(2, tp=2, plan="layers", schedule="ZBVZeroBubble", accumulation=2, seldom=True, blocks=4, steps=2),
]
SEVERAL_4 = [
    Case(2, dp=2, shard="auto", ep=2, experts=True, schedule="Interleaved1F1B", blocks=4),
    Case(2, tp=2, schedule="Interleaved1F1B", accumulation=2, recompute="full", loss_parallel=True, blocks=4),
    Case(2, tp=2, schedule="InterleavedZeroBubble", plan="layers", accumulation=2, loss_parallel=True, blocks=4),
    Case(2, tp=2, schedule="InterleavedZeroBubble", poisoned=True, clip=None, blocks=4),
    Case(2, tp=2, schedule="DualPipeV", plan="dtensors", loss_parallel=True, blocks=4),
    Case(2, cp=2, shard="auto", schedule="InterleavedZeroBubble", packed=True, blocks=4),
    Case(2, cp=2, shard="auto", schedule="DualPipeV", short=True, blocks=4),
    Case(2, cp=2, ep=2, experts=True, schedule="InterleavedZeroBubble", blocks=4),
    Case(2, dp=2, shard="auto", schedule="ZBVZeroBubble", accumulation=2, seldom=True, blocks=4),
    Case(2, dp=2, ep=2, experts=True, shard="auto", schedule="ZBVZeroBubble", accumulation=2, blocks=4),
]
RECOMPUTED_4 = [
    Case(2, cp=2, schedule="ZBVZeroBubble", recompute="selective", blocks=4),
    Case(2, tp=2, schedule="DualPipeV", plan="layers", recompute="full", accumulation=2, blocks=4),
    Case(2, dp=2, ep=2, experts=True, schedule="InterleavedZeroBubble", recompute="full", blocks=4),
    Case(2, cp=2, schedule="ZBVZeroBubble", compile=True, recompute="full", shard="auto", blocks=4),
]
FURTHER_4 = [
    Case(2, tp=2, accumulation=2, changing=True),
    Case(2, tp=2, plan="layers", recompute="selective", loss_parallel=True),
    Case(2, tp=2, plan="dtensors", schedule="GPipe", accumulation=2),
    Case(2, tp=2, poisoned=True, clip=None),
    Case(2, cp=2, recompute="full", accumulation=2),
    Case(2, cp=2, compile=True, recompute="selective", attention="ulysses", short=True),
    Case(2, dp=2, ep=2, experts=True, accumulation=2, recompute="full"),
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(WORLD_4, id="4 ranks"),
        pytest.param(FURTHER_4, id="further, of 4 ranks", marks=pytest.mark.slow),
        pytest.param(SEVERAL_4, id="several stages, of 4 ranks", marks=pytest.mark.slow),
        pytest.param(RECOMPUTED_4, id="backwards in one, of 4 ranks", marks=pytest.mark.slow),
    ],
)
def test_training_in_stages_of_shared_layers_sequences_and_experts_equals_one_process(cases: list[Case]) -> None:
    alone = {case: train(case) for case in {case.alone for case in cases}}
    for case, ranks in run_each(train, cases[0].world_size, cases, timeout=60.0 * (1 + len(cases))):
        assert_as_alone(case, ranks, alone[case.alone])


def test_ranks_that_share_experts_may_have_shapes_of_their_own() -> None:
    case = Case(2, dp=2, ep=2, experts=True, uneven=True, steps=2)
    for rank in run_world(train, 4, case):
        assert len(rank["norms"]) == case.steps


@pytest.mark.parametrize(
    "meshes",
    [
        pytest.param([Case(2, tp=2), Case(), Case(2, dp=2, shard="auto"), Case(cp=2, shard="auto")], id="of stages"),
        pytest.param(
            [Case(dp=2, ep=2), Case(dp=4, ep=2, shard="auto"), Case()], id="of experts", marks=pytest.mark.slow
        ),
        pytest.param(
            [
                Case(),
                Case(2, tp=2, loss_parallel=True),
                Case(2, dp=2),
                Case(2, dp=2, tp=2, shard="auto"),
                Case(2, cp=2),
            ],
            id="over many",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [
                Case(2, tp=2, schedule="Interleaved1F1B", blocks=4),
                Case(blocks=4),
                Case(2, dp=2, shard="auto", schedule="ZBVZeroBubble", blocks=4),
                Case(2, dp=2, tp=2, shard="auto", schedule="DualPipeV", blocks=4),
                Case(blocks=4),
            ],
            id="of several stages",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_checkpoint_moves_between_meshes(meshes: list[Case]) -> None:
    if max(case.ep for case in meshes) > 1:
        meshes = [replace(case, experts=True) for case in meshes]
    (alone,) = travel([(meshes[0].alone, len(meshes))], "alone")
    before = None
    for steps, case in enumerate(meshes, start=1):
        hop = [(case, steps)], "hops"
        ranks = [
            found for (found,) in (run_world(travel, case.world_size, *hop) if case.world_size > 1 else [travel(*hop)])
        ]
        assert same_bits(united([rank["start"] for rank in ranks]), alone["start"])
        assert before is None or same_bits(united([rank["loaded"] for rank in ranks]), before)
        before = united([rank["state"] for rank in ranks])
    torch.testing.assert_close(before, alone["state"], rtol=1e-9, atol=1e-9)


def stop_and_go_on(cases: list[Case]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each case in one go, and stopped after two of four steps."""
    found = []
    for number, case in enumerate(cases):
        (unbroken,) = travel([(case, 4)], f"unbroken {number}")
        found.append((unbroken, travel([(case, 2), (case, 4)], f"broken {number}")))
    return found


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([Case(2, cp=2, ep=2, experts=True, packed=True, dropout=0.3)], id="sequences and experts"),
        pytest.param(
            [
                Case(2, tp=2, dropout=0.3),
                Case(2, cp=2, dropout=0.3, shard="auto", recompute="full"),
                Case(2, cp=2, dropout=0.3, schedule="ZBVZeroBubble", blocks=4),
                Case(2, dp=2, ep=2, experts=True, dropout=0.3, shard="auto", recompute="full"),
            ],
            id="each",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_goes_on_to_the_bit(cases: list[Case]) -> None:
    for of_rank in run_world(stop_and_go_on, cases[0].world_size, cases):
        for straight, (broken, resumed) in of_rank:
            assert same_bits(resumed["loaded"], broken["state"])
            assert same_bits(resumed["state"], straight["state"])


# Whose last stage is where the first is.
HALF = [Case(2, tp=2, schedule="ZBVZeroBubble", blocks=4, precision="fp16", poisoned=True, steps=3)]
FURTHER_HALF = [
    Case(2, tp=2, precision="fp16", poisoned=True, steps=3),
    Case(2, dp=2, shard="auto", schedule="ZBVZeroBubble", blocks=4, precision="bf16"),
    Case(2, dp=2, shard="auto", schedule="InterleavedZeroBubble", blocks=4, precision="fp16", poisoned=True),
    Case(2, dp=2, ep=2, experts=True, schedule="DualPipeV", blocks=4, precision="bf16"),
    Case(2, cp=2, precision="fp16", poisoned=True, clip=None),
    Case(2, tp=2, plan="layers", precision="bf16", recompute="full", accumulation=2),
    Case(2, cp=2, precision="bf16", attention="ulysses", packed=True),
    Case(2, dp=2, ep=2, experts=True, precision="fp16", poisoned=True, shard="auto"),
    Case(2, cp=2, ep=2, experts=True, precision="fp16", poisoned=True),
]


@pytest.mark.parametrize("cases", [HALF, pytest.param(FURTHER_HALF, marks=pytest.mark.slow)])
def test_half_precision_in_stages_is_that_of_one_process(cases: list[Case]) -> None:
    halves = {case.alone for case in cases}
    alone = {case: train(case) for case in halves | {replace(half, precision="fp32") for half in halves}}
    for case, ranks in run_each(train, 4, cases):
        half, exact = alone[case.alone], alone[replace(case.alone, precision="fp32")]
        assert [rank["skipped"] for rank in ranks] == 4 * [half["skipped"]] == 4 * [int(case.poisoned)]
        scale = {"scale": INITIAL_SCALE / 2, "windows": case.steps - 2} if case.precision == "fp16" else None
        assert all(rank["scale"] == half["scale"] == scale for rank in ranks)
        rounding = torch.finfo(torch.bfloat16 if case.precision == "bf16" else torch.float16).eps
        for rank in ranks:
            if case.tp > 1 or case.shard == "auto":  # wrapped, which gives float32
                assert rank["predicted"].dtype == torch.float32
            assert away(rank["losses"], exact["losses"]) < rounding, case
            assert away(rank["norms"], exact["norms"]) < rounding, case
        weights = united([rank["weights"] for rank in ranks])
        assert away(weights, exact["weights"]) < 1.5 * away(half["weights"], exact["weights"]), case


def away(values: Any, exact: Any) -> float:
    """How far numbers are from those of float64, relative to these; what is not a number in both is left out."""
    if isinstance(values, dict):
        values, exact = [torch.cat([of[name].flatten().double() for name in exact]) for of in (values, exact)]
    values, exact = torch.as_tensor(values, dtype=torch.float64), torch.as_tensor(exact, dtype=torch.float64)
    assert torch.equal(values.isfinite(), exact.isfinite())
    return float((values - exact).nan_to_num().norm() / exact.nan_to_num().norm())
