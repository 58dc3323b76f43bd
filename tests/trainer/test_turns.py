"""Two models trained in turns within a window, against a loop by hand in one process; and turns that are refused."""

import contextlib
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from tests.api import StepError
from tests.trainer.small import WIDTH, Batch, filled_network, fit, make_config, network, sgd, sharded, weights
from tests.trainer.test_several_models import Body, micro_batches
from tests.worlds import run_world

POLICIES = ("no_sync", "reduce_scatter_each", "defer_all_reduce")


class Case(NamedTuple):
    kind: str
    layout: str
    accumulation: int = 2
    weighted: bool = False
    sync_policy: str = "no_sync"
    recompute: str = "none"


class Pair(Body, dt.ActivationCheckpointingMixin):
    options: Case

    def configure_models(self) -> None:
        self.first, self.second = network(), network()

    def configure_optimizers(self) -> None:
        self.first_optimizer, self.second_optimizer = sgd(self.first), sgd(self.second)

    def model_blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model[0])

    def weight_of(self, batch: Batch) -> int | None:
        return weight_of(batch) if self.options.weighted else None

    def learn(self, model: nn.Module, batch: Batch, scale: float = 1.0) -> None:
        self.backward(mse_loss(model(batch[0]), batch[1]) * scale, weight=self.weight_of(batch), model=model)


def weight_of(batch: Batch) -> int:
    return int(batch[2][0]) % 3 + 1


class Early(Pair):
    """The second model learns from a window's first micro-batch alone, and is stepped at its end."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if self.is_accumulating_gradients and batch_idx % self.accumulation_steps == 0:
            self.learn(self.second, batch)
        self.learn(self.first, batch)
        self.step(self.first, self.first_optimizer)
        self.step(self.second, self.second_optimizer)
        return {}


class Bare(Early):
    """The models have no parameters but those of their blocks."""

    def model_blocks(self, model: nn.Module) -> list[nn.Module]:
        return [*model[0], model[1]]


class Critic(Pair):
    """The second model has three turns at the end of each window; the first one, in between, has one."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.learn(self.second, batch)
        self.learn(self.first, batch)
        if not self.is_accumulating_gradients:
            self.step(self.second, self.second_optimizer)
            for turn in (2, 3):
                self.learn(self.second, batch, turn)
                self.step(self.second, self.second_optimizer)
            self.step(self.first, self.first_optimizer)
        return {}


class Retried(Pair):
    """In every third window the first model's gradients are not finite at first, when the second's have not crossed."""

    runs = 0

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        is_bad = not self.is_accumulating_gradients and self.global_step % 3 == 1 and self.runs <= self.global_step
        self.learn(self.first, batch, float("nan") if is_bad else 1.0)
        if not self.is_accumulating_gradients:
            self.runs += is_bad * 3
            self.step(self.first, self.first_optimizer)
        self.learn(self.second, batch)
        self.step(self.second, self.second_optimizer)
        return {}


