"""Throughput against clocks that move as told: rates, pauses, tokens, MFU; and waits for data that really happen."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import dream_trainer as dt
from tests.api import Every, Throughput, dtype_at_work, peak_flops
from tests.callbacks.recording import Clock, Logged, Recorder, names, record
from tests.trainer.small import Batch, Validates, batches, fit, make_config

RATE = "throughput/samples_per_second"


class Timed(Validates, Logged):
    """Its steps take what `seconds` says, one after the other; a validation batch takes 1000."""

    clock: Clock
    seconds: Iterator[float]

    def batch_tokens(self, batch: Batch) -> int:
        return int(batch[2].sum()) * 10

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.clock.now += next(self.seconds)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.clock.now += 1000.0
        return super().validation_step(batch, batch_idx)


def measured(seconds: list[float], *, log_every: int = 2, size: int = 4, **options: Any) -> Recorder:
    """What is logged of steps of `size` samples that take so many seconds each."""
    clock, recorder = Clock(), Recorder()
    callback = Throughput(clock=clock, **options)
    config = make_config(callbacks=[callback, recorder], log_every=log_every, n_epochs=1, val_every_n_steps=2)
    trainer = Timed(config, batches(len(seconds), size), batches(2))
    trainer.clock, trainer.seconds = clock, iter(seconds)
    with patch("dream_trainer.trainer.validation.time", SimpleNamespace(monotonic=clock)):
        fit(trainer)
    return recorder


def test_rates_leave_out_the_first_steps_and_validations() -> None:
    # Warm-up of 2; then intervals of 2 steps and 8 samples.
    found = measured([50.0, 50.0, 1.0, 3.0, 0.5, 0.5, 2.0, 2.0], every_n_steps=2, warm_up_steps=2)
    assert found.values(RATE) == pytest.approx({4: 8 / 4.0, 6: 8 / 1.0, 8: 8 / 4.0}, rel=1e-12)
    assert found.values(f"{RATE}_per_device") == found.values(RATE)


def test_a_clock_that_stands_still_divides_nothing() -> None:
    assert names(measured([0.0] * 6, every_n_steps=2, warm_up_steps=0), "throughput") == []


def test_tokens_are_counted_where_they_differ() -> None:
    # samples 0, 1, 2
    found = measured([1.0, 2.0, 2.0], every_n_steps=1, warm_up_steps=1, log_every=1, size=1, flops_per_token=2.0)
    assert "throughput/mfu" not in names(found, "throughput")  # no peak of a CPU is known
    assert found.values("throughput/tokens_per_second") == pytest.approx({2: 5.0, 3: 10.0}, rel=1e-12)


@pytest.mark.pitfall(49)
def test_mfu_is_flops_over_the_peak() -> None:
    options: dict[str, Any] = {"every_n_steps": 2, "warm_up_steps": 1, "tokens_per_sample": 128, "device_flops": 1e6}
    per_token = measured([9.0, 2.0, 2.0], log_every=3, flops_per_token=300.0, **options)
    assert per_token.values("throughput/mfu") == pytest.approx({3: 2 * 128 * 300 / 1e6}, rel=1e-12)
    counted = measured(
        [9.0, 2.0, 2.0], log_every=3, flops_per_sample=lambda trainer: 6e3 * trainer.world.world_size, **options
    )
    assert counted.values("throughput/mfu") == pytest.approx({3: 2 * 6e3 / 1e6}, rel=1e-12)


@pytest.mark.pitfall(49)
def test_there_is_no_mfu_on_a_cpu() -> None:
    found = measured([1.0] * 6, every_n_steps=1, flops_per_sample=1e3)
    assert RATE in names(found, "throughput")
    assert "throughput/mfu" not in names(found, "throughput")


def test_waiting_for_data_shows_and_is_not_training() -> None:
    class Slow:
        def __iter__(self) -> Iterator[Batch]:
            for batch in batches(5):
                time.sleep(0.05)
                yield batch

    class Works(Logged):
        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            time.sleep(0.05)
            return super().training_step(batch, batch_idx)

    recorder = record(Works, Slow(), Throughput(every_n_steps=1, warm_up_steps=1), log_every=5)
    # 4 steps, and 3 or 4 batches: the loader's end is looked for ahead. Sleeping takes 50 ms or somewhat more.
    assert 0.3 < recorder.values("throughput/data_wait")[5] < 0.7
    assert recorder.values(RATE)[5] < 8 / 0.35


@pytest.mark.parametrize("by", ["the config", "a callback", "the user after a validation"])
def test_time_that_checkpoints_take_is_left_out(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, recorder = Clock(), Recorder()
    for place in ("mixins.checkpointing", "validation"):
        monkeypatch.setattr(f"dream_trainer.trainer.{place}.time", SimpleNamespace(monotonic=clock))

    class SlowToSave(dt.Callback):
        def state_dict(self) -> dict[str, Any]:
            clock.now += 1e6
            return {}

    class Saves(Timed, dt.CheckpointMixin):
        def post_val_epoch(self, metrics: dict[str, float]) -> None:
            if by == "the user after a validation":
                self.save_checkpoint()

    saves = [Every(2, "steps", lambda trainer: trainer.save_checkpoint())] if by == "a callback" else []
    callbacks = [Throughput(clock=clock, every_n_steps=2, warm_up_steps=1), recorder, SlowToSave(), *saves]
    every = 2 if by == "the config" else None
    checkpoint = dt.CheckpointParameters(
        save_every_n_steps=every, save_every_n_epochs=None, save_at_end=False, async_save=False
    )
    config = make_config(callbacks=callbacks, log_every=1, checkpoint=checkpoint, max_steps=5, val_every_n_steps=2)
    trainer = Saves(config, batches(6), batches(1))
    trainer.clock, trainer.seconds = clock, iter([9.0, 1.0, 3.0, 2.0, 2.5])
    fit(trainer)
    assert clock.now > 100.0 + 2 * 1e6  # a save in each interval
    assert recorder.values(RATE) == pytest.approx({3: 4 / 4.0, 5: 4 / 4.5}, rel=1e-9)


@pytest.mark.pitfall(49)
@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, False, 312),
        ("NVIDIA A100-PCIE-40GB", torch.float32, True, 156),
        ("NVIDIA A100-SXM4-40GB", torch.float32, False, 19.5),
        ("NVIDIA A10G", torch.float16, False, None),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, False, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, False, 756),
        ("NVIDIA H200", torch.float64, False, None),
        ("NVIDIA L40S", torch.bfloat16, False, 362.05),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, False, 165.2),
        ("NVIDIA GeForce RTX 4090 D", torch.bfloat16, False, None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", torch.bfloat16, False, None),
        ("GRID A100-10C", torch.bfloat16, False, None),
        ("Tesla V100-SXM2-16GB", torch.float16, False, 125),
        ("NVIDIA RTX 7090", torch.bfloat16, False, None),
    ],
)
def test_peaks_are_those_of_the_device_and_its_precision(
    name: str, dtype: torch.dtype, tf32: bool, teraflops: float | None
) -> None:
    found = peak_flops(name, dtype, tf32=tf32)
    assert found == (None if teraflops is None else pytest.approx(teraflops * 1e12))


def test_the_precision_at_work_is_the_configured_one_or_the_parameters() -> None:
    with Logged(make_config(n_epochs=1), batches(1)) as trainer:
        trainer.fit()
        assert dtype_at_work(trainer) is torch.float64
    devices = dt.DeviceParameters(device="cpu", precision="bf16")
    assert dtype_at_work(Logged(make_config(n_epochs=1, devices=devices), batches(1))) is torch.bfloat16
