"""NaN and infinite gradients: raise, skip and retry, with norms read late as on an accelerator, except on_a_cpu."""

import contextlib
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.functional import mse_loss

from dream_trainer.trainer.step import nonfinite
from tests.api import DistributedDataLoader, NonFiniteError, StepError, World
from tests.late_norms import norms_are_read_late
from tests.trainer import small
from tests.worlds import run_world

pytestmark = pytest.mark.usefixtures("late_norms")
READING_WAITS = nonfinite.reading_waits
NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=["fused AdamW", "fused AdamW on a CPU", "SGD"])
def make_optimizer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that skips on the device, with norms that are read late and at once; and one that cannot."""
    if request.param == "fused AdamW on a CPU":
        monkeypatch.setattr(nonfinite, "reading_waits", READING_WAITS)
    return small.sgd if request.param == "SGD" else small.fused_adamw


class Poisoned:
    """Multiplies the loss at given micro-batches (counted over the run) by a value, each so many times."""

    poison: dict[int, tuple[float, int]] = {}
    poisoned_rank = 0

    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        loss = mse_loss(self.model(batch[0]), batch[1])
        value, times = self.poison.get(self.local_batches, (1.0, 0))
        if times and self.world.rank == self.poisoned_rank:
            self.poison = self.poison | {self.local_batches: (value, times - 1)}
            loss = loss * value
        self.backward(loss)
        if not self.is_accumulating_gradients:
            self.kept = [*vars(self).get("kept", []), self.step(self.model, self.optimizer)]
        return {}


class Bad(Poisoned, small.Alone):
    pass


def train(make_optimizer: Any, poison: dict[int, tuple[float, int]], count: int = 6, **training: Any) -> Bad:
    trainer = Bad(small.make_config(n_epochs=1, **training), small.batches(count), make_optimizer=make_optimizer)
    trainer.poison = poison
    return small.fit(trainer)


@pytest.mark.pitfall(14)
def test_raise_names_the_step_and_leaves_the_weights_of_before_it_whatever_runs_after(make_optimizer: Any) -> None:
    skips_late = make_optimizer is small.fused_adamw and nonfinite.reading_waits is not READING_WAITS
    trainer = Bad(small.make_config(n_epochs=1), small.batches(6), make_optimizer=make_optimizer)
    trainer.poison = {3: (NAN, 1)}
    with pytest.raises(NonFiniteError, match=r"optimizer step 4 .*on_nonfinite=\"skip\""):
        trainer.fit()
    assert trainer.global_step == (6 if skips_late else 3)
    small.assert_same_weights(
        small.weights(trainer.model), small.by_hand([[b] for b in small.batches(6)[:3]], make_optimizer=make_optimizer)
    )


@pytest.mark.parametrize("limit", [1e-7, 0.1, 1e4])
def test_clipping_is_the_same_with_the_norm_read_at_once_or_late(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    for reads in (READING_WAITS, lambda device: True):
        monkeypatch.setattr(nonfinite, "reading_waits", reads)
        trainer = train(small.fused_adamw, {}, gradient_clip_norm=limit, gradient_accumulation_steps=2)
        trained.append(small.weights(trainer.model))
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())


def test_raise_is_seen_before_a_validation() -> None:
    class Checked(Bad):
        def validation_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
            raise AssertionError("validated after a bad step")

    config = small.make_config(n_epochs=1, val_every_n_steps=3)
    trainer = Checked(config, small.batches(6), small.batches(1), make_optimizer=small.fused_adamw)
    trainer.poison = {1: (NAN, 1)}
    with pytest.raises(NonFiniteError, match="optimizer step 2 "):
        trainer.fit()


@pytest.mark.pitfall(14)
@pytest.mark.parametrize(
    ("policy", "poison", "accumulation", "windows", "finite"),
    [
        ("skip", {1: (NAN, 1), 4: (INF, 1)}, 1, [[0], [2], [3], [5]], [1, 0, 1, 1, 0, 1]),
        ("skip", {2: (NAN, 1)}, 4, [[4, 5]], [0, 1]),
        ("retry", {3: (NAN, 2)}, 2, [[0, 1], [2, 3], [4, 5]], [1, 1, 1]),  # nothing is left of its first tries
    ],
)
def test_skip_leaves_a_window_out_and_retry_runs_it_again(
    policy: str, poison: Any, accumulation: int, windows: Any, finite: list[int], make_optimizer: Any, monkeypatch: Any
) -> None:
    monkeypatch.delitem(sys.modules, "torchmetrics", raising=False)  # which most programs do not import
    trainer = train(make_optimizer, poison, on_nonfinite=policy, gradient_accumulation_steps=accumulation)
    data = small.batches(6)
    expected = small.by_hand([[data[i] for i in window] for window in windows], make_optimizer=make_optimizer)
    small.assert_same_weights(small.weights(trainer.model), expected)
    assert (trainer.global_step, trainer.skipped_steps) == (len(finite), finite.count(0))
    assert (trainer.local_batches, trainer.samples_seen) == (6, 12)
    assert [int(torch.isfinite(norm)) for norm in trainer.kept] == finite


def test_skip_and_retry_give_up_after_too_many_in_a_row() -> None:
    in_a_row = dict.fromkeys((1, 2, 3), (NAN, 1))
    with pytest.raises(NonFiniteError, match="max_nonfinite=2"):
        train(small.fused_adamw, in_a_row, on_nonfinite="skip", max_nonfinite=2)
    apart = dict.fromkeys((0, 1, 3, 4), (NAN, 1))
    assert train(small.fused_adamw, apart, on_nonfinite="skip", max_nonfinite=2).skipped_steps == 4
    with pytest.raises(NonFiniteError, match="max_nonfinite=3"):
        train(small.fused_adamw, {2: (NAN, 99)}, on_nonfinite="retry", max_nonfinite=3)
    assert train(small.fused_adamw, {2: (NAN, 3)}, on_nonfinite="retry", max_nonfinite=3).global_step == 6


def test_retry_does_not_step_the_windows_first_optimizer_twice() -> None:
    class Two(small.Alone):
        tries = 0

        def setup(self) -> None:
            super().setup()
            self.head = torch.optim.SGD(self.model[1].parameters(), lr=0.1)
            self.body = torch.optim.SGD(self.model[0].parameters(), lr=0.1)

        def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
            self.backward(mse_loss(self.model(batch[0]), batch[1]))
            self.step(self.model, self.head)
            Two.tries += 1
            if Two.tries == 1:
                for p in self.model[0].parameters():
                    p.grad.fill_(NAN)
            self.step(self.model, self.body)
            return {}

    trainer = Two(small.make_config(n_epochs=1, on_nonfinite="retry"), small.batches(1))
    with contextlib.suppress(StepError, NonFiniteError), trainer:
        trainer.fit()
    expected = small.by_hand(
        [small.batches(1)], make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
    )
    small.assert_same_weights(small.weights(trainer.model[1]), small.weights(expected[1]))


@pytest.mark.pitfall(14)
@pytest.mark.parametrize("policy", ["raise", "skip", "retry"])
def test_a_gradient_of_zero_is_no_error(make_optimizer: Any, policy: str) -> None:
    zero = {1: (0.0, 1)}
    trainer = train(make_optimizer, zero, on_nonfinite=policy, max_nonfinite=0, gradient_clip_norm=1.0)
    assert (trainer.global_step, trainer.skipped_steps) == (6, 0)
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_a_window_that_weighs_nothing_is_left_out_though_its_gradients_are_nan_and_later_ones_train() -> None:
    """A batch whose tokens are all masked: 0 / 0, weighted by 0."""

    class Masked(small.Alone):
        def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
            x, y, _ = batch
            mask = torch.full_like(y, 0.0 if batch_idx in (1, 4) else 1.0)
            loss = ((self.model(x) - y).square() * mask).sum() / mask.sum()
            self.backward(loss, weight=mask.sum())
            self.step(self.model, self.optimizer)
            return {}

    data = small.batches(6)
    with Masked(small.make_config(n_epochs=1), data, make_optimizer=small.fused_adamw) as trainer:
        trainer.fit()
        assert (trainer.global_step, trainer.skipped_steps) == (6, 2)
    expected = small.by_hand([[data[i]] for i in (0, 2, 3, 5)], make_optimizer=small.fused_adamw)
    small.assert_same_weights(small.weights(trainer.model), expected)


@pytest.mark.pitfall(14)
@pytest.mark.parametrize(
    ("first", "bad_step"), [(small.fused_adamw, 0), (small.sgd, 4)], ids=["fused AdamW first", "SGD first"]
)
def test_raise_lets_no_optimizer_train_on_after_a_bad_step_if_one_of_two_cannot_skip(first: Any, bad_step: int) -> None:
    class Pair(small.Alone):
        def setup(self) -> None:
            self.one, self.two = small.network(), small.network()
            small.fill(self.one)
            small.fill(self.two)
            self.optimizers = [
                first(self.one),
                (small.sgd if first is small.fused_adamw else small.fused_adamw)(self.two),
            ]

        def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
            for model, optimizer in zip((self.one, self.two), self.optimizers, strict=True):
                factor = NAN if model is self.one and self.global_step == bad_step else 1.0
                self.backward(mse_loss(model(batch[0]), batch[1]) * factor)
                self.step(model, optimizer)
            return {}

    trainer = Pair(small.make_config(n_epochs=1), small.batches(8))
    with pytest.raises(NonFiniteError, match=f"optimizer step {bad_step + 1} "):
        trainer.fit()
    before = [[batch] for batch in small.batches(8)[:bad_step]]
    second = small.sgd if first is small.fused_adamw else small.fused_adamw
    small.assert_same_weights(small.weights(trainer.one), small.by_hand(before, make_optimizer=first))
    small.assert_same_weights(small.weights(trainer.two), small.by_hand(before, make_optimizer=second))


class BadSpread(Poisoned, small.Spread):
    poisoned_rank = 1


BadSharded = small.sharded(BadSpread)
ON_RANKS: list[tuple[Any, Any, str]] = [(BadSpread, small.fused_adamw, "skip"), (BadSpread, small.sgd, "retry")]
ON_RANKS += [(BadSharded, small.sgd, "skip"), (BadSharded, small.fused_adamw, "retry")]
ON_RANKS += [(BadSharded, small.fused_adamw, "raise")]


@norms_are_read_late()
def skip_and_retry() -> list[Any]:
    found: list[Any] = []
    for cls, make_optimizer, policy in ON_RANKS:
        loader = DistributedDataLoader(small.Samples(16), 2)
        trainer = cls(small.make_config(n_epochs=1, on_nonfinite=policy), loader, make_optimizer=make_optimizer)
        trainer.poison = {1: (NAN, 1)}
        raises = pytest.raises(NonFiniteError, match="optimizer step 2 is nan")
        with trainer:
            # Rank 1 alone sees it, and yet both raise, at the same step: nobody has to end the other.
            with mock.patch.object(World, "fail"), raises if policy == "raise" else contextlib.nullcontext():
                trainer.fit()
            found.append((small.weights(trainer.model), trainer.global_step, trainer.skipped_steps))
    return found


@pytest.mark.pitfall(14)
def test_nan_on_one_rank_alone_is_decided_alike_on_all() -> None:
    data = small.batches(4, size=4)
    for (_, make_optimizer, policy), *ranks in zip(ON_RANKS, *run_world(skip_and_retry, 2), strict=True):
        steps = {"skip": [0, 2, 3], "retry": [0, 1, 2, 3], "raise": [0]}[policy]
        expected = small.by_hand([[data[i]] for i in steps], make_optimizer=make_optimizer)
        for found, step, skipped in ranks:
            assert (step, skipped) == (4, policy == "skip")
            small.assert_same_weights(found, expected)


class Halves(torch.nn.Module):
    """Has another buffer after each forward, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("share", torch.ones(1))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.share, self.calls = self.share * 0.5, self.calls + 1
        return x * (1 + self.share) * (1 + 1 / (1 + self.calls))


