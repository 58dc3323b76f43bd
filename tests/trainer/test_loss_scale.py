"""fp16's loss scale against `torch.amp.GradScaler` in a loop written by hand, and what an overflow does."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from tests.api import GROWTH_INTERVAL, INITIAL_SCALE, LossScale, NonFiniteError
from tests.late_norms import norms_are_read_late
from tests.trainer.arithmetic import same_bits
from tests.trainer.small import fit, fit_each, make_config, train_on, weights
from tests.worlds import run_world

pytestmark = pytest.mark.usefixtures("late_norms")
FP16 = dt.DeviceParameters(device="cpu", precision="fp16")
N_STEPS, SIZE, WIDTH = 6, 4, 8


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(N_STEPS * SIZE, WIDTH, generator=generator), torch.randn(N_STEPS * SIZE, 1, generator=generator)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))


def fill(model: nn.Module) -> None:
    for index, parameter in enumerate(model.parameters()):
        parameter.data.copy_(torch.linspace(-0.5, 0.5 + 0.1 * index, parameter.numel()).view_as(parameter))


class Trainer(dt.BaseTrainer, dt.SetupMixin, dt.FSDPMixin, dt.CheckpointMixin):
    """Its loss is multiplied by a number for each step, so that gradients overflow where a test says."""

    def __init__(self, config: Any, factors: list[float], *, fused: bool = True, weighted: int = 0) -> None:
        super().__init__(config)
        self.factors, self.fused, self.weighted = factors, fused, weighted
        self.scales: list[float] = []
        self.norms: list[float] = []

    def configure_models(self) -> None:
        self.model = network()

    def init_weights(self) -> None:
        fill(self.model)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=self.fused)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        data = torch.utils.data.TensorDataset(*samples())
        return torch.utils.data.DataLoader(data, batch_size=SIZE // self.world.dp_size), None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        x, y = batch
        factor = self.factors[self.global_step] if self.world.rank == self.world.world_size - 1 else 1.0
        loss = mse_loss(self.model(x), y) * factor
        self.backward(loss, weight=self.weighted or None)
        self.scales.append(float(self._runtime.accumulation.loss_scale.scale))
        self.norms.append(float(self.step(self.model, self.optimizer)))
        return {}


def by_hand(factors: list[float], *, fused: bool = True) -> tuple[dict[str, Tensor], list[float], int]:
    """Weights, scales and the number of overflows of PyTorch's own scaler."""
    model = network()
    fill(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=INITIAL_SCALE)
    scales, overflows = [], 0
    for x, y, factor in zip(*(part.split(SIZE) for part in samples()), factors, strict=True):
        with torch.autocast("cpu", torch.float16):
            loss = mse_loss(model(x), y) * factor
        scaler.scale(loss).backward()
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        overflows += scaler.get_scale() < scales[-1]
        optimizer.zero_grad()
    return weights(model), scales, overflows


CALM = [1.0] * N_STEPS
WILD = [1.0, 1e3, 1.0, 1e3, 1e3, 1.0]  # times the scale it is more than fp16 holds


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("factors", [CALM, WILD])
def test_weights_and_scales_are_bit_for_bit_those_of_grad_scaler(factors: list[float], fused: bool) -> None:
    expected, scales, overflows = by_hand(factors, fused=fused)
    assert (overflows > 1) == (factors is WILD)
    with Trainer(make_config(devices=FP16, n_epochs=1, train_batch_size=SIZE), factors, fused=fused) as trainer:
        trainer.fit()
        assert trainer.scales == scales
        assert same_bits(weights(trainer.model), expected)
        assert trainer.skipped_steps == overflows == sum(not math.isfinite(norm) for norm in trainer.norms)
        assert trainer.global_step == N_STEPS


def test_weights_of_thousands_of_tokens_start_without_an_overflow_and_count_as_in_float32() -> None:
    config = make_config(devices=FP16, n_epochs=1, train_batch_size=SIZE)
    with Trainer(config, CALM, weighted=1000) as trainer:
        trainer.fit()
        assert trainer.skipped_steps <= 1
        expected = in_float32(CALM, skip=trainer.skipped_steps)
        for name, weight in weights(trainer.model).items():
            assert torch.allclose(weight, expected[name], atol=1e-3)


