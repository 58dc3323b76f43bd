"""GradientStats and WeightStats against the same numbers taken by hand from plain torch."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from tests import api
from tests.callbacks.recording import Logged, names, record
from tests.operations import Operations
from tests.trainer.small import Batch, batches, filled_network, fit, make_config, sgd


def stats(prefix: str, tensors: dict[str, list[Tensor]]) -> dict[str, float]:
    """By hand: of each group, over all its elements at once."""
    found = {}
    for group, members in tensors.items():
        flat = torch.cat([member.flatten() for member in members])
        found[f"{prefix}/{group}/norm"] = float(flat.square().sum().sqrt())
        found[f"{prefix}/{group}/max"] = float(flat.abs().max())
        found[f"{prefix}/{group}/zeros"] = float((flat == 0).double().mean())
    return found


def by_hand(data: list[Batch], depth: int | None, *, clip: float = 2.0) -> dict[int, dict[str, float]]:
    """Gradients and weights of every step of a plain loop over `network()`."""
    model = filled_network()
    optimizer = sgd(model)
    found = {}
    for step, (x, y, _) in enumerate(data, start=1):
        mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        gradients: dict[str, list[Tensor]] = {}
        parameters: dict[str, list[Tensor]] = {}
        for name, parameter in model.named_parameters():
            group = api.group_of(f"model.{name}", depth)
            gradients.setdefault(group, []).append(parameter.grad)
            parameters.setdefault(group, []).append(parameter.detach())
        found[step] = stats("gradients", gradients)
        optimizer.step()
        found[step] |= stats("weights", parameters)
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("depth", [0, 1, 2, None])
def test_values_are_those_taken_by_hand(depth: int | None) -> None:
    callbacks = api.GradientStats(3, depth=depth), api.WeightStats(2, depth=depth)
    found = record(Logged, batches(6), *callbacks, gradient_clip_norm=2.0).under("gradients/", "weights/")
    truth = by_hand(batches(6), depth)
    assert set(found) == {2, 3, 4, 6}
    for step, metrics in found.items():
        prefixes = [prefix for prefix, every in (("gradients", 3), ("weights", 2)) if step % every == 0]
        expected = {name: value for name, value in truth[step].items() if name.split("/")[0] in prefixes}
        assert metrics == pytest.approx(expected, rel=1e-12, abs=1e-300)


def test_parts_without_a_gradient_are_left_out_and_zeros_are_counted() -> None:
    class HalfUsed(Logged):
        def setup(self) -> None:
            self.model = nn.ModuleDict({"used": nn.Linear(3, 1, bias=False), "idle": nn.Linear(3, 1)}).double()
            with torch.no_grad():
                self.model["used"].weight.copy_(torch.tensor([[1.0, 0.0, -2.0]]))
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

        def loss_of(self, batch: Batch) -> Tensor:
            return (self.model["used"].weight * torch.tensor([3.0, 0.0, -4.0])).sum()

    recorder = record(HalfUsed, batches(1), api.GradientStats(1, depth=1), api.WeightStats(1, depth=None))
    metrics = recorder.steps[1]
    assert names(recorder, "gradients/") == [f"gradients/model.used/{kind}" for kind in ("max", "norm", "zeros")]
    assert [metrics[f"gradients/model.used/{kind}"] for kind in ("norm", "max", "zeros")] == [5.0, 4.0, 1 / 3]
    assert metrics["weights/model.used.weight/zeros"] == 1 / 3


def test_histograms_are_of_each_parameter_and_of_its_gradient() -> None:
    class Keeps(Logged):
        kept: dict[str, Tensor]

        def log_histogram(self, name: str, values: Any, bins: int = 64) -> None:
            self.kept[name] = values.detach().clone()

    data = batches(2)
    callbacks = [api.GradientStats(2, histograms=True), api.WeightStats(2, histograms=True)]
    trainer = Keeps(make_config(callbacks=callbacks, n_epochs=1), data)
    trainer.kept = {}
    fit(trainer)
    truth = by_hand(data, None, clip=float("inf"))[2]
    assert {f"{name}/max" for name in trainer.kept} == {name for name in truth if name.endswith("/max")}
    for name, values in trainer.kept.items():
        assert float(values.abs().max()) == pytest.approx(truth[f"{name}/max"], rel=1e-12)
        assert float(values.norm()) == pytest.approx(truth[f"{name}/norm"], rel=1e-12)


def test_steps_that_are_not_due_run_no_operation_for_them() -> None:
    class FromTheFirstStep(Logged):
        def pre_epoch(self) -> None:
            operations.names.clear()

    operations = Operations()

    def n_operations(callbacks: list[dt.Callback]) -> int:
        trainer = FromTheFirstStep(make_config(callbacks=callbacks, n_epochs=1, log_every=100), batches(5))
        with trainer, operations:
            trainer.fit()
        return len(operations.names)

    stats = [api.GradientStats(), api.WeightStats(), api.ActivationStats()]
    idle = [*stats, api.Memory(), api.Profiler(), api.GarbageCollection(), api.LearningRate()]
    assert n_operations(idle) == n_operations([])
