"""Validation: exact means over ragged data and ranks, when it is due, and training left exactly as it was."""

from __future__ import annotations

import math
import os
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import dream_trainer as dt
from tests.api import ConfigError, DataError, DistributedDataLoader, HookError, PerRankLoader, Ranks, ValidationMetrics
from tests.trainer.small import (
    Alone,
    Batch,
    Samples,
    Sharded,
    Spread,
    Validates,
    assert_same_weights,
    batches,
    by_hand,
    fit,
    make_config,
    network,
    weights,
)
from tests.worlds import run_world


class Counted(Validates):
    """Records what was validated and what came of it."""

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if not self.is_padding_batch:
            self.validated = [*vars(self).get("validated", []), *batch[2].tolist()]
        result = super().validation_step(batch, batch_idx)
        return result | {"number": batch[2].double().mean()}

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        self.metrics = [*vars(self).get("metrics", []), metrics]


class Checked(Counted, Alone):
    pass


def ragged(sizes: list[int]) -> list[Batch]:
    data = Samples(sum(sizes))
    return list(zip(data.x.split(sizes), data.y.split(sizes), torch.arange(sum(sizes)).split(sizes), strict=True))


def whole_loss(model: nn.Module, length: int) -> float:
    data = Samples(length)
    with torch.no_grad():
        return mse_loss(model(data.x), data.y).item()


# -- exact, in one process


@pytest.mark.pitfall(45)
@pytest.mark.parametrize("sizes", [[4, 4, 4], [5, 1], [1, 9, 3], [1]], ids=str)
def test_the_mean_is_over_samples_and_not_over_batches(sizes: list[int]) -> None:
    trainer = fit(Checked(make_config(n_epochs=1), batches(2), ragged(sizes)))
    assert trainer.metrics[0]["val/loss"] == pytest.approx(whole_loss(trainer.model, sum(sizes)), rel=1e-12)
    assert trainer.metrics[0]["val/number"] == pytest.approx((sum(sizes) - 1) / 2, rel=1e-12)


@pytest.mark.pitfall(45)
def test_a_plain_loaders_tail_is_validated_whatever_drop_last_says() -> None:
    loader = DataLoader(Samples(7), batch_size=3, shuffle=True, drop_last=True)
    trainer = fit(Checked(make_config(n_epochs=1), batches(2), loader))
    assert trainer.validated == list(range(7))
    assert trainer.metrics[0]["val/loss"] == pytest.approx(whole_loss(trainer.model, 7), rel=1e-12)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_weight_that_is_returned_is_that_of_all_values_of_the_batch(as_tensor: bool) -> None:
    class Tokens(Checked, dt.LoggerMixin):
        def validation_step(self, batch: Batch, batch_idx: int) -> tuple[dict[str, Any], Any]:
            tokens = (batch[2] % 3).sum()  # none in some batches
            self.log("each", batch_idx)
            return {"number": float(batch_idx), "part": {"same": batch_idx}}, tokens if as_tensor else int(tokens)

    sizes = [2, 1, 3, 1, 2]
    metrics = fit(Tokens(make_config(max_steps=1), batches(1), ragged(sizes))).metrics[-1]
    tokens = [int((part % 3).sum()) for part in torch.arange(sum(sizes)).split(sizes)]
    assert 0 in tokens
    expected = sum(count * number for number, count in enumerate(tokens)) / sum(tokens)
    assert metrics["val/number"] == metrics["val/part/same"] == pytest.approx(expected, rel=1e-12)
    by_size = sum(size * number for number, size in enumerate(sizes)) / sum(sizes)
    assert metrics["val/each"] == pytest.approx(by_size, rel=1e-12)


def test_a_value_logged_with_a_weight_is_weighted_by_it() -> None:
    class Tokens(Checked, dt.LoggerMixin):
        def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            self.log("per_token", float(batch_idx), weight=[1, 9][batch_idx])
            return {}

    trainer = fit(Tokens(make_config(n_epochs=1), batches(2), batches(2)))
    assert trainer.metrics[0]["val/per_token"] == pytest.approx(0.9, rel=1e-12)


