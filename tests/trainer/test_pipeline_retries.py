"""A window whose gradients are not finite in one stage runs again in all, as if it had not run before."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.stages import STEPS, Case, Trained, config_of, count, cropped, mean_loss, reference, weights_of
from tests.worlds import run_world

WORLD_2 = [
    Case(2, accumulation=2, microbatches=2),
    Case(2, schedule="ZBVZeroBubble", tied=True),
    Case(2, compile=True, recompute="full"),
]
WORLD_4 = [
    Case(2, dp=2, shard="auto", accumulation=2, microbatches=2),
    Case(2, dp=2, tied=True),
    Case(4, microbatches=4),
]


class Poisoned(Trained):
    """The last stage's loss is once not a number, in the last micro-batch of the third step."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        tokens, labels = cropped(self.config.case, batch_idx, *batch)
        self.runs = [*vars(self).get("runs", []), batch_idx]

        def loss_fn(scores: Tensor, of: Tensor) -> Tensor:
            is_bad = self.global_step == 2 and not self.is_accumulating_gradients and self.runs.count(batch_idx) == 1
            return mean_loss(scores, of) * (math.nan if is_bad else 1.0)

        self.forward_backward(self.model, (tokens,), labels, loss_fn, weight=count)
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.model, self.optimizer)))
        return {}


def train(cases: list[Case]) -> list[dict[str, Any]]:
    results = []
    for case in cases:
        with Poisoned(config_of(case, nonfinite="retry", val_every_n_epochs=None)) as trainer:
            trainer.fit()
            results.append({"norms": trainer.norms, "start": trainer.initial, "weights": weights_of(trainer)})
            results[-1] |= {"runs": trainer.runs, "skipped": trainer.skipped_steps}
    return results


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(WORLD_2[:2], id="2 ranks"),
        pytest.param(WORLD_2[2:], id="compiled", marks=pytest.mark.slow),
        pytest.param(WORLD_4, id="4 ranks", marks=pytest.mark.slow),
    ],
)
def test_a_window_that_one_stage_spoils_runs_again_in_all(cases: list[Case]) -> None:
    by_rank = run_world(train, cases[0].world_size, cases)
    for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        expected = reference(case, {name: value for rank in ranks for name, value in rank["start"].items()})
        first, again = 2 * case.accumulation, 3 * case.accumulation
        for rank in ranks:
            whole = [*range(again), *range(first, again), *range(again, STEPS * case.accumulation)]
            assert rank["runs"] == whole
            assert rank["skipped"] == 0
            assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-10), case
            for name, value in rank["weights"].items():
                name = "embedding.weight" if case.tied and name == "head.weight" else name
                torch.testing.assert_close(
                    value, expected["weights"][name], rtol=1e-10, atol=1e-10, msg=f"{case}: {name}"
                )
