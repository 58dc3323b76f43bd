"""Several models and optimizers in one trainer, side by side and in turns, against the same written by hand."""

import contextlib
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from tests.api import DistributedDataLoader, StepError
from tests.trainer import small
from tests.worlds import run_each, run_world

LENGTH, SIZE = 24, 2
CLIP, ACCUMULATION = 0.2, 3


class Body(small.Spread):
    def __init__(self, config: Any, options: Any = None) -> None:
        super().__init__(config, DistributedDataLoader(small.Samples(LENGTH), SIZE))
        self.options = options  # for those who derive from it

    def init_weights(self) -> None:
        for model in self.named_models().values():
            small.fill(model)


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


@pytest.mark.pitfall(4, 15, 58)
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
    with contextlib.suppress(ZeroDivisionError), trainer.frozen(model):
        inside = [p.requires_grad for p in model.parameters()]
        raise ZeroDivisionError
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
        self.first, self.second = small.network(), small.network()

    def configure_optimizers(self) -> None:
        self.first_optimizer, self.second_optimizer = small.sgd(self.first), small.sgd(self.second)

    def model_blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model[0])

    def weight_of(self, batch: small.Batch) -> int | None:
        return weight_of(batch) if self.options.weighted else None

    def learn(self, model: nn.Module, batch: small.Batch, scale: float = 1.0) -> None:
        self.backward(small.mean_square(model, batch) * scale, weight=self.weight_of(batch), model=model)


def weight_of(batch: small.Batch) -> int:
    return int(batch[2][0]) % 3 + 1


class Early(Pair):
    """The second model learns from a window's first micro-batch alone, and is stepped at its end."""

    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
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

    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
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

    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
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

    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        self.learn(self.second, batch)
        self.step(self.second, self.second_optimizer)
        with self.frozen(self.second):
            loss = through(self.first, self.second, batch)
        self.backward(loss, weight=self.weight_of(batch), model=self.first)
        self.step(self.first, self.first_optimizer)
        return {}


def through(first: nn.Module, second: nn.Module, batch: small.Batch) -> Tensor:
    return mse_loss(second(first(batch[0]).expand(-1, small.WIDTH)), -batch[1])


KINDS: dict[str, type[Pair]] = {"early": Early, "bare": Bare, "critic": Critic, "retried": Retried, "frozen": Frozen}


def train(case: Case) -> dict[str, Any]:
    policy = {"on_nonfinite": "retry"} if case.kind == "retried" else {}
    config = small.make_config(
        n_epochs=1,
        gradient_accumulation_steps=case.accumulation,
        sync_policy=case.sync_policy,
        devices=dt.DeviceParameters(device="cpu", activation_checkpointing=case.recompute),
        fsdp=small.BY_BLOCKS if case.layout == "blocks" else None,
        **policy,
    )
    kind = KINDS[case.kind]
    with (kind if case.layout == "replicate" else small.sharded(kind))(config, case) as trainer:
        trainer.fit()
        return {name: small.weights(model) for name, model in trainer.named_models().items()}


def by_hand(case: Case, world_size: int) -> dict[str, Any]:
    models = {"first": small.filled_network(), "second": small.filled_network()}
    optimizers = {name: small.sgd(model) for name, model in models.items()}

    def apply(name: str) -> None:
        optimizers[name].step()
        optimizers[name].zero_grad()

    def learn(name: str, batches: list[small.Batch], n_batches: int, scale: float = 1.0) -> None:
        counts = [weight_of(batch) if case.weighted else 1 for batch in batches]
        total = sum(counts) if case.weighted else n_batches
        for batch, count in zip(batches, counts, strict=True):
            (small.mean_square(models[name], batch) * scale * count / total).backward()
        apply(name)

    chunks = small.windows(LENGTH, SIZE, world_size)
    for start in range(0, len(chunks), case.accumulation):
        window = chunks[start : start + case.accumulation]
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
    return {name: small.weights(model) for name, model in models.items()}


LAYOUTS = ("replicate", "fsdp", "blocks")
CASES = [
    *(Case("early", layout, sync_policy=policy) for layout in LAYOUTS for policy in POLICIES),
    *(Case("early", layout, 3, weighted=True) for layout in LAYOUTS),
    *(Case("bare", layout) for layout in LAYOUTS[1:]),
    *(Case("critic", layout, accumulation) for layout in LAYOUTS for accumulation in (1, 3)),
    *(Case("critic", layout, 2, weighted=True) for layout in LAYOUTS),
    *(Case("retried", layout, 2) for layout in LAYOUTS),
    *(Case("frozen", layout, 2, recompute=how) for layout in LAYOUTS for how in ("none", "full", "selective")),
]


@pytest.mark.pitfall(70, 71)
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_models_in_turns_train_as_by_hand(n_ranks: int) -> None:
    for case, ranks in run_each(train, n_ranks, CASES):
        expected = by_hand(case, n_ranks)
        for found in ranks:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, msg=f"{case}: {{}}".format)


class Leaks:
    def frozen(self, *models: nn.Module) -> Any:
        return contextlib.nullcontext()


class FrozenFirst(Pair):
    """As Frozen, but the second model learns after the first one."""

    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
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

    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        result = super().training_step(batch, batch_idx)
        self.second_optimizer.zero_grad()
        return result


def made(kind: type[Pair], accumulation: int = 1) -> Pair:
    return kind(small.make_config(n_epochs=1, gradient_accumulation_steps=accumulation), Case("frozen", "single"))


@pytest.mark.pitfall(70)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_critics_next_turn_never_uses_what_the_generators_loss_left(accumulation: int) -> None:
    with pytest.raises(StepError, match=r"(?s)trained first left gradients in second.*frozen\(self\.second\)"):
        made(ForgetsFirst, accumulation).fit()
    small.fit(made(FrozenFirst, accumulation))


@pytest.mark.pitfall(58, 70)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_window_that_leaves_gradients_in_a_model_is_an_error_that_names_it(accumulation: int) -> None:
    with pytest.raises(StepError, match=r"gradients in second that no step\(\) used.*frozen\(self\.second\)"):
        made(ForgetsLast, accumulation).fit()


def forgiven() -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    found = []
    for forgives, frozen in ((Forgives, Frozen), (small.sharded(Forgives), small.sharded(Frozen))):
        with made(forgives) as one, made(frozen) as other:
            one.fit()
            other.fit()
            found.append((small.weights(one.second), small.weights(other.second)))
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