# -- when it is due


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        ({}, [5, 10, 15, 20]),
        ({"val_every_n_epochs": 2}, [10, 20]),
        ({"val_every_n_epochs": 3}, [15]),
        ({"val_every_n_epochs": None}, []),
        ({"val_every_n_epochs": None, "val_every_n_steps": 4}, [4, 8, 12, 16, 20]),
        ({"val_every_n_steps": 4}, [4, 5, 8, 10, 12, 15, 16, 20]),
        ({"val_every_n_epochs": None, "val_every_minutes": 1e-9}, list(range(1, 21))),
        ({"val_every_n_epochs": None, "val_every_minutes": 60.0}, []),
        ({"val_steps_per_epoch": 0}, []),
        ({"val_every_n_epochs": None, "val_every_n_steps": 3, "gradient_accumulation_steps": 2}, [3, 6, 9, 12]),
    ],
    ids=str,
)
def test_validation_runs_when_it_is_due_and_never_inside_a_window(schedule: dict[str, Any], steps: list[int]) -> None:
    class Watch(Checked):
        def pre_val_epoch(self) -> None:
            assert not self.is_accumulating_gradients
            assert all(p.grad is None for p in self.model.parameters())
            at.append(self.global_step)

    at: list[int] = []
    fit(Watch(make_config(n_epochs=4, **schedule), batches(5), batches(1)))
    assert at == steps


@pytest.mark.pitfall(7)
def test_val_steps_per_epoch_limits_the_batches_and_zero_validates_nothing() -> None:
    trainer = fit(Checked(make_config(n_epochs=1, val_steps_per_epoch=2), batches(2), batches(5)))
    assert trainer.validated == [0, 1, 2, 3]
    trainer = fit(Checked(make_config(n_epochs=1, val_steps_per_epoch=0), batches(2), batches(5)))
    assert "validated" not in vars(trainer)


# -- training is left as it was


class Noisy(Checked):
    """Draws from every generator in validation, and has a frozen part that stays in eval mode."""

    noisy = True

    def setup(self) -> None:
        super().setup()
        self.model.insert(1, nn.Dropout(0.3))
        self.draws: list[tuple[float, ...]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.draws.append((random.random(), float(np.random.rand()), torch.rand(()).item()))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if self.noisy:
            random.random(), np.random.rand(), torch.rand(3)
        return super().validation_step(batch, batch_idx)


@pytest.mark.pitfall(9)
def test_training_is_the_same_bits_with_and_without_validation() -> None:
    results = []
    for schedule in ({"val_every_n_epochs": None}, {"val_every_n_steps": 1}):
        config = make_config(n_epochs=2, gradient_accumulation_steps=2, **schedule)
        results.append(fit(Noisy(config, DataLoader(Samples(10), 2, shuffle=True), batches(3))))
    without, with_it = results
    assert "validated" not in vars(without)
    assert len(with_it.metrics) == 6
    assert without.draws == with_it.draws
    assert without.seen == with_it.seen
    assert without.losses == with_it.losses
    for name, value in weights(without.model).items():
        assert torch.equal(weights(with_it.model)[name], value)


def test_validation_is_the_same_each_time_though_it_draws() -> None:
    class Draws(Checked):
        def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            return {"draw": torch.rand(())}

    trainer = fit(Draws(make_config(n_epochs=3), batches(2), batches(2)))
    assert trainer.metrics[0] == trainer.metrics[1] == trainer.metrics[2]


@pytest.mark.pitfall(9)
def test_each_modules_own_mode_comes_back_and_inside_all_are_in_eval_mode() -> None:
    class Watch(Checked):
        def setup(self) -> None:
            super().setup()
            self.model[0].eval()

        def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            assert not any(module.training for module in self.model.modules())
            assert not self.training
            assert not torch.is_grad_enabled()
            return super().validation_step(batch, batch_idx)

    trainer = fit(Watch(make_config(n_epochs=1), batches(2), batches(2)))
    assert trainer.training
    assert not any(module.training for module in trainer.model[0].modules())
    assert trainer.model[1].training


@pytest.mark.pitfall(9)
def test_an_exception_in_validation_leaves_train_mode_and_gradients_on() -> None:
    class Breaks(Checked):
        def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            torch.rand(1)
            raise ZeroDivisionError

    trainer = Breaks(make_config(n_epochs=1), batches(2), batches(2))
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    assert trainer.training
    assert all(module.training for module in trainer.model.modules())
    assert torch.is_grad_enabled()


def test_a_window_accumulated_around_a_validation_asked_for_by_hand_keeps_its_gradients() -> None:
    class Asks(Checked, dt.EvalMixin):
        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            result = super().training_step(batch, batch_idx)
            if batch_idx == 0:
                self.evaluate(batches(2))
            return result

    data = batches(3)
    trainer = fit(Asks(make_config(n_epochs=1, gradient_accumulation_steps=3), data))
    assert_same_weights(weights(trainer.model), by_hand([data]))


# -- what is missing


def test_a_validation_loader_without_validation_step_is_an_error() -> None:
    with pytest.raises(HookError, match="validation_step is not overridden"):
        fit(Alone(make_config(n_epochs=1), batches(2), batches(2)))


def test_a_validation_step_without_a_loader_is_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    trainer = fit(Checked(make_config(n_epochs=2), batches(2), None))
    assert trainer.global_step == 4
    assert len([r for r in caplog.records if "validation_step is never called" in r.message]) == 1


def test_named_loaders_without_eval_mixin_are_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match="EvalMixin"):
        fit(Checked(make_config(n_epochs=1), batches(2), {"a": batches(1), "b": batches(1)}))


