"""NaN and infinite gradients: raise, skip and retry, alone and over ranks, with and without an optimizer that skips.

Norms are read late, as on an accelerator, so that fused AdamW skips by itself; as on a CPU where a test says so.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import dream_trainer as dt
from dream_trainer.trainer.step import nonfinite
from tests.api import DistributedDataLoader, NonFiniteError, PerRankLoader, StepError
from tests.late_norms import norms_are_read_late
from tests.trainer.small import (
    Alone,
    Batch,
    Samples,
    Sharded,
    Spread,
    assert_same_weights,
    batches,
    by_hand,
    fill,
    fit,
    fused_adamw,
    make_config,
    network,
    run_ranks,
    sgd,
    weights,
)
from tests.worlds import run_world

pytestmark = pytest.mark.usefixtures("late_norms")
READING_WAITS = nonfinite.reading_waits
OPTIMIZERS = pytest.mark.parametrize("make_optimizer", [fused_adamw, sgd], ids=["fused AdamW", "SGD"])


class Poisoned:
    """Multiplies the loss at given micro-batches (counted over the run) by a value, each so many times."""

    poison: dict[int, tuple[float, int]] = {}
    poisoned_rank = 0

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        loss = mse_loss(self.model(batch[0]), batch[1])
        value, times = self.poison.get(self.local_batches, (1.0, 0))
        if times and self.world.rank == self.poisoned_rank:
            self.poison = self.poison | {self.local_batches: (value, times - 1)}
            loss = loss * value
        self.backward(loss)
        if not self.is_accumulating_gradients:
            self.kept = [*vars(self).get("kept", []), self.step(self.model, self.optimizer)]
        return {}


class Bad(Poisoned, Alone):
    pass


def train(make_optimizer: Any, poison: dict[int, tuple[float, int]], count: int = 6, **training: Any) -> Bad:
    trainer = Bad(make_config(n_epochs=1, **training), batches(count), make_optimizer=make_optimizer)
    trainer.poison = poison
    return fit(trainer)


@pytest.mark.pitfall(14)
@OPTIMIZERS
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_raise_names_the_step_as_loggers_do_and_leaves_the_weights_of_before_it_whatever_runs_after(
    make_optimizer: Any, value: float
) -> None:
    trainer = Bad(make_config(n_epochs=1), batches(6), make_optimizer=make_optimizer)
    trainer.poison = {3: (value, 1)}
    with pytest.raises(NonFiniteError, match=r"optimizer step 4 .*nonfinite=\"skip\""):
        trainer.fit()
    data = batches(6)
    assert_same_weights(weights(trainer.model), by_hand([[b] for b in data[:3]], make_optimizer=make_optimizer))


@pytest.mark.pitfall(14)
@pytest.mark.parametrize("late", [False, True])
def test_on_a_cpu_raise_comes_in_the_step_itself_and_elsewhere_when_the_norms_are_read(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nonfinite, "reading_waits", (lambda device: True) if late else READING_WAITS)
    trainer = Bad(make_config(n_epochs=1), batches(6), make_optimizer=fused_adamw)
    trainer.poison = {3: (float("nan"), 1)}
    with pytest.raises(NonFiniteError, match="optimizer step 4 "):
        trainer.fit()
    assert trainer.global_step == (6 if late else 3)
    assert_same_weights(weights(trainer.model), by_hand([[b] for b in batches(6)[:3]], make_optimizer=fused_adamw))


@pytest.mark.parametrize("policy", ["skip", "retry"])
def test_on_a_cpu_fused_optimizers_skip_and_retry_by_the_host(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite, "reading_waits", READING_WAITS)
    trainer = train(fused_adamw, {1: (float("nan"), 1), 4: (float("inf"), 1)}, nonfinite=policy)
    data = batches(6)
    trained = [0, 2, 3, 5] if policy == "skip" else range(6)
    assert_same_weights(weights(trainer.model), by_hand([[data[i]] for i in trained], make_optimizer=fused_adamw))
    assert (trainer.global_step, trainer.skipped_steps) == (6, 6 - len(trained))


@pytest.mark.parametrize("limit", [1e-7, 1e-3, 0.1, 1.0, 1e4])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_clipping_is_bit_for_bit_the_same_whether_the_norm_is_read_at_once_or_late(
    limit: float, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []
    for reads in (READING_WAITS, lambda device: True):
        monkeypatch.setattr(nonfinite, "reading_waits", reads)
        trainer = train(fused_adamw, {}, gradient_clip_val=limit, gradient_accumulation_steps=accumulation)
        trained.append(weights(trainer.model))
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())


@OPTIMIZERS
def test_raise_is_seen_before_a_validation(make_optimizer: Any) -> None:
    class Checked(Bad):
        def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            raise AssertionError("validated after a bad step")

    trainer = Checked(
        make_config(n_epochs=1, val_every_n_steps=3), batches(6), batches(1), make_optimizer=make_optimizer
    )
    trainer.poison = {1: (float("nan"), 1)}
    with pytest.raises(NonFiniteError, match="optimizer step 2 "):
        trainer.fit()


@pytest.mark.pitfall(14)
@OPTIMIZERS
def test_skip_leaves_weights_and_state_untouched_and_counts(make_optimizer: Any) -> None:
    trainer = train(make_optimizer, {1: (float("nan"), 1), 4: (float("inf"), 1)}, nonfinite="skip")
    data = batches(6)
    expected = by_hand([[data[i]] for i in (0, 2, 3, 5)], make_optimizer=make_optimizer)
    assert_same_weights(weights(trainer.model), expected)
    assert trainer.global_step == 6
    assert trainer.skipped_steps == 2
    assert [bool(torch.isfinite(norm)) for norm in trainer.kept] == [True, False, True, True, False, True]


@OPTIMIZERS
def test_skip_works_on_whole_windows(make_optimizer: Any) -> None:
    poison = {2: (float("nan"), 1)}
    trainer = train(make_optimizer, poison, count=7, nonfinite="skip", gradient_accumulation_steps=2)
    data = batches(7)
    expected = by_hand([data[0:2], data[4:6], data[6:7]], make_optimizer=make_optimizer)
    assert_same_weights(weights(trainer.model), expected)
    assert (trainer.global_step, trainer.skipped_steps) == (4, 1)


@OPTIMIZERS
def test_skip_gives_up_after_too_many_in_a_row(make_optimizer: Any) -> None:
    nan = float("nan")
    in_a_row = dict.fromkeys((1, 2, 3), (nan, 1))
    with pytest.raises(NonFiniteError, match="max_nonfinite=2"):
        train(make_optimizer, in_a_row, nonfinite="skip", max_nonfinite=2)
    apart = dict.fromkeys((0, 1, 3, 4), (nan, 1))
    assert train(make_optimizer, apart, nonfinite="skip", max_nonfinite=2).skipped_steps == 4


@OPTIMIZERS
def test_retry_runs_the_window_again(make_optimizer: Any) -> None:
    trainer = train(make_optimizer, {3: (float("nan"), 2)}, nonfinite="retry", gradient_accumulation_steps=2)
    data = batches(6)
    expected = by_hand([data[0:2], data[2:4], data[4:6]], make_optimizer=make_optimizer)
    assert_same_weights(weights(trainer.model), expected)
    assert (trainer.global_step, trainer.local_batches, trainer.samples_seen) == (3, 6, 12)


@OPTIMIZERS
def test_retry_gives_up_at_its_limit(make_optimizer: Any) -> None:
    with pytest.raises(NonFiniteError, match="max_nonfinite=3"):
        train(make_optimizer, {2: (float("nan"), 99)}, nonfinite="retry", max_nonfinite=3)
    assert train(make_optimizer, {2: (float("nan"), 3)}, nonfinite="retry", max_nonfinite=3).global_step == 6


def test_a_retried_window_is_logged_once() -> None:
    class Logs(Poisoned, Alone, dt.LoggerMixin):
        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            super().training_step(batch, batch_idx)
            return {"value": 1.0 + batch_idx}

        def on_log(self, metrics: dict[str, float], step: int) -> None:
            logged.append(metrics["train/value"])

    logged: list[float] = []
    config = make_config(n_epochs=1, nonfinite="retry", gradient_accumulation_steps=2, log_every=1)
    trainer = Logs(config, batches(2), make_optimizer=sgd)
    trainer.poison = {1: (float("nan"), 2)}
    with trainer:
        trainer.fit()
    assert logged == [1.5]


def test_retry_does_not_step_the_windows_first_optimizer_twice() -> None:
    class Two(Alone):
        tries = 0

        def setup(self) -> None:
            super().setup()
            self.head = torch.optim.SGD(self.model[1].parameters(), lr=0.1)
            self.body = torch.optim.SGD(self.model[0].parameters(), lr=0.1)

        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            self.backward(mse_loss(self.model(batch[0]), batch[1]))
            self.step(self.model, self.head)
            Two.tries += 1
            if Two.tries == 1:
                for p in self.model[0].parameters():
                    p.grad.fill_(float("nan"))
            self.step(self.model, self.body)
            return {}

    trainer = Two(make_config(n_epochs=1, nonfinite="retry"), batches(1))
    with contextlib.suppress(StepError, NonFiniteError), trainer:
        trainer.fit()
    expected = by_hand([batches(1)], make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert_same_weights(weights(trainer.model[1]), weights(expected[1]))


@pytest.mark.pitfall(14)
@OPTIMIZERS
@pytest.mark.parametrize("policy", ["raise", "skip", "retry"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gradient_of_zero_is_no_error(make_optimizer: Any, policy: str, clip: float | None) -> None:
    zero = {1: (0.0, 1)}
    trainer = train(make_optimizer, zero, nonfinite=policy, max_nonfinite=0, gradient_clip_val=clip)
    assert (trainer.global_step, trainer.skipped_steps) == (6, 0)
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


@OPTIMIZERS
def test_the_norm_is_not_finite_though_clipping_is_on(make_optimizer: Any) -> None:
    trainer = train(make_optimizer, {1: (float("inf"), 1)}, nonfinite="skip", gradient_clip_val=0.1)
    assert trainer.skipped_steps == 1
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_a_window_that_weighs_nothing_is_left_out_though_its_gradients_are_nan_and_later_ones_train() -> None:
    """A batch whose tokens are all masked: 0 / 0, weighted by 0."""

    class Masked(Alone):
        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            x, y, _ = batch
            mask = torch.full_like(y, 0.0 if batch_idx in (1, 4) else 1.0)
            loss = ((self.model(x) - y).square() * mask).sum() / mask.sum()
            self.backward(loss, weight=mask.sum())
            self.step(self.model, self.optimizer)
            return {}

    data = batches(6)
    with Masked(make_config(n_epochs=1), data, make_optimizer=fused_adamw) as trainer:
        trainer.fit()
        assert (trainer.global_step, trainer.skipped_steps) == (6, 2)
    expected = by_hand([[data[i]] for i in (0, 2, 3, 5)], make_optimizer=fused_adamw)
    assert_same_weights(weights(trainer.model), expected)


@pytest.mark.pitfall(14)
@pytest.mark.parametrize("bad_step", [0, 1, 4])
@pytest.mark.parametrize("first", [fused_adamw, sgd], ids=["fused AdamW first", "SGD first"])
def test_raise_lets_no_optimizer_train_on_after_a_bad_step_if_one_of_two_cannot_skip(first: Any, bad_step: int) -> None:
    class Pair(Alone):
        def setup(self) -> None:
            self.one, self.two = network(), network()
            fill(self.one)
            fill(self.two)
            self.optimizers = [first(self.one), (sgd if first is fused_adamw else fused_adamw)(self.two)]

        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            for model, optimizer in zip((self.one, self.two), self.optimizers, strict=True):
                factor = float("nan") if model is self.one and self.global_step == bad_step else 1.0
                self.backward(mse_loss(model(batch[0]), batch[1]) * factor)
                self.step(model, optimizer)
            return {}

    trainer = Pair(make_config(n_epochs=1), batches(8))
    with pytest.raises(NonFiniteError, match=f"optimizer step {bad_step + 1} "):
        trainer.fit()
    before = [[batch] for batch in batches(8)[:bad_step]]
    second = sgd if first is fused_adamw else fused_adamw
    assert_same_weights(weights(trainer.one), by_hand(before, make_optimizer=first))
    assert_same_weights(weights(trainer.two), by_hand(before, make_optimizer=second))


# -- over ranks


class BadSpread(Poisoned, Spread):
    poisoned_rank = 1


class BadSharded(Poisoned, Sharded):
    poisoned_rank = 1


@norms_are_read_late()
def skip_and_retry() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for layout, cls in {"replicate": BadSpread, "fsdp": BadSharded}.items():
        for kind, make_optimizer in {"adamw": fused_adamw, "sgd": sgd}.items():
            for policy in ("skip", "retry"):
                loader = DistributedDataLoader(Samples(16), 2)
                trainer = cls(make_config(n_epochs=1, nonfinite=policy), loader, make_optimizer=make_optimizer)
                trainer.poison = {1: (float("nan"), 1)}
                with trainer:
                    trainer.fit()
                    found[f"{layout}/{kind}/{policy}"] = (
                        weights(trainer.model),
                        trainer.global_step,
                        trainer.skipped_steps,
                    )
    return found


@pytest.mark.pitfall(14)
def test_nan_on_one_rank_alone_is_decided_alike_on_all() -> None:
    results = run_world(skip_and_retry, 2)
    data = batches(4, size=4)
    for case in results[0]:
        make_optimizer = fused_adamw if "adamw" in case else sgd
        steps = [0, 2, 3] if case.endswith("skip") else [0, 1, 2, 3]
        expected = by_hand([[data[i]] for i in steps], make_optimizer=make_optimizer)
        for rank in results:
            found, step, skipped = rank[case]
            assert (step, skipped) == (4, 4 - len(steps)), case
            assert_same_weights(found, expected)


@norms_are_read_late()
def raises_on_both(layout: str, kind: str) -> None:
    """Run as a program on each rank: prints the weights' distance from those before the bad step, then fails."""
    from tests.trainer.small import full

    class Tells(BadSharded if layout == "fsdp" else BadSpread):  # type: ignore[misc]
        def on_exception(self, exc: BaseException) -> None:
            # Both ranks raise at the same step, so here a collective is safe, as it is not in general.
            found = [full(p).detach() for p in self.model.parameters()]
            data = batches(4, size=4)
            expected = by_hand([[data[0]]], make_optimizer=make_optimizer).parameters()
            print(max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True)), file=sys.stderr)

    import sys

    make_optimizer = fused_adamw if kind == "adamw" else sgd
    trainer = Tells(make_config(n_epochs=1), PerRankLoader(halves()), make_optimizer=make_optimizer)
    trainer.poison = {1: (float("nan"), 1)}
    trainer.fit()


