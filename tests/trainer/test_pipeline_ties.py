"""A parameter of several stages is one parameter: its gradient, its share of the norm, and its name in checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from safetensors.torch import save_file
from torch import Tensor

from tests.api import EMA, load_weights
from tests.trainer.arithmetic import full
from tests.trainer.small import run_ranks
from tests.trainer.stages import (
    LENGTH,
    STEPS,
    VOCABULARY,
    WIDTH,
    Case,
    Model,
    Trained,
    assert_trained,
    config_of,
    reference,
    result_of,
    weights_of,
)
from tests.worlds import run_world

CASES = [Case(2, tied=True), Case(2, tied=True, schedule="ZBVZeroBubble", weighted=False)]
CASES += [Case(2, tied=True, schedule="Interleaved1F1B", accumulation=2, microbatches=2)]
WORLD_4 = [Case(2, dp=2, tied=True, shard="auto"), Case(2, dp=2, tied=True), Case(4, tied=True, microbatches=4)]
WORLD_4 += [Case(2, dp=2, tied=True, shard="auto", schedule="ZBVZeroBubble")]  # one parameter of a rank's two stages


def train(cases: list[Case], experiment: str, steps: int) -> list[dict[str, Any]]:
    results = []
    for case in cases:
        is_saved = experiment != "case"
        config = config_of(case, experiment, saves=is_saved, callbacks=[EMA(decay=0.5)], max_steps=steps)
        with Trained(config) as trainer:
            trainer.fit()
            averages = trainer.get_callback(EMA).checkpoint_tensors()
            results.append(result_of(trainer) | {"averages": {n: full(a) for n, a in averages.items()}})
            if experiment == "hops" and case.pp > 1:
                with torch.no_grad():
                    for p in trainer.model.parameters():
                        p.zero_()
                load_weights(trainer.model, "alone.safetensors", optional=("scale",))
                results[-1]["loaded"] = weights_of(trainer)
    return results


def check(cases: list[Case], ranks_of_case: list[tuple[dict[str, Any], ...]]) -> None:
    for case, ranks in zip(cases, ranks_of_case, strict=True):
        start = {name: value for result in ranks for name, value in result["start"].items()}
        assert torch.equal(start["embedding.weight"], start.get("head.weight", start["embedding.weight"]))
        assert_trained(ranks, reference(case, start), case)
        tied = [v for result in ranks for n, v in result["weights"].items() if n in ("embedding.weight", "head.weight")]
        assert all(torch.equal(copy, tied[0]) for copy in tied)


def train_and_hop() -> list[list[dict[str, Any]]]:
    return [train(CASES, "case", STEPS), train([CASES[0]], "hops", 3)]


def test_tied_ends_are_one_parameter(tmp_path: Path) -> None:
    ((first,),) = run_world(train, 1, [Case(tied=True)], "hops", 2)
    save_file({n: v.contiguous() for n, v in first["weights"].items()}, tmp_path / "alone.safetensors")
    by_rank = run_world(train_and_hop, 2)
    check(CASES, list(zip(*(cases for cases, _ in by_rank), strict=True)))
    for _, (hopped,) in by_rank:
        copies = {"head.weight": "embedding.weight"}
        assert all(torch.equal(v, first["weights"][copies.get(n, n)]) for n, v in hopped["loaded"].items())
    ((last,),) = run_world(train, 1, [Case(tied=True)], "hops", 4)
    ((unbroken,),) = run_world(train, 1, [Case(tied=True)], "unbroken", 4)
    assert last["weights"].keys() == unbroken["weights"].keys()
    for kind in ("state", "averages"):
        torch.testing.assert_close(last[kind], unbroken[kind], rtol=1e-9, atol=1e-9)


class TwoHeads(Model):
    """Has a head of its own for short sequences, so that the last stage leaves its copy of the tied matrix out."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.other = nn.Linear(WIDTH, VOCABULARY).double()

    def forward(self, x: Tensor) -> Tensor:
        if self.head is None or x.shape[1] == LENGTH:
            return super().forward(x)
        if self.embedding is not None:
            x = self.embedding(x) + self.position[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.other(self.norm(x)) * self.scale


class LeavingOut(Trained):
    def configure_models(self) -> None:
        self.model = TwoHeads(self.config.case)


def leave_out(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    with LeavingOut(config_of(case, "left-out")) as trainer:
        trainer.fit()
        return trainer.norms, weights_of(trainer)


def test_a_copy_that_a_stage_of_shards_leaves_out_is_trained_by_the_other() -> None:
    ((norms, weights),) = run_world(leave_out, 1, Case(tied=True, changing=True))
    by_rank = run_world(leave_out, 4, Case(2, dp=2, tied=True, shard="auto", changing=True))
    for found, of_rank in by_rank:
        assert found == pytest.approx(norms, rel=1e-10)
        for name, value in of_rank.items():
            expected = weights["embedding.weight" if name == "head.weight" else name]
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10, msg=name)


class FrozenLater(Trained):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        if self.global_step == 1 and self.model.embedding is not None:
            self.model.embedding.requires_grad_(False)
        return super().training_step(batch, batch_idx)


def freeze_later() -> None:
    FrozenLater(config_of(Case(2, tied=True))).fit()


def test_a_copy_that_is_frozen_later_in_one_stage_is_refused_on_all_ranks(tmp_path: Path) -> None:
    ranks = run_ranks("from tests.trainer.test_pipeline_ties import freeze_later; freeze_later()", 2, tmp_path)
    assert [status for status, _ in ranks] == [1, 1]
    said = "embedding.weight was frozen since its last step, and other stages have copies"
    assert any(said in text for _, text in ranks)


@pytest.mark.slow
def test_tied_ends_beside_data_parallel_ranks_and_further_stages() -> None:
    by_rank = run_world(train, 4, WORLD_4, "case", STEPS)
    check(WORLD_4, list(zip(*by_rank, strict=True)))