@pytest.mark.pitfall(10)
def test_an_iterator_that_can_be_read_once_is_refused_for_validation() -> None:
    with pytest.raises(DataError, match="read once"):
        fit(Checked(make_config(n_epochs=1), batches(2), iter(batches(2))))


def test_a_validation_step_that_returns_no_dict_is_an_error() -> None:
    class Returns(Checked):
        def validation_step(self, batch: Batch, batch_idx: int) -> Any:
            return torch.ones(())

    with pytest.raises(HookError, match="validation_step returned Tensor"):
        fit(Returns(make_config(n_epochs=1), batches(2), batches(2)))


# -- over ranks


class SpreadChecked(Counted, Spread, dt.EvalMixin):
    pass


class ShardedChecked(Counted, Sharded, dt.EvalMixin):
    pass


def train_loader() -> DistributedDataLoader:
    return DistributedDataLoader(Samples(12), 2)


def validate_everywhere() -> dict[str, Any]:
    """Every layout of this world validates the same 7 samples, then data of which some ranks have none."""
    found: dict[str, Any] = {}
    for name, cls in {"replicate": SpreadChecked, "fsdp": ShardedChecked}.items():
        for size in (1, 3, 8):
            loader = DataLoader(Samples(7), size, drop_last=True)
            with cls(make_config(n_epochs=1), train_loader(), loader) as trainer:
                trainer.fit()
                model = weights(trainer.model)
                found[f"{name}/{size}"] = (trainer.validated, trainer.metrics, model)
        with cls(make_config(n_epochs=1), train_loader(), DataLoader(Samples(1), 4)) as trainer:
            trainer.fit()
            found[f"{name}/one sample"] = (vars(trainer).get("validated", []), trainer.metrics, weights(trainer.model))
        unequal = [(x, y, n) for x, y, n in ragged([2, 3, 1])][: 1 + int(os.environ["RANK"])]
        with cls(make_config(n_epochs=1), train_loader(), PerRankLoader(unequal)) as trainer:
            trainer.fit()
            found[f"{name}/unequal"] = (trainer.validated, trainer.metrics, weights(trainer.model))
        unsized = PerRankLoader(Unsized(unequal))
        with cls(make_config(n_epochs=1), train_loader(), unsized) as trainer:
            trainer.fit()
            found[f"{name}/unsized"] = (trainer.validated, trainer.metrics, weights(trainer.model))
    return found


class Unsized:
    def __init__(self, data: list[Batch]) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data)


@pytest.mark.pitfall(45)
@pytest.mark.pitfall(46)
@pytest.mark.pitfall(13)
@pytest.mark.parametrize("world_size", [2, 3])
def test_each_sample_counts_once_over_ranks_and_a_rank_without_any_does_not_hang(world_size: int) -> None:
    results = run_world(validate_everywhere, world_size)
    for case in results[0]:
        ranks = [rank[case] for rank in results]
        metrics = ranks[0][1][0]
        assert all(rank[1] == ranks[0][1] for rank in ranks), case
        model = network()
        model.load_state_dict(ranks[0][2])
        if case.endswith(("unequal", "unsized")):
            sizes = [2, 3, 1]
            counted = [n for rank in range(world_size) for b in ragged(sizes)[: 1 + rank] for n in b[2].tolist()]
        else:
            length = 1 if case.endswith("sample") else 7
            counted = list(range(length))
            assert sorted(n for rank in ranks for n in rank[0]) == counted, case
        assert metrics["val/number"] == pytest.approx(sum(counted) / len(counted), rel=1e-12), case
        if case.endswith(("unequal", "unsized")):
            data = Samples(6)
            with torch.no_grad():
                losses = (model(data.x) - data.y).square().flatten()
            expected = sum(losses[n].item() for n in counted) / len(counted)
        else:
            expected = whole_loss(model, len(counted))
        assert metrics["val/loss"] == pytest.approx(expected, rel=1e-12), case


