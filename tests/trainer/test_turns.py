"""Two models trained in turns within a window, against a loop by hand in one process; and turns that are refused."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from tests.api import StepError
from tests.trainer.small import WIDTH, Batch, fill, fit, make_config, network, sgd, weights
from tests.trainer.test_several_models import GAN, Body, ShardedGAN, discriminator_loss, generator_loss, micro_batches
from tests.worlds import run_world

POLICIES = ("no_sync", "reduce_scatter_each", "defer_all_reduce")


class Case(NamedTuple):
    """What is trained how."""

    kind: str
    layout: str
    accumulation: int = 2
    weighted: bool = False
    sync_policy: str = "no_sync"
    recompute: str = "none"


class Pair(Body, dt.ActivationCheckpointingMixin):
    """Two models, each with an optimizer of its own."""

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
        if not self.is_accumulating_gradients:
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
    """In every third window the first model's gradients are not finite when it is run for the first time.

    Those of the second model's earlier micro-batches are there by then, and have not crossed ranks.
    """

    runs = 0

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        is_bad = not self.is_accumulating_gradients and self.global_step % 3 == 1 and self.runs <= self.global_step
        self.learn(self.first, batch, float("nan") if is_bad else 1.0)
        if not self.is_accumulating_gradients:
            self.runs += is_bad * 3
            self.step(self.first, self.first_optimizer)
        self.learn(self.second, batch)
        if not self.is_accumulating_gradients:
            self.step(self.second, self.second_optimizer)
        return {}


class Frozen(Pair):
    """The first model learns through the second, which is frozen while the loss is computed, and only then."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.learn(self.second, batch)
        if not self.is_accumulating_gradients:
            self.step(self.second, self.second_optimizer)
        with self.frozen(self.second):
            loss = through(self.first, self.second, batch)
        self.backward(loss, weight=self.weight_of(batch), model=self.first)
        if not self.is_accumulating_gradients:
            self.step(self.first, self.first_optimizer)
        return {}


def through(first: nn.Module, second: nn.Module, batch: Batch) -> Tensor:
    return mse_loss(second(first(batch[0]).expand(-1, WIDTH)), -batch[1])


KINDS: dict[str, type[Pair]] = {"early": Early, "bare": Bare, "critic": Critic, "retried": Retried, "frozen": Frozen}


def train(case: Case) -> dict[str, Any]:
    policy = {"nonfinite": "retry"} if case.kind == "retried" else {}
    config = make_config(
        n_epochs=1,
        gradient_accumulation_steps=case.accumulation,
        sync_policy=case.sync_policy,
        devices=dt.DeviceParameters(device="cpu", activation_checkpointing=case.recompute),
        **policy,
    )
    mixins = (dt.FSDPMixin,) if case.layout == "fsdp" else ()
    with type("Made", (KINDS[case.kind], *mixins), {})(config, case) as trainer:
        trainer.fit()
        return {name: weights(model) for name, model in trainer.named_models().items()}


def by_hand(case: Case, world_size: int) -> dict[str, Any]:
    models = {"first": network(), "second": network()}
    optimizers = {name: sgd(model) for name, model in models.items()}
    for model in models.values():
        fill(model)

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


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> list[list[dict[str, Any]]]:
    return run_world(train_all, request.param)


@pytest.mark.pitfall(70)
@pytest.mark.pitfall(71)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_models_in_turns_train_as_by_hand(ranks: list[list[dict[str, Any]]], case: Case) -> None:
    expected = by_hand(case, len(ranks))
    for rank in ranks:
        found = rank[CASES.index(case)]
        for model, state in expected.items():
            for name, value in state.items():
                torch.testing.assert_close(found[model][name], value, rtol=1e-10, atol=1e-12, msg=f"{model}.{name}")


# -- gradients that a loss leaves in another model


class Leaks:
    """Mix in: `frozen` is forgotten. Notes what the trainer says of it."""

    said = ""

    def frozen(self, *models: nn.Module) -> Any:
        return contextlib.nullcontext()


