"""LearningRate: the rate that each step used, for each group, whatever it is kept in."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.optim.lr_scheduler import LambdaLR

from tests.api import LearningRate, OptimizerParameters, build_optimizer
from tests.callbacks.recording import Logged, names, record
from tests.trainer.small import Batch, batches, sgd


class Scheduled(Logged):
    """Step n (from 1) uses lr / n."""

    def setup(self) -> None:
        super().setup()
        self.scheduler = LambdaLR(self.optimizer, lambda done: 1 / (done + 1))

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        loss = self.model(batch[0]).square().mean()
        self.backward(loss)
        self.step(self.model, self.optimizer, self.scheduler)
        return {}


def by_decay(model: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(OptimizerParameters(name="sgd", lr=0.1, weight_decay=0.5), model)


@pytest.mark.parametrize("make_optimizer", [sgd, by_decay], ids=["one group", "groups of one rate"])
def test_the_rate_logged_at_a_step_is_the_one_it_used_and_one_curve(make_optimizer: Any) -> None:
    recorder = record(Scheduled, batches(5), LearningRate(), make_optimizer=make_optimizer)
    assert names(recorder, "lr") == ["lr"]
    assert recorder.values("lr") == pytest.approx({n: 0.1 / n for n in range(1, 6)}, rel=1e-15)


def test_groups_whose_rates_part_have_a_curve_each_from_there_on() -> None:
    class Parts(Logged):
        def post_train_step(self) -> None:
            self.optimizer.param_groups[1]["lr"] = {2: 0.2, 3: 0.1}.get(self.global_step, 0.1)

    recorder = record(Parts, batches(4), LearningRate(), make_optimizer=by_decay)
    assert recorder.values("lr") == {1: 0.1, 2: 0.1}
    assert recorder.values("lr/optimizer/decay") == {3: 0.1, 4: 0.1}
    assert recorder.values("lr/optimizer/no_decay") == {3: 0.2, 4: 0.1}


def test_several_optimizers_have_a_curve_each() -> None:
    class Two(Logged):
        def setup(self) -> None:
            super().setup()
            first, *rest = self.model.parameters()
            self.optimizer = torch.optim.SGD([first], lr=0.5)
            self.other = torch.optim.SGD(rest, lr=0.25)

        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            self.backward(self.model(batch[0]).square().mean())
            self.step(self.model, [self.optimizer, self.other])
            return {}

    assert record(Two, batches(1), LearningRate()).steps == {1: {"lr/optimizer": 0.5, "lr/other": 0.25}}


def test_several_groups_have_names_of_their_own_also_those_added_later() -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        return torch.optim.SGD([{"params": [first], "lr": 0.5, "name": "first"}, {"params": rest}], lr=0.25)

    class Grows(Logged):
        def post_train_step(self) -> None:
            if self.global_step == 2:
                self.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.125})

    recorder = record(Grows, batches(3), LearningRate("rate"), make_optimizer=optimizer)
    assert names(recorder, "rate") == ["rate/optimizer/1", "rate/optimizer/2", "rate/optimizer/first"]
    assert recorder.values("rate/optimizer/first") == {1: 0.5, 2: 0.5, 3: 0.5}
    assert recorder.values("rate/optimizer/2") == {3: 0.125}