def test_a_metric_that_is_nan_stays_nan() -> None:
    class Nan(Checked):
        def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            return {"loss": float("nan") if batch_idx == 0 else 1.0}

    trainer = fit(Nan(make_config(n_epochs=1), batches(2), batches(2)))
    assert math.isnan(trainer.metrics[0]["val/loss"])


def test_a_model_that_is_trained_in_eval_mode_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """As `from_pretrained` returns it; parts that are in it on purpose are left alone, and what nobody trains."""

    class Evaluating(Alone):
        modes = (False, False, True)  # of the model, a part of it, and one that nobody trains

        def setup(self) -> None:
            super().setup()
            self.teacher = torch.nn.Linear(1, 1)
            for module, mode in zip((self.model, self.model[0], self.teacher), self.modes, strict=True):
                module.train(mode)

    with Evaluating(make_config(n_epochs=1), batches(2)) as trainer:
        trainer.fit()
        trainer.set_limits(n_epochs=2)
        trainer.fit()
    (line,) = [line for line in caplog.messages if "eval mode" in line]
    assert line.startswith("self.model is in eval mode and an optimizer trains it")
    assert "Call self.model.train() in configure_models" in line
    caplog.clear()
    Evaluating.modes = (True, False, False)
    trainer = fit(Evaluating(make_config(n_epochs=1), batches(2)))
    assert "eval mode" not in caplog.text


# -- metrics of a validation


torchmetrics = pytest.importorskip("torchmetrics")


class Held:
    """Two metrics, held as a trainer would."""

    def __init__(self) -> None:
        self.attributes: dict[str, Any] = {
            "trained": torchmetrics.SumMetric(),
            "kept": {"validated": torchmetrics.SumMetric()},
            "other": "no metric",
        }
        self.said: list[str] = []
        self.metrics = ValidationMetrics(
            self.named, self.attributes, Ranks.alone(), lambda key, message: self.said.append(message)
        )

    def named(self) -> dict[str, Any]:
        return {"trained": self.attributes["trained"], "kept.validated": self.attributes["kept"]["validated"]}

    def update(self, value: float) -> None:
        self.attributes["kept"]["validated"].update(value)

    def update_and_fail(self, value: float) -> None:
        self.update(value)
        raise TypeError


def test_a_loaders_values_are_of_what_was_updated_since_it_started() -> None:
    held = Held()
    with held.metrics.validation():
        for values in ((1.0, 2.0), (3.0, 4.0)):
            held.metrics.start_loader()
            for value in values:
                held.update(value)
            assert held.metrics.values() == {"kept.validated": sum(values)}


def test_what_training_updates_is_neither_reset_nor_computed_and_kept_in_checkpoints() -> None:
    held = Held()
    held.attributes["trained"].update(5.0)
    with held.metrics.validation():
        held.metrics.start_loader()
        held.update(1.0)
        assert held.metrics.values() == {"kept.validated": 1.0}
    assert held.attributes["trained"].compute() == 5.0
    assert list(held.metrics.only_of_training(held.named())) == ["trained"]


def test_a_metric_of_training_and_validation_both_is_refused() -> None:
    held = Held()
    held.update(5.0)
    with held.metrics.validation():
        held.metrics.start_loader()
        held.update(1.0)
        with pytest.raises(HookError, match="'kept.validated' is updated in training and in validation"):
            held.metrics.values()


def test_a_padding_batch_counts_for_nothing_whatever_happens_in_it() -> None:
    held = Held()
    with held.metrics.validation():
        held.metrics.start_loader()
        held.update(1.0)
        with pytest.raises(TypeError), held.metrics.padding():
            held.update_and_fail(100.0)
        with held.metrics.padding():
            held.update(100.0)
        assert held.metrics.values() == {"kept.validated": 1.0}
