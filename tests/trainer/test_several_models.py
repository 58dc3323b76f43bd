"""Several models and optimizers in one trainer, against the same written by hand; alone, replicated and sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss, softplus

import dream_trainer as dt
from tests.api import DistributedDataLoader, StepError
from tests.trainer.small import (
    WIDTH,
    Batch,
    Samples,
    assert_same_weights,
    fill,
    filled_network,
    fit,
    make_config,
    network,
    weights,
)
from tests.worlds import run_world

LENGTH, SIZE = 24, 2


class Body(dt.BaseTrainer, dt.SetupMixin):
    """Replicated at any world size; each test brings its algorithm."""

    def __init__(self, config: Any, options: Any = None) -> None:
        super().__init__(config)
        self.options = options
        self.norms: list[float] = []

    def init_weights(self) -> None:
        for model in self.named_models().values():
            fill(model)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return DistributedDataLoader(Samples(LENGTH), SIZE), None


def micro_batches(world_size: int, accumulation: int) -> list[list[list[Batch]]]:
    """By window and accumulation index, the batches of all ranks."""
    data = Samples(LENGTH)
    parts = list(zip(data.x.split(SIZE), data.y.split(SIZE), torch.arange(LENGTH).split(SIZE), strict=True))
    chunks = [parts[start : start + world_size] for start in range(0, len(parts), world_size)]
    return [chunks[start : start + accumulation] for start in range(0, len(chunks), accumulation)]


def results_of(trainer: Any) -> dict[str, Any]:
    with trainer:
        trainer.fit()
        models = {name: weights(model) for name, model in trainer.named_models().items()}
        names = {name: list(model.state_dict()) for name, model in trainer.named_models().items()}
        parts = [part for model in trainer.named_models().values() for part in model.modules()]
        patched = [name for part in parts for name in ("forward", "__call__", "state_dict") if name in vars(part)]
    return {"models": models, "norms": trainer.norms, "names": names, "patched": patched}


# -- a GAN


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, WIDTH)).double()


def discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def discriminator_loss(judge: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    return softplus(-judge(real)).mean() + softplus(judge(fake)).mean()


def generator_loss(judge: nn.Module, fake: Tensor) -> Tensor:
    return softplus(-judge(fake)).mean()


def gan_optimizers(g: nn.Module, d: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return torch.optim.Adam(g.parameters(), lr=0.02), torch.optim.SGD(d.parameters(), lr=0.3, momentum=0.9)


class GAN(Body):
    def configure_models(self) -> None:
        self.generator = generator()
        self.discriminator = discriminator()

    def configure_optimizers(self) -> None:
        self.g_optimizer, self.d_optimizer = gan_optimizers(self.generator, self.discriminator)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        real, noise, _ = batch
        d_loss = discriminator_loss(self.discriminator, real, self.generator(noise).detach())
        self.backward(d_loss)
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.discriminator, self.d_optimizer)))
        with self.frozen(self.discriminator):
            self.backward(generator_loss(self.discriminator, self.generator(noise)))
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.generator, self.g_optimizer)))
        return {"d_loss": d_loss}


class ShardedGAN(GAN, dt.FSDPMixin):
    pass


def gan_by_hand(world_size: int, accumulation: int) -> dict[str, Any]:
    g, d = generator(), discriminator()
    fill(g)
    fill(d)
    g_optimizer, d_optimizer = gan_optimizers(g, d)
    norms = []
    for window in micro_batches(world_size, accumulation):
        share = 1 / (world_size * len(window))
        g_gradients = [torch.zeros_like(p) for p in g.parameters()]
        d_gradients = [torch.zeros_like(p) for p in d.parameters()]
        for index, ranks in enumerate(window):
            loss = sum(discriminator_loss(d, x, g(y).detach()) for x, y, _ in ranks) * share
            for total, part in zip(d_gradients, torch.autograd.grad(loss, list(d.parameters())), strict=True):
                total += part
            if index == len(window) - 1:
                norms.append(apply(d, d_gradients, d_optimizer))
            loss = sum(generator_loss(d, g(y)) for _, y, _ in ranks) * share
            for total, part in zip(g_gradients, torch.autograd.grad(loss, list(g.parameters())), strict=True):
                total += part
        norms.append(apply(g, g_gradients, g_optimizer))
    return {"models": {"generator": weights(g), "discriminator": weights(d)}, "norms": norms}


def apply(model: nn.Module, gradients: list[Tensor], optimizer: torch.optim.Optimizer) -> float:
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()
    return torch.sqrt(sum(gradient.square().sum() for gradient in gradients)).item()


# -- a teacher and its student


class Distillation(Body):
    def configure_models(self) -> None:
        self.teacher = network().requires_grad_(False)
        self.student = network()

    def init_weights(self) -> None:
        super().init_weights()
        with torch.no_grad():
            for parameter in self.teacher.parameters():
                parameter.mul_(-2)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.student.parameters(), lr=0.1)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        with torch.no_grad():
            target = self.teacher(batch[0])
        self.backward(mse_loss(self.student(batch[0]), target), weight=len(batch[0]))
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.student, self.optimizer)))
        return {}


class ShardedDistillation(Distillation, dt.FSDPMixin):
    pass


def distillation_by_hand(world_size: int, accumulation: int) -> dict[str, Any]:
    teacher, student = network(), network()
    fill(teacher)
    fill(student)
    for parameter in teacher.requires_grad_(False).parameters():
        parameter.mul_(-2)
    optimizer, norms = torch.optim.SGD(student.parameters(), lr=0.1), []
    for window in micro_batches(world_size, accumulation):
        x = torch.cat([batch[0] for ranks in window for batch in ranks])
        gradients = torch.autograd.grad(mse_loss(student(x), teacher(x)), list(student.parameters()))
        norms.append(apply(student, list(gradients), optimizer))
    return {"models": {"teacher": weights(teacher), "student": weights(student)}, "norms": norms}


# -- two models with weights of their own, and two optimizers under one norm


class TwoHeads(Body):
    """Two independent models, each weighted by a count of its own; the second has two optimizers that share a norm."""

    def configure_models(self) -> None:
        self.first, self.second = network(), network()

    def configure_optimizers(self) -> None:
        self.first_optimizer = torch.optim.SGD(self.first.parameters(), lr=0.1)
        self.parts = [torch.optim.SGD(self.second[i].parameters(), lr=0.1 * (i + 1)) for i in (0, 1)]

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        x, y, numbers = batch
        for model in (self.first, self.second):
            self.backward(mse_loss(model(x), y), weight=count_for(self, model, numbers), model=model)
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.first, self.first_optimizer)))
            self.norms.append(float(self.step(self.second, self.parts)))
        return {}


class ShardedTwoHeads(TwoHeads, dt.FSDPMixin):
    pass


def count_for(trainer: TwoHeads, model: nn.Module, numbers: Tensor) -> Any:
    return (numbers[0] % 5 + 1).double() if model is trainer.first else int(numbers[0]) % 3


def two_heads_by_hand(world_size: int, accumulation: int, clip: float) -> dict[str, Any]:
    first, second = network(), network()
    fill(first)
    fill(second)
    optimizers = [
        [torch.optim.SGD(first.parameters(), lr=0.1)],
        [torch.optim.SGD(second[i].parameters(), lr=0.1 * (i + 1)) for i in (0, 1)],
    ]
    norms = []
    for window in micro_batches(world_size, accumulation):
        for index, model in enumerate((first, second)):
            counted = [
                (b, (int(b[2][0]) % 5 + 1) if index == 0 else int(b[2][0]) % 3) for ranks in window for b in ranks
            ]
            total = sum(count for _, count in counted)
            if total == 0:  # nothing to learn for this model in this window: no step
                norms.append(0.0)
                continue
            loss = sum(mse_loss(model(b[0]), b[1]) * count for b, count in counted) / total
            loss.backward()
            norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
            norms.append(norm.item())
            for p in model.parameters():
                p.grad *= min(1.0, clip / (norm.item() + 1e-6))
            for optimizer in optimizers[index]:
                optimizer.step()
                optimizer.zero_grad()
    return {"models": {"first": weights(first), "second": weights(second)}, "norms": norms}


# -- plain parameters among sharded ones


class PartlyPlain(Body, dt.FSDPMixin):
    """The head stays a plain tensor on every rank, as a user may ask of `fully_shard`."""

    def configure_models(self) -> None:
        self.model = network()

    def apply_fully_shard(self, config: dict[str, Any]) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.model, **config, ignored_params=set(self.model[1].parameters()))

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        count = (batch[2][0] % 4 + 1).double() if self.options == "weighted" else None
        self.backward(mse_loss(self.model(batch[0]), batch[1]), weight=count)
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.model, self.optimizer)))
        return {}


def partly_plain_by_hand(world_size: int, accumulation: int, clip: float, weighted: bool) -> dict[str, Any]:
    model = filled_network()
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.1), []
    for window in micro_batches(world_size, accumulation):
        counted = [(b, int(b[2][0]) % 4 + 1 if weighted else 1) for ranks in window for b in ranks]
        total = sum(count for _, count in counted)
        sum(mse_loss(model(b[0]), b[1]) * count / total for b, count in counted).backward()
        norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters())).item()
        norms.append(norm)
        for p in model.parameters():
            p.grad *= min(1.0, clip / (norm + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
    return {"models": {"model": weights(model)}, "norms": norms}


# -- all of it, in one world


CLIP = 0.2


@dataclass(frozen=True)
class Run:
    trainer: type[Body]
    by_hand: Callable[[int, int], dict[str, Any]]
    clip: float | None = None
    options: Any = None


RUNS: dict[str, Run] = {
    "gan replicate": Run(GAN, gan_by_hand),
    "gan fsdp": Run(ShardedGAN, gan_by_hand),
    "distillation replicate": Run(Distillation, distillation_by_hand),
    "distillation fsdp": Run(ShardedDistillation, distillation_by_hand),
    "two heads replicate": Run(TwoHeads, lambda w, a: two_heads_by_hand(w, a, CLIP), clip=CLIP),
    "two heads fsdp": Run(ShardedTwoHeads, lambda w, a: two_heads_by_hand(w, a, CLIP), clip=CLIP),
    "plain among sharded": Run(PartlyPlain, lambda w, a: partly_plain_by_hand(w, a, CLIP, False), clip=CLIP),
    "plain among sharded, weighted": Run(
        PartlyPlain, lambda w, a: partly_plain_by_hand(w, a, CLIP, True), clip=CLIP, options="weighted"
    ),
}
ACCUMULATIONS = (1, 3)


def train_all() -> dict[str, Any]:
    found = {}
    for name, run in RUNS.items():
        for accumulation in ACCUMULATIONS:
            training: dict[str, Any] = {"gradient_clip_val": run.clip} if run.clip else {}
            config = make_config(n_epochs=1, gradient_accumulation_steps=accumulation, **training)
            found[f"{name}/{accumulation}"] = results_of(run.trainer(config, run.options))
    return found


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_world(train_all, request.param)


@pytest.mark.pitfall(4)
@pytest.mark.pitfall(15)
@pytest.mark.pitfall(58)
@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("name", RUNS)
def test_several_models_train_as_written_by_hand(ranks: list[dict[str, Any]], name: str, accumulation: int) -> None:
    expected = RUNS[name].by_hand(len(ranks), accumulation)
    for rank in ranks:
        found = rank[f"{name}/{accumulation}"]
        tolerance = {"rel": 1e-9} if RUNS[name].clip else {"rel": 1e-11}
        assert found["norms"] == pytest.approx(expected["norms"], **tolerance)
        for model, state in expected["models"].items():
            for parameter, value in state.items():
                torch.testing.assert_close(found["models"][model][parameter], value, rtol=1e-8, atol=1e-10)


def test_frozen_gives_back_what_each_parameter_required_also_after_an_exception() -> None:
    trainer = GAN(make_config())
    model = network()
    model[1].requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    inside: list[bool] = []

    def fail_inside() -> None:
        with trainer.frozen(model):
            inside.extend(p.requires_grad for p in model.parameters())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert inside == [False] * len(before)
    assert [p.requires_grad for p in model.parameters()] == before


# -- one loss, two models


def test_one_weighted_loss_of_two_models_normalises_both() -> None:
    class Joint(TwoHeads):
        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            x, y, numbers = batch
            loss = mse_loss(self.first(x), y) + mse_loss(self.second(x), y)
            self.backward(loss, weight=int(numbers[0]) % 3 + 1, model=self.first)
            if not self.is_accumulating_gradients:
                self.step(self.first, self.first_optimizer)
                self.step(self.second, torch.optim.SGD(self.second.parameters(), lr=0.1))
            return {}

    found = results_of(Joint(make_config(n_epochs=1, gradient_accumulation_steps=3)))
    assert_same_weights(found["models"]["first"], found["models"]["second"])


@pytest.mark.pitfall(62)
def test_what_an_optimizer_holds_beside_the_given_model_is_normalised_and_clipped_too() -> None:
    class OneOptimizer(TwoHeads):
        def configure_optimizers(self) -> None:
            self.optimizer = torch.optim.SGD([*self.first.parameters(), *self.second.parameters()], lr=0.1)

        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            x, y, _ = batch
            self.backward(mse_loss(self.first(x), y) + mse_loss(self.second(x), y))
            if not self.is_accumulating_gradients:
                self.norms.append(float(self.step(self.first, self.optimizer)))
            return {}

    found = results_of(OneOptimizer(make_config(n_epochs=1, gradient_accumulation_steps=3, gradient_clip_val=0.05)))
    model, norms = network(), []
    fill(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in micro_batches(1, 3):
        sum(mse_loss(model(x), y) / len(window) for ((x, y, _),) in window).backward()
        # Both models have the same weights and gradients, of which one norm is taken.
        norms.append(torch.sqrt(sum(2 * p.grad.square().sum() for p in model.parameters())).item())
        for p in model.parameters():
            p.grad *= min(1.0, 0.05 / (norms[-1] + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
    assert min(norms) > 0.05
    assert found["norms"] == pytest.approx(norms, rel=1e-12)
    for name in ("first", "second"):
        assert_same_weights(found["models"][name], weights(model))


class Three(Body):
    """Three models, of which each test weighs and steps some."""

    def configure_models(self) -> None:
        self.a, self.b, self.c = network(), network(), network()

    def configure_optimizers(self) -> None:
        self.optimizers = {name: torch.optim.SGD(m.parameters(), lr=0.1) for name, m in self.named_models().items()}

    def weigh(self, batch: Batch, name: str, weight: float) -> None:
        model = self.named_models()[name]
        self.backward(mse_loss(model(batch[0]), batch[1]), weight=weight, model=model)


def test_stepping_a_model_that_shares_no_total_with_the_others_is_an_error() -> None:
    class Wrong(Three):
        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            self.weigh(batch, "a", 2)
            self.weigh(batch, "b", 10)
            self.step(self.a, self.optimizers["a"])
            self.step(self.c, self.optimizers["c"])  # whose total would it be?
            return {}

    with pytest.raises(StepError, match=r"backward\(\.\.\., model=model\)"):
        results_of(Wrong(make_config(n_epochs=1)))


@pytest.mark.pitfall(17)
def test_weighted_gradients_of_a_model_that_nobody_stepped_are_an_error_that_names_it() -> None:
    class Forgets(Three):
        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            self.weigh(batch, "b", 3)
            self.weigh(batch, "a", 2)
            self.step(self.a, self.optimizers["a"])
            return {}

    with pytest.raises(StepError, match=r"weighted gradients of b and no step\(\)"):
        results_of(Forgets(make_config(n_epochs=1)))


@pytest.mark.pitfall(3)
def test_a_weighted_critic_of_several_turns_and_its_actor_each_have_their_own_totals() -> None:
    class Turns(Three):
        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            for turn in range(3):
                self.weigh(batch, "a", turn + 1)
                self.step(self.a, self.optimizers["a"])
                if turn == 0:
                    self.weigh(batch, "b", 7)
            self.step(self.b, self.optimizers["b"])
            return {}

    found = results_of(Turns(make_config(n_epochs=1)))["models"]
    for name, turns in {"a": 3, "b": 1, "c": 0}.items():
        model = filled_network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for ((x, y, _),) in [window[0] for window in micro_batches(1, 1) for _ in range(turns)]:
            mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(found[name], model)


# -- models stay what they are


@pytest.mark.pitfall(24)
@pytest.mark.parametrize("name", RUNS)
def test_names_in_the_state_dict_and_forward_stay_as_the_user_wrote_them(
    ranks: list[dict[str, Any]], name: str
) -> None:
    expected = RUNS[name].by_hand(len(ranks), 1)["models"]
    for rank in ranks:
        found = rank[f"{name}/1"]
        assert found["names"] == {model: list(state) for model, state in expected.items()}
        assert found["patched"] == []


@pytest.mark.pitfall(24)
def test_a_copied_model_computes_with_its_own_weights() -> None:
    with GAN(make_config(n_epochs=1)) as trainer:
        trainer.fit()
        twin = copy.deepcopy(trainer.generator)
        before = weights(trainer.generator)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert twin(torch.ones(1, 1, dtype=torch.float64)).abs().max() == 0
        assert trainer.generator(torch.ones(1, 1, dtype=torch.float64)).abs().max() > 0
        assert_same_weights(weights(trainer.generator), before)
        assert trainer.get_optimizers_by_model(twin) == []


class Pair(Body):
    """Two models of the same shapes, each with its optimizer."""

    def configure_models(self) -> None:
        self.first, self.second = network(), network()

    def configure_optimizers(self) -> None:
        self.first_optimizer = torch.optim.SGD(self.first.parameters(), lr=0.1)
        self.second_optimizer = torch.optim.SGD(self.second.parameters(), lr=0.1)


def fit_pair(kind: type[Pair]) -> None:
    fit(kind(make_config(max_steps=2)))


def test_a_step_of_another_model_s_optimizer_is_refused_by_name() -> None:
    class Swapped(Pair):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            self.backward(self.first(batch[0]).square().mean())
            self.step(self.first, self.first_optimizer)
            self.backward(self.second(batch[0]).square().mean())
            self.step(self.second if batch_idx == 0 else self.first, self.second_optimizer)
            return {}

    with pytest.raises(StepError, match=r"given self.first, and an optimizer that updates self.second alone"):
        fit_pair(Swapped)


def test_a_loop_that_passes_the_trainer_by_is_told_so_and_not_of_another_model() -> None:
    class PlainLoop(Pair):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            self.first(batch[0]).square().mean().backward()
            self.first_optimizer.step()
            return {}

    with pytest.raises(StepError, match=r"neither self.backward\(...\) nor self.step\(...\) was called") as found:
        fit_pair(PlainLoop)
    assert "frozen" not in str(found.value)


class Forgotten(Pair):
    """The first model's optimizer has its first weight alone; nobody trains the second, and the third is frozen."""

    def configure_models(self) -> None:
        super().configure_models()
        self.teacher = network().requires_grad_(False)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD([next(self.first.parameters())], lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.backward(self.first(batch[0]).square().mean())
        self.step(self.first, self.optimizer)
        return {}


def test_parameters_that_no_optimizer_has_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with Forgotten(make_config(max_steps=1)) as trainer:
        trainer.fit()
        trainer.set_limits(max_steps=2)
        trainer.fit()
        of_first = [f"first.{name}" for name, _ in trainer.first.named_parameters()]
        left_out = [*of_first[1:], *(f"second.{name}" for name, _ in trainer.second.named_parameters())]
    (line,) = [line for line in caplog.messages if "no optimizer" in line]
    assert f"no optimizer: {left_out[0]}, {left_out[1]} and {len(left_out) - 2} more" in line


def test_a_parameter_in_two_optimizers_is_named_with_both(caplog: pytest.LogCaptureFixture) -> None:
    class Shared(Pair):
        def configure_optimizers(self) -> None:
            super().configure_optimizers()
            first = list(self.first.parameters())
            self.another = torch.optim.SGD(first[1:], lr=0.1)

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            self.backward(self.first(batch[0]).square().mean())
            self.step(self.first, self.first_optimizer)
            return {}

    with Shared(make_config(max_steps=1)) as trainer:
        trainer.fit()
        name = [name for name, _ in trainer.first.named_parameters()][1]
    (line,) = [line for line in caplog.messages if "in self." in line]
    assert line.startswith(f"first.{name} is in self.first_optimizer and in self.another: each that is stepped")


def test_nothing_is_said_where_each_trainable_parameter_has_an_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    class Frozen(Forgotten):
        def configure_models(self) -> None:
            super().configure_models()
            self.first.requires_grad_(False)
            self.second.requires_grad_(False)
            next(self.first.parameters()).requires_grad_(True)

    fit(Frozen(make_config(max_steps=1)))
    assert "no optimizer" not in caplog.text
    assert "in self." not in caplog.text
