"""Several models and optimizers in one trainer, against the same written by hand; turns of models: test_turns.py."""

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import dream_trainer as dt
from tests.api import DistributedDataLoader, StepError
from tests.trainer import small
from tests.worlds import run_world

LENGTH, SIZE = 24, 2
CLIP, ACCUMULATION = 0.2, 3


class Body(dt.BaseTrainer, dt.SetupMixin):
    def __init__(self, config: Any, options: Any = None) -> None:
        super().__init__(config)
        self.options = options  # for those who derive from it
        self.norms: list[float] = []

    def init_weights(self) -> None:
        for model in self.named_models().values():
            small.fill(model)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return DistributedDataLoader(small.Samples(LENGTH), SIZE), None


def micro_batches(world_size: int, accumulation: int) -> list[list[list[small.Batch]]]:
    """By window and accumulation index, the batches of all ranks."""
    chunks = small.windows(LENGTH, SIZE, world_size)
    return [chunks[start : start + accumulation] for start in range(0, len(chunks), accumulation)]


def results_of(trainer: Any) -> dict[str, Any]:
    with trainer:
        trainer.fit()
        models = {name: small.weights(model) for name, model in trainer.named_models().items()}
        names = {name: list(model.state_dict()) for name, model in trainer.named_models().items()}
        parts = [part for model in trainer.named_models().values() for part in model.modules()]
        patched = [name for part in parts for name in ("forward", "__call__", "state_dict") if name in vars(part)]
    return {"models": models, "norms": trainer.norms, "names": names, "patched": patched}


class TwoHeads(Body):
    """Two independent models, each weighted by a count of its own; the second has two optimizers that share a norm."""

    def configure_models(self) -> None:
        self.first, self.second = small.network(), small.network()

    def configure_optimizers(self) -> None:
        self.first_optimizer = torch.optim.SGD(self.first.parameters(), lr=0.1)
        self.parts = [torch.optim.SGD(self.second[i].parameters(), lr=0.1 * (i + 1)) for i in (0, 1)]

    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        for model, count in ((self.first, count_of_first(batch)), (self.second, torch.tensor(count_of_second(batch)))):
            self.backward(small.mean_square(model, batch), weight=count, model=model)
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.first, self.first_optimizer)))
            self.norms.append(float(self.step(self.second, self.parts)))
        return {}


def count_of_first(batch: small.Batch) -> int:
    return int(batch[2][0]) % 5 + 1


def count_of_second(batch: small.Batch) -> int:
    """0 in some windows, where there is nothing to learn."""
    return int(batch[2][0]) % 3


def two_heads_by_hand(world_size: int) -> dict[str, Any]:
    models = {"first": small.filled_network(), "second": small.filled_network()}
    optimizers = {
        "first": torch.optim.SGD(models["first"].parameters(), lr=0.1),
        "second": [torch.optim.SGD(models["second"][i].parameters(), lr=0.1 * (i + 1)) for i in (0, 1)],
    }
    counts = {"first": count_of_first, "second": count_of_second}
    windows = small.windows(LENGTH, SIZE, world_size * ACCUMULATION)
    norms = [
        small.train_by_hand(models[name], optimizers[name], windows, weight_of=counts[name], clip=CLIP)
        for name in models
    ]
    weights = {name: small.weights(model) for name, model in models.items()}
    return {"models": weights, "norms": [norm for pair in zip(*norms, strict=True) for norm in pair]}


def train_both() -> list[dict[str, Any]]:
    config = small.make_config(n_epochs=1, gradient_accumulation_steps=ACCUMULATION, gradient_clip_norm=CLIP)
    return [results_of(cls(config)) for cls in (TwoHeads, small.sharded(TwoHeads))]


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> list[list[dict[str, Any]]]:
    return run_world(train_both, request.param)


@pytest.mark.pitfall(4)
@pytest.mark.pitfall(15)
@pytest.mark.pitfall(58)
def test_several_models_train_as_written_by_hand(ranks: list[list[dict[str, Any]]]) -> None:
    expected = two_heads_by_hand(len(ranks))
    for found in (layout for rank in ranks for layout in rank):
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        torch.testing.assert_close(found["models"], expected["models"], rtol=1e-8, atol=1e-10)


@pytest.mark.pitfall(24)
def test_names_in_the_state_dict_and_forward_stay_as_the_user_wrote_them(ranks: list[list[dict[str, Any]]]) -> None:
    for found in (layout for rank in ranks for layout in rank):
        assert found["names"] == {name: list(small.network().state_dict()) for name in ("first", "second")}
        assert found["patched"] == []


def test_frozen_gives_back_what_each_parameter_required_also_after_an_exception() -> None:
    trainer = Three(small.make_config())
    model = small.network()
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


