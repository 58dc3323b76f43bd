"""Optimizers of parts of a model in stages: a rank without such a part has one of nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.small import run_ranks
from tests.trainer.stages import Case, Trained, config_of, count, mean_loss, train
from tests.worlds import run_world


class OfParts(Trained):
    """An optimizer of the head and one of all else, which step one after the other, or together without
    clipping."""

    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        of_head = [p for name, p in self.model.named_parameters() if name.startswith("head.")]
        others = [p for name, p in self.model.named_parameters() if not name.startswith("head.")]
        self.optimizer = torch.optim.AdamW([{"params": others}], lr=1e-2)
        self.head_optimizer = torch.optim.AdamW([{"params": of_head}], lr=2e-2)

    def configure_schedulers(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.head_optimizer, lambda step: 1 / (1 + step))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        tokens, labels = batch
        self.forward_backward(self.model, (tokens,), labels, mean_loss, weight=count)
        turns: list[Any] = [(self.optimizer,), (self.head_optimizer, self.scheduler)]
        if self.config.case.clip is None:
            turns = [([self.optimizer, self.head_optimizer], self.scheduler)]
        self.norms += [self.step(self.model, *turn).item() for turn in turns]
        return {}

    def warn_once(self, key: str, message: str) -> None:
        assert not key.startswith("beside")
        super().warn_once(key, message)


class InAnotherOrder(OfParts):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        tokens, labels = batch
        self.forward_backward(self.model, (tokens,), labels, mean_loss, weight=count)
        both = [self.optimizer, self.head_optimizer]
        for optimizer in reversed(both) if self.world.rank else both:
            self.step(self.model, optimizer)
        return {}


def step_in_another_order(max_steps: int) -> None:
    InAnotherOrder(config_of(Case(2), saves=True, max_steps=max_steps, val_every_n_epochs=None)).fit()


@pytest.mark.parametrize("max_steps", [3, pytest.param(1, marks=pytest.mark.slow)])  # before the next one, or a save
def test_stages_that_step_in_another_order_are_refused_before_anything_is_saved(max_steps: int, tmp_path: Path) -> None:
    code = f"from tests.trainer.test_pipeline_optimizers import step_in_another_order as go; go({max_steps})"
    ranks = run_ranks(code, 2, tmp_path)
    assert [status for status, _ in ranks] == [1, 1]
    said = "by step 1 the stages have called step() for other optimizers than each other"
    assert any(said in text for _, text in ranks)  # the other one may hear of it first
    assert all(said in text or "stops because of rank" in text for _, text in ranks)
    assert not list(tmp_path.rglob("step_*/manifest.json"))


def hop(case: Case, experiment: str, *steps: int) -> list[dict[str, Any]]:
    options: dict[str, Any] = {"saves": True, "val_every_n_epochs": None}
    return [train(OfParts, [case], experiment, max_steps=max_steps, **options)[0] for max_steps in steps]


@pytest.mark.parametrize("clip", [0.05, pytest.param(None, marks=pytest.mark.slow)])
def test_a_rank_without_a_part_steps_nothing_and_checkpoints_have_all(clip: float | None) -> None:
    alone = run_world(hop, 1, Case(clip=clip), "alone", 4)[0][0]
    ranks = run_world(hop, 2, Case(2, clip=clip), "hops", 2, 3)
    last = run_world(hop, 1, Case(clip=clip), "hops", 4)[0][0]
    for first, second in ranks:
        assert [*first["norms"], *second["norms"], *last["norms"]] == pytest.approx(alone["norms"], rel=1e-10)
    torch.testing.assert_close(last["weights"], alone["weights"], rtol=1e-9, atol=1e-9)
