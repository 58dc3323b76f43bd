"""Half precision in a pipeline is that of one process: the same casts, loss scale and skipped steps, to the bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.api import INITIAL_SCALE, WEIGHT_DIVISOR
from tests.trainer import stages
from tests.trainer.arithmetic import same_bits
from tests.trainer.small import fit_each
from tests.trainer.test_pipeline_parallel import formula, sent_by_stages
from tests.worlds import run_world

OVERFLOWING = stages.Case(2, precision="fp16")
CASES = [
    stages.Case(2, precision="bf16", clip=None),
    stages.Case(2, precision="bf16", clip=None, schedule="GPipe", recompute="full", weighted=False, microbatches=8),
    stages.Case(2, precision="fp16", clip=None, schedule="ZBVZeroBubble", weighted=False),
    OVERFLOWING,
]
SHARDED = stages.Case(2, dp=2, shard="auto", precision="bf16", clip=None)


class Half(stages.Trained):
    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        if self.config.case == OVERFLOWING and self.model.embedding is not None:  # of one stage alone
            self.model.embedding.weight.register_hook(lambda grad: grad + torch.inf if self.global_step == 1 else grad)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        factor = 2.0**40 if self.config.case == OVERFLOWING and self.global_step == 2 else 1.0
        weight = stages.count if self.config.case.weighted else None
        tokens, labels = batch
        with sent_by_stages() as sent:
            loss = self.forward_backward(
                self.model,
                (tokens,),
                labels,
                lambda scores, labels: stages.mean_loss(scores, labels) * factor,
                weight=weight,
            )
        if not self.is_accumulating_gradients:
            self.sent = sent.n_bytes
            self.norms.append(float(self.step(self.model, self.optimizer)))
        return {"loss": loss}


def train(cases: list[stages.Case]) -> list[dict[str, Any]]:
    return fit_each(
        (Half(stages.config_of(case, val_every_n_epochs=None)) for case in cases),
        lambda trainer: stages.result_of(trainer) | {"sent": trainer.sent, "skipped": trainer.skipped_steps},
    )


def by_hand(case: stages.Case, start: dict[str, Tensor]) -> dict[str, Any]:
    model, dtype = stages.Model(case), torch.bfloat16 if case.precision == "bf16" else torch.float16
    model.load_state_dict(start, strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data, n_parts = stages.Rows(stages.BATCH * stages.STEPS), case.microbatches or 2 * case.pp
    scale = 1.0 if case.precision == "bf16" else INITIAL_SCALE / (WEIGHT_DIVISOR if case.weighted else 1)
    losses, norms, skipped = [], [], 0
    for step in range(stages.STEPS):
        rows, total, loss_sum = slice(step * stages.BATCH, (step + 1) * stages.BATCH), 0.0, 0.0
        factor = 2.0**40 if case == OVERFLOWING and step == 2 else 1.0
        for tokens, labels in zip(data.tokens[rows].chunk(n_parts), data.labels[rows].chunk(n_parts), strict=True):
            weight = stages.count(labels) if case.weighted else 1 / n_parts
            with torch.autocast("cpu", dtype, cache_enabled=False):
                loss = stages.mean_loss(model(tokens), labels) * factor * weight
            (loss * scale).backward()
            loss_sum, total = loss_sum + loss.item(), total + float(weight)
        if case == OVERFLOWING and step == 1:
            model.embedding.weight.grad += torch.inf
        norm = torch.sqrt(sum(p.grad.double().square().sum() for p in model.parameters())) / (scale * total)
        losses.append(loss_sum / total)
        norms.append(float(norm))
        clip = 1.0 if case.clip is None else torch.clamp(case.clip / (norm + 1e-6), max=1.0)
        for p in model.parameters():
            p.grad *= torch.as_tensor(clip / (scale * total)).to(p.grad.dtype)
        if norm.isfinite():
            optimizer.step()
        else:
            scale, skipped = scale / 2, skipped + 1
        optimizer.zero_grad()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights, "skipped": skipped}


def test_half_precision_in_stages_is_that_of_one_process() -> None:
    by_rank = run_world(train, 2, CASES)
    for case, ranks in zip(CASES, zip(*by_rank, strict=True), strict=True):
        expected = by_hand(case, stages.united([result["start"] for result in ranks]))
        for rank, result in enumerate(ranks):
            assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6), case
            assert result["norms"] == pytest.approx(expected["norms"], rel=1e-6, nan_ok=True), case
            assert result["skipped"] == expected["skipped"] == (2 if case == OVERFLOWING else 0)
            assert result["sent"] == formula(case, rank) // 2  # float32, as what autocast adds to is
        weights = stages.united([result["weights"] for result in ranks])
        if case.clip is None:
            assert same_bits(weights, expected["weights"]), case
        for name, value in expected["weights"].items():  # the clipping's norm is over stages, rounded in another order
            torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-6, msg=f"{case}: {name}")


@pytest.mark.slow
def test_shards_in_half_precision_are_those_without_stages() -> None:
    (alone, *_) = run_world(train, 2, [stages.Case(1, dp=2, shard="auto", precision="bf16", clip=None, accumulation=4)])
    ranks = run_world(train, 4, [SHARDED])
    for rank, (result,) in enumerate(ranks):
        assert result["losses"] == pytest.approx(alone[0]["losses"], rel=1e-6)
        assert result["norms"] == pytest.approx(alone[0]["norms"], rel=1e-6)
        assert result["sent"] == formula(SHARDED, rank // 2) // 4  # bfloat16, as blocks give it
    weights = stages.united([result["weights"] for (result,) in ranks])
    for name, value in alone[0]["weights"].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-6, msg=name)