def halves() -> list[Batch]:
    """This rank's half of each of four batches of four samples."""
    import os

    rows = slice(2, 4) if os.environ["RANK"] == "1" else slice(0, 2)
    return [(x[rows], y[rows], n[rows]) for x, y, n in batches(4, size=4)]


@pytest.mark.pitfall(14)
@pytest.mark.parametrize(
    ("layout", "kind"), [("fsdp", "adamw"), pytest.param("replicate", "sgd", marks=pytest.mark.slow)]
)
def test_raise_ends_every_rank_at_the_same_step_with_the_weights_of_before(
    layout: str, kind: str, tmp_path: Path
) -> None:
    code = f"from tests.trainer.test_nonfinite import raises_on_both; raises_on_both({layout!r}, {kind!r})"
    ranks = run_ranks(code, 2, tmp_path)
    text = "".join(error for _, error in ranks)
    assert [status for status, _ in ranks] == [1, 1], text
    assert "optimizer step 2 is nan" in text
    distances = [float(found) for found in re.findall(r"^([0-9.e-]+)$", text, flags=re.MULTILINE)]
    assert len(distances) == 2
    assert max(distances) < 1e-12


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

    class Counts(Alone):
        poison = 1

        def setup(self) -> None:
            self.model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), Halves(), torch.nn.Linear(3, 1)).double()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.seen_samples, self.validated = SumMetric(), SumMetric()
            self.both = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()})
            self.mean = self.both["mean"]
            self.by_epoch: list[tuple[float, ...]] = []

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            loss = self.model(batch[0]).square().mean()
            self.seen_samples.update(len(batch[0]))
            self.both.update(float(batch_idx))
            if batch_idx == 1 and self.poison:
                self.poison -= 1
                loss = loss * float("nan")
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
        with Counts(make_config(n_epochs=3, nonfinite="retry"), batches(4), batches(2)) as trainer:
            trainer.poison = poison
            trainer.fit()
        seen_samples = trainer.seen_samples
        assert trainer.both["mean"] is trainer.mean
        assert float(seen_samples.compute()) == 24
        assert trainer.by_epoch == [(4, 1.5, 6), (4, 1.5, 6), (4, 1.5, 6)]
        seen_samples.reset()
        seen_samples.update(1)
        assert float(seen_samples.compute()) == 1
        found.append(trainer.model.state_dict())
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name
