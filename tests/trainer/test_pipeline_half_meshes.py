"""Half precision in stages whose ranks share layers, sequences or experts is that of one process, but for rounding."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.api import INITIAL_SCALE
from tests.trainer.meshes import Case, train, united
from tests.worlds import run_world

# Whose last stage is where the first is.
CASES = [Case(2, tp=2, schedule="ZBVZeroBubble", blocks=4, precision="fp16", poisoned=True, steps=3)]
FURTHER = [
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


@pytest.mark.parametrize("cases", [CASES, pytest.param(FURTHER, marks=pytest.mark.slow)])
def test_half_precision_in_stages_is_that_of_one_process(cases: list[Case]) -> None:
    kinds = list(dict.fromkeys(case.alone for case in cases))
    kinds += list(dict.fromkeys(replace(kind, precision="fp32") for kind in kinds))
    alone = dict(zip(kinds, train(kinds), strict=True))
    by_rank = run_world(train, 4, cases)
    for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
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
