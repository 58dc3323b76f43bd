"""Stages whose ranks share layers, sequences or experts train as one process does."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.trainer.arithmetic import same_bits
from tests.trainer.meshes import Case, assert_as_alone, train, travel, united
from tests.worlds import run_world

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
    Case(2, dp=2, ep=2, experts=True),
    Case(2, tp=2, accumulation=2, changing=True),
    Case(2, tp=2, plan="layers", recompute="selective", loss_parallel=True),
    Case(2, tp=2, plan="dtensors", schedule="GPipe", accumulation=2),
    Case(2, tp=2, poisoned=True, clip=None),
    Case(2, cp=2, recompute="full", accumulation=2),
    Case(2, cp=2, shard="auto", schedule="GPipe"),
    Case(2, cp=2, compile=True, recompute="selective", attention="ulysses", short=True),
    Case(2, dp=2, ep=2, experts=True, accumulation=2, recompute="full"),
    Case(2, cp=2, ep=2, experts=True),
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
    kinds = list(dict.fromkeys(case.alone for case in cases))
    alone = dict(zip(kinds, train(kinds), strict=True))
    by_rank = run_world(train, cases[0].world_size, cases, timeout=60.0 * (1 + len(cases)))
    for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert_as_alone(case, ranks, alone[case.alone])


def test_ranks_that_share_experts_may_have_shapes_of_their_own() -> None:
    case = Case(2, dp=2, ep=2, experts=True, uneven=True, steps=2)
    for (rank,) in run_world(train, 4, [case]):
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
    for name, value in alone["state"].items():
        torch.testing.assert_close(before[name], value, rtol=1e-9, atol=1e-9, msg=name)


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