def test_the_scale_doubles_after_many_windows_and_halves_once_for_several_bad_norms_of_one() -> None:
    scale, good, bad = LossScale(torch.device("cpu")), torch.tensor(1.0), torch.tensor(math.inf)
    for _ in range(GROWTH_INTERVAL - 1):
        scale.note(good)
        scale.update()
    assert scale.scale == INITIAL_SCALE
    scale.update()
    assert scale.scale == 2 * INITIAL_SCALE
    for norm in (bad, good, bad):
        scale.note(norm)
    scale.update()
    assert scale.scale == INITIAL_SCALE
    again = LossScale(torch.device("cpu"))
    again.load_state_dict(scale.state_dict())
    assert again.state_dict() == scale.state_dict() == {"scale": INITIAL_SCALE, "windows": 0}


@pytest.mark.parametrize("policy", ["raise", "retry"])
def test_gradients_that_no_scale_mends_are_an_error(policy: str) -> None:
    config = make_config(devices=FP16, max_steps=60, train_batch_size=SIZE, on_nonfinite=policy, max_nonfinite=3)
    trainer = Trainer(config, [math.nan] * 60)
    with pytest.raises(NonFiniteError):
        trainer.fit()
    trainer.close()
    assert trainer.scales[-1] < 1


def test_no_step_trains_on_after_gradients_that_no_scale_mends_though_nobody_has_looked_yet() -> None:
    config = make_config(devices=FP16, max_steps=45, train_batch_size=SIZE)
    trainer = Trainer(config, [math.nan] * 30 + [1.0] * 15)
    with pytest.raises(NonFiniteError):
        trainer.fit()
    assert len(trainer.scales) == 45  # the norms are read at the end
    before = network()
    fill(before)
    assert same_bits(weights(trainer.model), weights(before))
    trainer.close()


def test_retry_runs_an_overflowed_window_again_at_half_the_scale() -> None:
    config = make_config(devices=FP16, n_epochs=1, train_batch_size=SIZE, on_nonfinite="retry")
    with Trainer(config, WILD) as trainer:
        trainer.fit()
        assert trainer.skipped_steps == 0
        assert trainer.global_step == N_STEPS
        assert all(later in (scale, scale / 2) for scale, later in itertools.pairwise(trainer.scales))
        # By hand without a scaler: float32 bears the factors.
        for name, weight in weights(trainer.model).items():
            assert torch.allclose(weight, in_float32(WILD)[name], atol=2e-3)


def in_float32(factors: list[float], *, skip: int = 0) -> dict[str, Tensor]:
    """Weights of a loop without a scaler, which leaves out the first `skip` steps."""
    model = network()
    fill(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = list(zip(*(part.split(SIZE) for part in samples()), factors, strict=True))
    train_on(optimizer, (mse_loss(model(x), y) * factor for x, y, factor in steps[skip:]))
    return weights(model)


def test_the_scale_is_resumed() -> None:
    config = make_config(devices=FP16, n_epochs=1, train_batch_size=SIZE)
    whole = fit(Trainer(replace(config, experiment="whole"), WILD))
    for max_steps in (3, None):
        training = replace(config.training_parameters, max_steps=max_steps)
        saving = dt.CheckpointParameters(save_every_n_epochs=None)
        resumed = fit(Trainer(replace(config, training_parameters=training, checkpoint_parameters=saving), WILD))
    assert resumed.scales == whole.scales[3:]
    assert resumed.skipped_steps == whole.skipped_steps
    assert same_bits(weights(resumed.model), weights(whole.model))


@norms_are_read_late()
def overflow_on_one_rank() -> list[tuple[list[float], int, dict[str, Tensor]]]:
    def made(devices: dt.DeviceParameters, fused: bool) -> Trainer:
        parameters = replace(devices, device="cpu", precision="fp16")
        return Trainer(make_config(devices=parameters, n_epochs=1, train_batch_size=SIZE // 2), WILD, fused=fused)

    kinds = itertools.product((dt.DeviceParameters.fsdp(), dt.DeviceParameters.ddp()), (True, False))
    return fit_each(itertools.starmap(made, kinds), lambda t: (t.scales, t.skipped_steps, weights(t.model)))


@pytest.mark.pitfall(25)
@pytest.mark.pitfall(14)
def test_an_overflow_on_one_rank_is_left_out_by_all_alike() -> None:
    _, scales, overflows = by_hand(WILD)
    first, second = run_world(overflow_on_one_rank, 2)
    for one, other in zip(first, second, strict=True):
        assert one[0] == other[0] == scales
        assert one[1] == other[1] == overflows
        assert same_bits(one[2], other[2])