def loss_of_both(models: Any, batch: small.Batch) -> Tensor:
    return sum(small.mean_square(model, batch) for model in models.values())


@pytest.mark.pitfall(62)
def test_what_an_optimizer_holds_beside_the_given_model_is_normalised_and_clipped_too() -> None:
    class OneOptimizer(TwoHeads):
        def configure_optimizers(self) -> None:
            self.optimizer = torch.optim.SGD([*self.first.parameters(), *self.second.parameters()], lr=0.1)

        def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
            self.backward(loss_of_both({"first": self.first, "second": self.second}, batch))
            if not self.is_accumulating_gradients:
                self.norms.append(float(self.step(self.first, self.optimizer)))
            return {}

    found = results_of(
        OneOptimizer(small.make_config(n_epochs=1, gradient_accumulation_steps=3, gradient_clip_norm=0.05))
    )
    both = nn.ModuleDict({"first": small.filled_network(), "second": small.filled_network()})
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    norms = small.train_by_hand(both, optimizer, small.windows(LENGTH, SIZE, 3), loss_of_both, clip=0.05)
    assert min(norms) > 0.05
    assert found["norms"] == pytest.approx(norms, rel=1e-12)
    for name, model in both.items():
        small.assert_same_weights(found["models"][name], model)


class Three(Body):
    """Follows a plan: "a2" is a loss of a that weighs 2 ("a0": unweighted), "a!" a step of it, "a!b" one by b's."""

    def configure_models(self) -> None:
        self.a, self.b, self.c = small.network(), small.network(), small.network()

    def configure_optimizers(self) -> None:
        self.optimizers = {name: torch.optim.SGD(m.parameters(), lr=0.1) for name, m in self.named_models().items()}

    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        for name, what, *other in self.options.split():
            model = self.named_models()[name]
            if what == "!":
                self.step(model, self.optimizers["".join(other) or name])
            else:
                self.backward(small.mean_square(model, batch), weight=int(what) or None, model=model)
        return {}


def follow(plan: str) -> dict[str, Any]:
    return results_of(Three(small.make_config(n_epochs=1), plan))


@pytest.mark.pitfall(17)
@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ("a2 b9 a! c!", r"backward\(\.\.\., model=model\)"),  # whose total would it be?
        ("b3 a2 a!", r"weighted gradients of b and no step\(\)"),
        ("a0 a! b0 b! b0 a!b", r"given self.a, and an optimizer that updates none of its parameters"),
    ],
)
def test_a_step_with_no_total_of_its_own_is_an_error_that_names_the_model(plan: str, told: str) -> None:
    with pytest.raises(StepError, match=told):
        follow(plan)


def test_a_loop_that_passes_the_trainer_by_is_told_so() -> None:
    class PlainLoop(Three):
        def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
            self.a(batch[0]).square().mean().backward()
            self.optimizers["a"].step()
            return {}

    with pytest.raises(StepError, match=r"Call self.backward\(loss\) instead of loss.backward"):
        results_of(PlainLoop(small.make_config(max_steps=1)))


@pytest.mark.pitfall(24)
def test_a_copied_model_computes_with_its_own_weights() -> None:
    with Three(small.make_config(n_epochs=1), "a1 a!") as trainer:
        trainer.fit()
        twin = copy.deepcopy(trainer.a)
        before = small.weights(trainer.a)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        x = torch.ones(1, small.WIDTH, dtype=torch.float64)
        assert twin(x).abs().max() == 0
        assert trainer.a(x).abs().max() > 0
        small.assert_same_weights(small.weights(trainer.a), before)
        assert trainer.get_optimizers_by_model(twin) == []


class Forgotten(Body):
    """Nobody trains the second model, the third is frozen, and of the first, one weight is in two optimizers."""

    def configure_models(self) -> None:
        self.first, self.second, self.teacher = small.network(), small.network(), small.network().requires_grad_(False)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.first[0].parameters(), lr=0.1)
        self.another = torch.optim.SGD([self.first[0][0][0].weight], lr=0.1)

    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        self.backward(self.first(batch[0]).square().mean())
        self.step(self.first, self.optimizer)
        return {}


def test_parameters_that_no_optimizer_has_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with Forgotten(small.make_config(max_steps=1)) as trainer:
        trainer.fit()
        trainer.set_limits(max_steps=2)
        trainer.fit()
        left_out = [
            "first.1.weight",
            "first.1.bias",
            *(f"second.{name}" for name, _ in trainer.second.named_parameters()),
        ]
    (line,) = [line for line in caplog.messages if "no optimizer" in line]
    assert f"no optimizer: {left_out[0]}, {left_out[1]} and {len(left_out) - 2} more" in line
    caplog.clear()
    follow("a1 a!")
    assert "optimizer" not in caplog.text
