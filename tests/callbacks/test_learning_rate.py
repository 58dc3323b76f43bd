"""LearningRate: the rate that each step used, for each group, whatever it is kept in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.optim.lr_scheduler import LambdaLR

from dream_trainer.callbacks import LearningRate
from tests.callbacks.recording import Logged, Recorder, names, record
from tests.trainer.small import Batch, batches, make_config


class Scheduled(Logged):
    """Step n (from 1) uses lr / n."""

    def setup(self) -> None:
        super().setup()
        self.scheduler = LambdaLR(self.optimizer, lambda done: 1 / (done + 1))

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        loss = self.model(batch[0]).square().mean()
        self.backward(loss)
        if not self.is_accumulating_gradients:
            self.step(self.model, self.optimizer, self.scheduler)
        return {}


def test_the_rate_logged_at_a_step_is_the_one_it_used() -> None:
    recorder = Recorder()
    config = make_config(callbacks=[LearningRate(), recorder], log_every=1, n_epochs=1)
    record(Scheduled(config, batches(5)), recorder)
    assert recorder.values("lr") == pytest.approx({n: 0.1 / n for n in range(1, 6)}, rel=1e-15)


def test_a_flush_of_several_steps_has_the_last_rate() -> None:
    recorder = Recorder()
    config = make_config(callbacks=[LearningRate(), recorder], log_every=2, n_epochs=1, gradient_accumulation_steps=2)
    record(Scheduled(config, batches(8)), recorder)
    assert recorder.values("lr") == pytest.approx({2: 0.05, 4: 0.025}, rel=1e-15)


def test_rates_may_be_tensors_that_the_scheduler_changes_in_place() -> None:
    recorder = Recorder()
    config = make_config(callbacks=[LearningRate(), recorder], log_every=4, n_epochs=1)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1, dtype=torch.float64), fused=True)

    record(Scheduled(config, batches(4), make_optimizer=optimizer), recorder)
    assert recorder.values("lr") == pytest.approx({4: 0.025}, rel=1e-15)


def test_several_groups_have_names_of_their_own_also_those_added_later() -> None:
    recorder = Recorder()
    config = make_config(callbacks=[LearningRate("rate"), recorder], log_every=1, n_epochs=1)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        return torch.optim.SGD([{"params": [first], "lr": 0.5, "name": "first"}, {"params": rest}], lr=0.25)

    class Grows(Logged):
        def post_train_step(self) -> None:
            if self.global_step == 2:
                self.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.125})

    record(Grows(config, batches(3), make_optimizer=optimizer), recorder)
    assert names(recorder, "rate") == ["rate/optimizer/1", "rate/optimizer/2", "rate/optimizer/first"]
    assert recorder.values("rate/optimizer/first") == {1: 0.5, 2: 0.5, 3: 0.5}
    assert recorder.values("rate/optimizer/2") == {3: 0.125}
