"""Validation: exact means over ragged data, when it is due, and training left exactly as it was."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import dream_trainer as dt
from tests.api import DataError, HookError
from tests.trainer import small


class Counted(small.Validates):
    def validation_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        self.validated = [*vars(self).get("validated", []), *batch[2].tolist()]
        return super().validation_step(batch, batch_idx) | {"number": batch[2].double().mean()}

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        self.metrics = [*vars(self).get("metrics", []), metrics]


class Checked(Counted, small.Alone):
    pass


def ragged(sizes: list[int]) -> list[small.Batch]:
    data = small.Samples(sum(sizes))
    return list(zip(data.x.split(sizes), data.y.split(sizes), torch.arange(sum(sizes)).split(sizes), strict=True))


def whole_loss(model: nn.Module, length: int) -> float:
    data = small.Samples(length)
    with torch.no_grad():
        return mse_loss(model(data.x), data.y).item()


@pytest.mark.pitfall(45)
@pytest.mark.parametrize("sizes", [[1, 9, 3], [1]], ids=str)
def test_the_mean_is_over_samples_and_not_over_batches(sizes: list[int]) -> None:
    trainer = small.fit(Checked(small.make_config(n_epochs=1), small.batches(2), ragged(sizes)))
    assert trainer.metrics[0]["val/loss"] == pytest.approx(whole_loss(trainer.model, sum(sizes)), rel=1e-12)
    assert trainer.metrics[0]["val/number"] == pytest.approx((sum(sizes) - 1) / 2, rel=1e-12)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_weight_that_is_returned_is_that_of_all_values_of_the_batch(as_tensor: bool) -> None:
    class Tokens(Checked, dt.LoggerMixin):
        def validation_step(self, batch: small.Batch, batch_idx: int) -> tuple[dict[str, Any], Any]:
            tokens = (batch[2] % 3).sum()  # none in some batches
            self.log("each", batch_idx)
            return {"number": float(batch_idx), "part": {"same": batch_idx}}, tokens if as_tensor else int(tokens)

    sizes = [2, 1, 3, 1, 2]
    metrics = small.fit(Tokens(small.make_config(max_steps=1), small.batches(1), ragged(sizes))).metrics[-1]
    tokens = [int((part % 3).sum()) for part in torch.arange(sum(sizes)).split(sizes)]
    assert 0 in tokens
    expected = sum(count * number for number, count in enumerate(tokens)) / sum(tokens)
    assert metrics["val/number"] == metrics["val/part/same"] == pytest.approx(expected, rel=1e-12)
    by_size = sum(size * number for number, size in enumerate(sizes)) / sum(sizes)
    assert metrics["val/each"] == pytest.approx(by_size, rel=1e-12)


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        ({}, [5, 10, 15, 20]),
        ({"val_every_n_epochs": 3}, [15]),
        ({"val_every_n_epochs": None}, []),
        ({"val_every_n_steps": 4}, [4, 8, 12, 16, 20]),
        ({"val_every_n_steps": 4, "val_every_n_epochs": 1}, [4, 5, 8, 10, 12, 15, 16, 20]),
        ({"val_every_minutes": 1e-9}, list(range(1, 21))),
        ({"val_every_minutes": 60.0}, []),
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
    small.fit(Watch(small.make_config(n_epochs=4, **schedule), small.batches(5), small.batches(1)))
    assert at == steps


@pytest.mark.pitfall(7)
def test_val_steps_per_epoch_limits_the_batches() -> None:
    config = small.make_config(n_epochs=1, val_steps_per_epoch=2)
    assert small.fit(Checked(config, small.batches(2), small.batches(5))).validated == [0, 1, 2, 3]


class Noisy(Checked):
    """Draws from every generator in validation."""

    def setup(self) -> None:
        super().setup()
        self.model.insert(1, nn.Dropout(0.3))
        self.draws: list[tuple[float, ...]] = []

    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        self.draws.append((random.random(), float(np.random.rand()), torch.rand(()).item()))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        random.random(), np.random.rand(), torch.rand(3)
        return super().validation_step(batch, batch_idx)


@pytest.mark.pitfall(9)
def test_training_is_the_same_bits_with_and_without_validation() -> None:
    results = []
    for schedule in ({"val_every_n_epochs": None}, {"val_every_n_steps": 1}):
        config = small.make_config(n_epochs=2, gradient_accumulation_steps=2, **schedule)
        results.append(small.fit(Noisy(config, DataLoader(small.Samples(10), 2, shuffle=True), small.batches(3))))
    without, with_it = results
    assert "validated" not in vars(without)
    assert len(with_it.metrics) == 6
    assert without.draws == with_it.draws
    assert without.seen == with_it.seen
    assert without.losses == with_it.losses
    for name, value in small.weights(without.model).items():
        assert torch.equal(small.weights(with_it.model)[name], value)


@pytest.mark.pitfall(9)
def test_each_modules_own_mode_comes_back_and_inside_all_are_in_eval_mode() -> None:
    class Watch(Checked):
        def setup(self) -> None:
            super().setup()
            self.model[0].eval()

        def validation_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
            assert not any(module.training for module in self.model.modules())
            assert not self.training
            assert not torch.is_grad_enabled()
            return super().validation_step(batch, batch_idx)

    trainer = small.fit(Watch(small.make_config(n_epochs=1), small.batches(2), small.batches(2)))
    assert trainer.training
    assert not any(module.training for module in trainer.model[0].modules())
    assert trainer.model[1].training


class ReturnsATensor(Checked):
    def validation_step(self, batch: small.Batch, batch_idx: int) -> Any:
        return torch.ones(())


@pytest.mark.pitfall(10)
@pytest.mark.parametrize(
    ("cls", "val", "error", "told"),
    [
        (small.Alone, lambda: small.batches(2), HookError, "validation_step is not overridden"),
        (Checked, lambda: iter(small.batches(2)), DataError, "read once"),
        (ReturnsATensor, lambda: small.batches(2), HookError, "validation_step returned Tensor"),
    ],
)
def test_what_cannot_be_validated_is_an_error_that_says_why(cls: Any, val: Any, error: Any, told: str) -> None:
    with pytest.raises(error, match=told):
        small.fit(cls(small.make_config(n_epochs=1), small.batches(2), val()))


def test_several_validation_loaders_need_no_mixin() -> None:
    loaders = {"a": small.batches(1), "b": small.batches(1)}
    trainer = small.fit(Checked(small.make_config(n_epochs=1), small.batches(2), loaders))
    assert {name.rpartition("/")[0] for name in trainer.metrics[0]} == {"val/a", "val/b"}


def test_a_validation_step_without_a_loader_is_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    assert small.fit(Checked(small.make_config(n_epochs=2), small.batches(2), None)).global_step == 4
    assert len([r for r in caplog.records if "validation_step is never called" in r.message]) == 1


def test_a_model_that_is_trained_in_eval_mode_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Evaluating(small.Alone):
        modes = (False, False, True)  # of the model, a part of it, and one that nobody trains

        def setup(self) -> None:
            super().setup()
            self.teacher = torch.nn.Linear(1, 1)
            for module, mode in zip((self.model, self.model[0], self.teacher), self.modes, strict=True):
                module.train(mode)

    with Evaluating(small.make_config(n_epochs=1), small.batches(2)) as trainer:
        trainer.fit()
        trainer.set_limits(n_epochs=2)
        trainer.fit()
    (line,) = [line for line in caplog.messages if "eval mode" in line]
    assert line.startswith("self.model is in eval mode and an optimizer trains it")
    assert "Call self.model.train() in configure_models" in line
    caplog.clear()
    Evaluating.modes = (True, False, False)
    small.fit(Evaluating(small.make_config(n_epochs=1), small.batches(2)))
    assert "eval mode" not in caplog.text
