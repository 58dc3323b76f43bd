"""ActivationStats against the same numbers taken by hand from what modules return."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import dream_trainer as dt
from tests.api import ActivationStats, ConfigError
from tests.callbacks.recording import Logged, LoggedSharded, record
from tests.late_norms import norms_are_read_late
from tests.operations import Operations
from tests.trainer.arithmetic import fill
from tests.trainer.small import Batch, Samples, Spread, Validates, batches, fit, fused_adamw, make_config, network, sgd
from tests.trainer.test_nonfinite import Poisoned

Logs = dict[int, dict[str, float]]
RAGGED = [(Samples(9).x[i:j], Samples(9).y[i:j], torch.arange(i, j)) for i, j in ((0, 2), (2, 5), (5, 6), (6, 9))]
"""Two windows of two batches, of 2 and 3 and of 1 and 3 samples."""


def stats(outputs: dict[str, Sequence[Tensor]]) -> dict[str, float]:
    """By hand: of each module, over all elements of all its outputs at once."""
    found = {}
    for name, parts in outputs.items():
        flat = torch.cat([part.detach().flatten() for part in parts]).double()
        found[f"activations/{name}/rms"] = float(flat.square().mean().sqrt())
        found[f"activations/{name}/max"] = float(flat.abs().max())
        found[f"activations/{name}/zeros"] = float((flat == 0).double().mean())
    return found


def by_hand(windows: Sequence[Sequence[Batch]]) -> Logs:
    """What the two blocks of `network()` put out in each step of a plain loop."""
    model = network()
    fill(model)
    optimizer = sgd(model)
    first, second = model[0]
    found = {}
    for step, window in enumerate(windows, start=1):
        outputs: dict[str, list[Tensor]] = {"model.0.0": [], "model.0.1": []}
        for x, y, _ in window:
            outputs["model.0.0"].append(first(x))
            outputs["model.0.1"].append(second(outputs["model.0.0"][-1]))
            (mse_loss(model[1](outputs["model.0.1"][-1]), y) / len(window)).backward()
        found[step] = stats(outputs)
        optimizer.step()
        optimizer.zero_grad()
    return found


def observed(cls: Any, data: Any, *, every: int = 1, modules: Any = None, **options: Any) -> Logs:
    return record(cls, data, ActivationStats(every, modules=modules), **options).under("activations/")


def assert_same(found: Logs, expected: Logs) -> None:
    assert set(found) == set(expected)
    for step, metrics in expected.items():
        assert found[step] == pytest.approx(metrics, rel=1e-12, abs=1e-300)


def test_a_window_counts_whole_and_each_element_of_it_alike() -> None:
    found = observed(Logged, RAGGED * 2, every=2, gradient_accumulation_steps=2)
    truth = by_hand([RAGGED[:2], RAGGED[2:]] * 2)
    assert_same(found, {step: truth[step] for step in (2, 4)})


def test_a_window_that_is_run_again_counts_once() -> None:
    class Retried(Poisoned, Logged):
        poison = {3: (float("nan"), 2)}

    found = observed(Retried, RAGGED, every=2, gradient_accumulation_steps=2, on_nonfinite="retry")
    assert_same(found, {2: by_hand([RAGGED[:2], RAGGED[2:]])[2]})


class Odd(nn.Module):
    """Puts out what is not a tensor, calls a module twice, another never."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.idle, self.ids, self.halves = nn.Linear(3, 2), nn.Linear(3, 2), Ids(), Halves()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        _, record = self.ids(x)
        return self.relu(self.relu(self.linear(x)) - 1).sum() + record["floats"].sum() + self.halves(x)