class Frozen(Pair):
    """The first model learns through the second, which is frozen while the loss is computed, and only then."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.learn(self.second, batch)
        self.step(self.second, self.second_optimizer)
        with self.frozen(self.second):
            loss = through(self.first, self.second, batch)
        self.backward(loss, weight=self.weight_of(batch), model=self.first)
        self.step(self.first, self.first_optimizer)
        return {}


def through(first: nn.Module, second: nn.Module, batch: Batch) -> Tensor:
    return mse_loss(second(first(batch[0]).expand(-1, WIDTH)), -batch[1])


KINDS: dict[str, type[Pair]] = {"early": Early, "bare": Bare, "critic": Critic, "retried": Retried, "frozen": Frozen}


def train(case: Case) -> dict[str, Any]:
    policy = {"on_nonfinite": "retry"} if case.kind == "retried" else {}
    config = make_config(
        n_epochs=1,
        gradient_accumulation_steps=case.accumulation,
        sync_policy=case.sync_policy,
        devices=dt.DeviceParameters(device="cpu", activation_checkpointing=case.recompute),
        **policy,
    )
    kind = KINDS[case.kind]
    with (sharded(kind) if case.layout == "fsdp" else kind)(config, case) as trainer:
        trainer.fit()
        return {name: weights(model) for name, model in trainer.named_models().items()}


def by_hand(case: Case, world_size: int) -> dict[str, Any]:
    models = {"first": filled_network(), "second": filled_network()}
    optimizers = {name: sgd(model) for name, model in models.items()}

    def apply(name: str) -> None:
        optimizers[name].step()
        optimizers[name].zero_grad()

    def learn(name: str, batches: list[Batch], n_batches: int, scale: float = 1.0) -> None:
        counts = [weight_of(batch) if case.weighted else 1 for batch in batches]
        total = sum(counts) if case.weighted else n_batches
        for batch, count in zip(batches, counts, strict=True):
            (mse_loss(models[name](batch[0]), batch[1]) * scale * count / total).backward()
        apply(name)

    for window in micro_batches(world_size, case.accumulation):
        batches = [batch for ranks in window for batch in ranks]
        if case.kind == "frozen":
            # All but the last micro-batch go through the second model as it was before its step.
            own = list(models["first"].parameters())
            early = sum(through(*models.values(), batch) for ranks in window[:-1] for batch in ranks) / len(batches)
            before = torch.autograd.grad(early, own) if len(window) > 1 else [torch.zeros_like(p) for p in own]
            learn("second", batches, len(batches))
            late = sum(through(*models.values(), batch) for batch in window[-1]) / len(batches)
            for p, one, other in zip(own, before, torch.autograd.grad(late, own), strict=True):
                p.grad = one + other
            apply("first")
            continue
        learn("first", batches, len(batches))
        learn("second", window[0] if case.kind in ("early", "bare") else batches, len(batches))
        for turn in (2, 3) if case.kind == "critic" else ():
            learn("second", window[-1], len(window[-1]), turn)
    return {name: weights(model) for name, model in models.items()}


LAYOUTS = ("replicate", "fsdp")
CASES = [
    *(Case("early", layout, sync_policy=policy) for layout in LAYOUTS for policy in POLICIES),
    *(Case("early", layout, 3, weighted=True) for layout in LAYOUTS),
    Case("bare", "fsdp"),
    *(Case("critic", layout, accumulation) for layout in LAYOUTS for accumulation in (1, 3)),
    *(Case("critic", layout, 2, weighted=True) for layout in LAYOUTS),
    *(Case("retried", layout, 2) for layout in LAYOUTS),
    *(Case("frozen", layout, 2, recompute=how) for layout in LAYOUTS for how in ("none", "full", "selective")),
]


def train_all() -> list[dict[str, Any]]:
    return [train(case) for case in CASES]


@pytest.mark.pitfall(70)
@pytest.mark.pitfall(71)
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_models_in_turns_train_as_by_hand(n_ranks: int) -> None:
    for case, *ranks in zip(CASES, *run_world(train_all, n_ranks), strict=True):
        expected = by_hand(case, n_ranks)
        for found in ranks:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, msg=f"{case}: {{}}".format)


class Leaks:
    def frozen(self, *models: nn.Module) -> Any:
        return contextlib.nullcontext()


class FrozenFirst(Pair):
    """As Frozen, but the second model learns after the first one."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        with self.frozen(self.second):
            loss = through(self.first, self.second, batch)
        self.backward(loss, model=self.first)
        self.step(self.first, self.first_optimizer)
        self.learn(self.second, batch)
        self.step(self.second, self.second_optimizer)
        return {}


class ForgetsFirst(Leaks, FrozenFirst):
    pass


class ForgetsLast(Leaks, Frozen):
    pass


class Forgives(ForgetsLast):
    """As the usual scripts have it: the second model's gradients are dropped by hand."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        result = super().training_step(batch, batch_idx)
        self.second_optimizer.zero_grad()
        return result


def made(kind: type[Pair], accumulation: int = 1) -> Pair:
    return kind(make_config(n_epochs=1, gradient_accumulation_steps=accumulation), Case("frozen", "single"))


@pytest.mark.pitfall(70)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_critics_next_turn_never_uses_what_the_generators_loss_left(accumulation: int) -> None:
    with pytest.raises(StepError, match=r"(?s)trained first left gradients in second.*frozen\(self\.second\)"):
        made(ForgetsFirst, accumulation).fit()
    fit(made(FrozenFirst, accumulation))


@pytest.mark.pitfall(58)
@pytest.mark.pitfall(70)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_window_that_leaves_gradients_in_a_model_is_an_error_that_names_it(accumulation: int) -> None:
    with pytest.raises(StepError, match=r"gradients in second that no step\(\) used.*frozen\(self\.second\)"):
        made(ForgetsLast, accumulation).fit()


def forgiven() -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    found = []
    for forgives, frozen in ((Forgives, Frozen), (sharded(Forgives), sharded(Frozen))):
        with made(forgives) as one, made(frozen) as other:
            one.fit()
            other.fit()
            found.append((weights(one.second), weights(other.second)))
    return found


@pytest.mark.pitfall(70)
def test_gradients_that_are_zeroed_by_hand_are_no_error_and_leave_no_mark() -> None:
    for pairs in run_world(forgiven, 2):
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.pitfall(70)
def test_gradients_that_zero_grad_hides_at_the_end_of_an_accumulation_window_are_refused() -> None:
    with pytest.raises(StepError, match=r"zero_grad\(\) dropped them.*self\.frozen\(self\.second\)"):
        made(Forgives, 2).fit()