class GeneratorFirst(GAN):
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        real, noise, _ = batch
        with self.frozen(self.discriminator):
            self.backward(generator_loss(self.discriminator, self.generator(noise)))
        if not self.is_accumulating_gradients:
            self.step(self.generator, self.g_optimizer)
        try:
            self.backward(discriminator_loss(self.discriminator, real, self.generator(noise).detach()))
        except StepError as error:
            self.said = str(error)
            raise
        if not self.is_accumulating_gradients:
            self.step(self.discriminator, self.d_optimizer)
        return {}


class ForgetsFirst(Leaks, GeneratorFirst):
    pass


class ForgetsLast(Leaks, GAN):
    pass


@pytest.mark.pitfall(70)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_critics_next_turn_never_uses_what_the_generators_loss_left(accumulation: int) -> None:
    config = make_config(n_epochs=1, gradient_accumulation_steps=accumulation)
    with pytest.raises(
        StepError, match=r"(?s)trained generator left gradients in discriminator.*frozen\(self\.discrim"
    ):
        ForgetsFirst(config).fit()
    fit(GeneratorFirst(config))


@pytest.mark.pitfall(58)
@pytest.mark.pitfall(70)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_window_that_leaves_gradients_in_a_model_is_an_error_that_names_it(accumulation: int) -> None:
    config = make_config(n_epochs=1, gradient_accumulation_steps=accumulation)
    with pytest.raises(
        StepError, match=r"gradients in discriminator that no step\(\) used.*frozen\(self\.discriminator\)"
    ):
        ForgetsLast(config).fit()


class Forgives(ForgetsLast):
    """As the usual scripts have it: the critic's gradients are dropped by hand."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        result = super().training_step(batch, batch_idx)
        self.d_optimizer.zero_grad()
        return result


class ShardedForgives(Forgives, dt.FSDPMixin):
    pass


def forgiven() -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    found = []
    for forgives, frozen in ((Forgives, GAN), (ShardedForgives, ShardedGAN)):
        with forgives(make_config(n_epochs=1)) as one, frozen(make_config(n_epochs=1)) as other:
            one.fit()
            other.fit()
            found.append((weights(one.discriminator), weights(other.discriminator)))
    return found


@pytest.mark.pitfall(70)
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_that_are_zeroed_by_hand_are_no_error_and_leave_no_mark(world_size: int) -> None:
    for pairs in run_world(forgiven, world_size):
        for found, expected in pairs:
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


class Joint(Pair):
    """One loss trains both models; each is stepped."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.backward(mse_loss(self.first(batch[0]), batch[1]) + mse_loss(self.second(batch[0]), batch[1]))
        if not self.is_accumulating_gradients:
            self.step(self.first, self.first_optimizer)
            self.step(self.second, self.second_optimizer)
        return {}


def test_one_loss_may_train_two_models() -> None:
    with Joint(make_config(n_epochs=1, gradient_accumulation_steps=2), Case("joint", "single")) as trainer:
        trainer.fit()
        expected = by_hand(Case("joint", "single"), 1)
        for name, value in weights(trainer.second).items():
            torch.testing.assert_close(value, expected["second"][name], rtol=0, atol=1e-12)


@pytest.mark.pitfall(70)
def test_gradients_that_zero_grad_hides_at_the_end_of_an_accumulation_window_are_refused() -> None:
    class Hides(dt.BaseTrainer):
        def setup(self) -> None:
            self.generator, self.critic = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
            self.g_optimizer = torch.optim.SGD(self.generator.parameters(), lr=0.1)
            self.d_optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.1)

        def configure_dataloaders(self) -> Any:
            return [torch.ones(1, 2) for _ in range(4)], None

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            fake = self.generator(batch)
            self.backward(self.critic(fake.detach()).mean())
            if not self.is_accumulating_gradients:
                self.step(self.critic, self.d_optimizer)
            self.backward(-self.critic(fake).mean())
            if not self.is_accumulating_gradients:
                self.step(self.generator, self.g_optimizer)
                self.d_optimizer.zero_grad()
            return {}

    Hides(make_config(n_epochs=1)).fit()  # of one micro-batch each, the windows are as in a plain loop
    with pytest.raises(StepError, match=r"zero_grad\(\) dropped them.*self\.frozen\(self\.critic\)"):
        Hides(make_config(n_epochs=1, gradient_accumulation_steps=2)).fit()