class Ids(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.arange(len(x)), {"floats": x * 2, "more": x * 3}


class Halves(nn.Module):
    """In bfloat16, of which 300 squares of 1 would sum up to 256."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ones(300, dtype=torch.bfloat16).sum() * 0 + torch.ones(300, dtype=torch.bfloat16).sum()


class OddOne(Logged):
    make_model = staticmethod(lambda: Odd().double())

    def loss_of(self, batch: Batch) -> Tensor:
        return self.model(batch[0])


def test_any_output_is_looked_into_and_all_calls_count() -> None:
    model, (x, *_) = Odd().double(), batches(1)[0]
    fill(model)
    once = model.relu(model.linear(x))
    truth = {"model.linear": [model.linear(x)], "model.relu": [once, model.relu(once - 1)], "model.ids": [x * 2]}
    truth["model.halves"] = [model.halves(x)]
    # Without repeated blocks: the model's children, but for the one that is not called.
    assert_same(observed(OddOne, batches(1)), {1: stats(truth)})
    chosen = observed(OddOne, batches(1), modules=["relu$", "model.l"])
    assert_same(chosen, {1: stats({name: truth[name] for name in ("model.relu", "model.linear")})})


def test_hooks_are_there_in_windows_that_are_due_and_never_in_a_validation() -> None:
    class Looks(Validates, Logged):
        def pre_epoch(self) -> None:
            self.hooks: list[int] = []

        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            self.hooks.append(self.count())
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            self.hooks.append(-self.count())
            return super().validation_step(batch, batch_idx)

        def count(self) -> int:
            return sum(len(module._forward_hooks) for module in self.model.modules())

    callbacks = [ActivationStats(2), ActivationStats(4, modules=["^model$"], name="other")]
    config = make_config(callbacks=callbacks, n_epochs=1, gradient_accumulation_steps=2, val_every_n_steps=1)
    trainer = fit(Looks(config, batches(8), batches(1)))
    assert trainer.hooks == [0, 0, 0, 2, 2, 0, 0, 0, 0, 3, 3, 0]
    assert trainer.count() == 0


class Around(dt.Callback):
    """Enters a context around what the other callbacks do in a window."""

    def __init__(self, order: int, act: Callable[[], object]) -> None:
        self.order, self.act = order, act

    def pre_train_batch(self, trainer: Any, batch: Any, batch_idx: int) -> None:
        if self.order < 0:
            self.act()

    def post_train_step(self, trainer: Any) -> None:
        if self.order > 0:
            self.act()


def test_a_step_that_is_due_reads_nothing_on_the_host() -> None:
    class Steps(Logged):
        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            self.backward(mse_loss(self.model(batch[0]), batch[1]))
            self.step(self.model, self.optimizer)
            return {}

    operations, windows = Operations(), ExitStack()
    callbacks = [Around(-1, lambda: windows.enter_context(operations)), ActivationStats(1), Around(1, windows.close)]
    config = make_config(callbacks=callbacks, n_epochs=1)
    with norms_are_read_late(), windows, Steps(config, batches(2), make_optimizer=fused_adamw) as trainer:
        trainer.fit()
    assert operations.names
    assert "_local_scalar_dense" not in operations.names


def test_compiled_blocks_are_looked_at_from_outside_and_compile_once(caplog: pytest.LogCaptureFixture) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Squashed(nn.Sequential):
        """Of a class of our own: the compiler passes over PyTorch's."""

        def forward(self, x: Tensor) -> Tensor:
            return self[1](self[0](x))

    class Compiled(Logged):
        def setup(self) -> None:
            blocks = nn.Sequential(*(Squashed(*block) for block in network()[0]))
            self.model = nn.Sequential(blocks, nn.Linear(3, 1)).double()
            fill(self.model)
            for block in self.model[0]:
                block.compile(backend=backend, fullgraph=True)
            self.optimizer = sgd(self.model)

    torch._dynamo.reset()
    # Given to the first block as to the second, or it is compiled by itself.
    data = [(x.contiguous().requires_grad_(), *rest) for x, *rest in batches(4)]
    found = observed(Compiled, data, every=2, modules=[r"^model\.0\.\d"])
    truth = by_hand([[batch] for batch in data])
    assert_same(found, {step: truth[step] for step in (2, 4)})
    assert len(graphs) == 1
    assert "ActivationStats leaves out 4 of 6 modules, which are inside compiled ones" in caplog.text


def test_a_module_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"modules: 'attention' matches no module\. Near names: model"):
        observed(Logged, batches(1), modules=["attention"])


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1)).double()


class Parts(Spread, dt.TensorParallelMixin, dt.LoggerMixin):
    """Outputs that are DTensors: cut over the ranks, and not yet summed over them."""

    make_model = staticmethod(small)

    def apply_tensor_parallel(self, mesh: Any) -> None:
        from torch.distributed.tensor import Partial
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        rows = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
        parallelize_module(self.model, mesh, {"0": ColwiseParallel(use_local_output=False), "2": rows})

    def loss_of(self, batch: Batch) -> Tensor:
        return mse_loss(self.model(batch[0]).full_tensor(), batch[1])


def on_two_ranks() -> tuple[Logs, Logs]:
    """Sharded, and split by tensor parallelism."""
    parts = dt.DeviceParameters(device="cpu", tensor_parallel=2)
    return (
        observed(LoggedSharded, DataLoader(Samples(12), 1)),
        observed(Parts, DataLoader(Samples(4), 4), devices=parts),
    )


def alone() -> tuple[Logs, Logs]:
    """The same by hand."""
    model = small()
    fill(model)
    x = Samples(4).x
    outputs = {f"model.{index}": [model[: index + 1](x)] for index in range(3)}
    return by_hand([[batch] for batch in batches(6)]), {1: stats(outputs)}
