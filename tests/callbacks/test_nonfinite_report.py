"""NonFiniteReport: which step, batch, samples and parameters; found without waiting at each step."""

import json
import logging
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.nn.functional import mse_loss
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

import dream_trainer as dt
from tests.api import NonFiniteError, NonFiniteReport
from tests.callbacks.recording import Logged
from tests.trainer.small import Batch, Samples, batches, fit, fused_adamw, make_config, sgd

pytestmark = pytest.mark.usefixtures("late_norms")


class Bad(Logged):
    """In some batches the loss is NaN, by way of the first block; `at` has their numbers since the start."""

    at: tuple[int, ...] = ()
    factor = float("nan")

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        x, y, _ = batch
        if self.local_batches in self.at:
            x = x * self.factor
        loss = mse_loss(self.model(x), y)
        self.backward(loss)
        self.step(self.model, self.optimizer)
        return {"loss": loss, "level": 1.0}


def reports(trainer: Any) -> dict[str, dict[str, Any]]:
    """What was written, by file name."""
    return {path.name: json.loads(path.read_text()) for path in sorted((trainer.run_dir / "nonfinite").glob("*"))}


def make(
    at: tuple[int, ...],
    n_batches: int = 8,
    *,
    cls: type[Bad] = Bad,
    report: NonFiniteReport | None = None,
    optimizer: Any = fused_adamw,
    **training: Any,
) -> Bad:
    config = make_config(callbacks=[report or NonFiniteReport()], n_epochs=1, **training)
    trainer = cls(config, batches(n_batches), make_optimizer=optimizer)
    trainer.at = at
    return trainer


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("optimizer", [fused_adamw, sgd], ids=["guarded on the device", "read on the host"])
def test_a_bad_step_is_reported_with_its_parameters_and_its_batch(
    optimizer: Any, on_nonfinite: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make((5,), optimizer=optimizer, gradient_accumulation_steps=2, on_nonfinite=on_nonfinite)
    with pytest.raises(NonFiniteError) if on_nonfinite == "raise" else trainer:
        trainer.fit()
    ((name, report),) = reports(trainer).items()
    assert name == "step_00000003_rank_0.json"
    assert report["step"] == 3
    assert report["has_bad_values"]
    assert [(batch["batch_idx"], batch["values"]["loss"]) for batch in report["batches"]] == [(5, "nan")]
    parameters = {f"model.{name}" for name, _ in trainer.model.named_parameters()}
    assert set(report["gradients"]) == parameters
    assert report["n_gradients"] == len(parameters)
    said = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 1
    assert "step 3, rank 0: 6 of 6 gradients are not finite" in said[0].message


@pytest.mark.parametrize("training", [{}, {"gradient_clip_norm": 1.0}], ids=str)
def test_only_the_parameters_with_bad_gradients_are_named(training: dict[str, Any]) -> None:
    class Head(Bad):
        """The gradient of a root at zero is infinite, and the loss is finite."""

        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            loss = self.model(batch[0]).square().mean()
            if self.local_batches in self.at:
                loss = loss + (self.model[1].bias * 0).abs().sqrt().sum()
            self.backward(loss)
            self.step(self.model, self.optimizer)
            return {"loss": loss}

    trainer = make((3,), cls=Head, on_nonfinite="skip", **training)
    fit(trainer)
    ((name, report),) = reports(trainer).items()
    assert name == "step_00000004_rank_0.json"
    assert list(report["gradients"]) == ["model.1.bias"]
    assert report["gradients"]["model.1.bias"] in ("nan", "inf")
    assert not report["has_bad_values"]
    assert [batch["batch_idx"] for batch in report["batches"]] == [3]


def test_skipped_steps_are_each_reported_up_to_a_limit_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make((1, 2, 28, 30), 32, report=NonFiniteReport(max_reports=3), on_nonfinite="skip")
    with trainer:
        trainer.fit()
        assert trainer.skipped_steps == 4
    assert list(reports(trainer)) == [f"step_{step:08d}_rank_0.json" for step in (2, 3, 29)]
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


def test_the_samples_of_the_bad_batch_are_named_where_our_loader_reads_them() -> None:
    class Shuffled(Bad):
        seen: list[list[int]]

        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            self.seen.append(batch[2].tolist())
            return super().training_step(batch, batch_idx)

    config = make_config(callbacks=[NonFiniteReport()], n_epochs=2, on_nonfinite="skip", gradient_accumulation_steps=2)
    trainer = Shuffled(config, DataLoader(Samples(12), 2, shuffle=True), make_optimizer=fused_adamw)
    trainer.at, trainer.seen = (9,), []
    fit(trainer)
    (report,) = reports(trainer).values()
    assert (report["step"], report["epoch"]) == (5, 1)
    (batch,) = report["batches"]
    assert batch["batch_idx"] == 3
    assert batch["indices"] == trainer.seen[9]
    assert batch["values"] == {"loss": "nan", "level": "1.0"}


def test_a_step_that_raises_tells_inputs_and_weights() -> None:
    class BadData(Bad):
        def pre_train_batch(self, batch: Batch, batch_idx: int) -> None:
            if self.local_batches == 2:
                batch[0].data[0, 1] = float("inf")
                batch[1][1, 0] = float("nan")

        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            return super().training_step((batch[0].data, *batch[1:]), batch_idx)

    data = [(pack_sequence([x]), y, indices) for x, y, indices in batches(8)]
    trainer = BadData(make_config(callbacks=[NonFiniteReport()], n_epochs=1), data, make_optimizer=sgd)
    with pytest.raises(NonFiniteError):
        trainer.fit()
    assert trainer.global_step == 2
    (report,) = reports(trainer).values()
    assert report["step"] == 3
    assert report["inputs"] == [{"shape": [2, 3], "nan": 0, "inf": 1}, {"shape": [2, 1], "nan": 1, "inf": 0}]
    assert report["weights"] == []


def test_overflows_that_a_lower_loss_scale_mends_are_no_errors() -> None:
    class Large(Bad):
        """Gradients of 1e34, which times the first loss scale of 65536 overflow in float32."""

        def setup(self) -> None:
            self.model = nn.Linear(3, 1)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            loss = self.model.weight.sum() * 1e34
            self.backward(loss)
            self.step(self.model, self.optimizer)
            return {"loss": loss}

    config = make_config(
        callbacks=[NonFiniteReport()], n_epochs=1, devices=dt.DeviceParameters(device="cpu", precision="fp16")
    )
    with Large(config, batches(12)) as trainer:
        trainer.fit()
        assert trainer.skipped_steps > 0
    assert reports(trainer) == {}