@pytest.mark.pitfall(70)
def test_a_window_that_runs_again_counts_once_in_metrics_and_in_batch_norms_statistics() -> None:
    from torchmetrics import MeanMetric, MetricCollection, SumMetric

    class Counts(small.Alone):
        poison = 1

        def setup(self) -> None:
            self.model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), Halves(), torch.nn.Linear(3, 1)).double()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.seen_samples, self.validated = SumMetric(), SumMetric()
            self.both = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()})
            self.by_epoch: list[tuple[float, ...]] = []

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            loss = self.model(batch[0]).square().mean()
            self.seen_samples.update(len(batch[0]))
            self.both.update(float(batch_idx))
            if batch_idx == 1 and self.poison:
                self.poison -= 1
                loss = loss * NAN
            self.backward(loss)
            self.step(self.model, self.optimizer)
            return {}

        def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            self.validated.update(len(batch[0]))
            return {}

        def post_val_epoch(self, metrics: dict[str, float]) -> None:
            of_both = self.both.compute()
            self.by_epoch.append((float(self.validated.compute()), float(of_both["mean"]), float(of_both["sum"])))
            self.both.reset()
            self.validated.reset()

    found = []
    for poison in (0, 1):
        with Counts(small.make_config(n_epochs=3, on_nonfinite="retry"), small.batches(4), small.batches(2)) as trainer:
            trainer.poison = poison
            trainer.fit()
        assert float(trainer.seen_samples.compute()) == 24
        assert trainer.by_epoch == [(4, 1.5, 6), (4, 1.5, 6), (4, 1.5, 6)]
        found.append(trainer.model.state_dict())
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name
