"""SWA against `torch.optim.swa_utils.AveragedModel` over the loop written by hand."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel

import dream_trainer as dt
from tests.api import EMA, SWA, CheckpointParameters, ConfigError, DistributedDataLoader
from tests.trainer import small
from tests.trainer.arithmetic import fill, full


def by_hand(
    data: Sequence[small.Batch], taken: Sequence[int], *, skipped: Sequence[int] = (), make_optimizer: Any = small.sgd
) -> dict[str, Tensor]:
    """PyTorch's own average of the weights after the steps `taken`, which count from 1; of none, the last weights."""
    model = small.network()
    fill(model)
    optimizer, average = make_optimizer(model), AveragedModel(model)
    for step, (x, y, _) in enumerate(data, start=1):
        if step not in skipped:
            mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step in taken:
            average.update_parameters(model)
    return small.weights(average.module if taken else model)


def averaged(swa: SWA) -> dict[str, Tensor]:
    return {name: full(tensor).clone() for name, tensor in swa.averaged("model").items()}


@pytest.mark.parametrize(
    ("swa", "taken"),
    [
        (SWA(2, every=3, unit="steps"), (2, 5, 8, 11)),
        (SWA(2, unit="epochs"), (8, 12)),
        (SWA(1, every=2), (4, 12)),
        (SWA(13, unit="steps"), ()),
    ],
    ids=["from step 2 every 3", "from epoch 2", "every other epoch", "not yet"],
)
def test_the_average_is_the_mean_of_the_weights_at_its_times(swa: SWA, taken: Sequence[int]) -> None:
    small.fit(small.Alone(small.make_config(n_epochs=3, callbacks=[swa]), small.batches(4)))
    small.assert_same_weights(averaged(swa), by_hand(small.batches(4) * 3, taken))


class Poisoned(small.Alone):
    """The loss is NaN in steps 3, 4 and 6."""

    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        bad = batch_idx + 1 in (3, 4, 6)
        self.backward(mse_loss(self.model(batch[0]), batch[1]) * (float("nan") if bad else 1.0))
        self.step(self.model, self.optimizer)
        return {}


@pytest.mark.usefixtures("late_norms")
@pytest.mark.parametrize(
    "make_optimizer", [small.sgd, small.fused_adamw], ids=["skipped by the host", "skipped on the device"]
)
def test_weights_are_taken_only_where_the_model_has_changed_since(make_optimizer: Any) -> None:
    swa = SWA(2, every=2, unit="steps")
    config = small.make_config(n_epochs=1, callbacks=[swa], on_nonfinite="skip")
    small.fit(Poisoned(config, small.batches(8), make_optimizer=make_optimizer))
    # Steps 3 and 4 were both skipped; of 5 and 6 only the latter.
    truth = by_hand(small.batches(8), (2, 6, 8), skipped=(3, 4, 6), make_optimizer=make_optimizer)
    small.assert_same_weights(averaged(swa), truth)


class Validated(small.Validates, small.Alone, dt.EvalMixin):
    """Keeps the loss of each validation."""

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        self.found = [*vars(self).get("found", []), metrics["val/loss"]]


def test_validations_see_the_weights_and_from_its_start_on_the_average() -> None:
    swa, data = SWA(4, every=2, unit="steps"), small.batches(6)
    trainer = small.fit(
        Validated(small.make_config(n_epochs=1, val_every_n_steps=2, callbacks=[swa]), data, small.batches(2))
    )
    truths = [by_hand(data[:2], ()), by_hand(data[:4], (4,)), by_hand(data, (4, 6))]
    model, validation = small.network(), small.Samples(4)
    for found, truth in zip(trainer.found, truths, strict=True):
        model.load_state_dict(truth)
        with torch.no_grad():
            assert found == pytest.approx(mse_loss(model(validation.x), validation.y).item(), rel=1e-12)
    small.assert_same_weights(small.weights(trainer.model), by_hand(data, ()))


class Saved(small.Validates, small.Sharded, dt.EvalMixin, dt.CheckpointMixin):
    """Two epochs of four steps of four samples, at any number of ranks."""

    def __init__(self, config: small.Config) -> None:
        super().__init__(
            config, DistributedDataLoader(small.Samples(16), 2), DistributedDataLoader(small.Samples(8), 2)
        )


def saved_config(steps: int, *callbacks: dt.Callback) -> small.Config:
    config = small.make_config(max_steps=steps, global_batch_size=4, callbacks=callbacks)
    config.checkpoint_parameters = CheckpointParameters(save_every_n_epochs=None)
    return config


class Normalised(small.Validates, small.Alone):
    """A model with BatchNorm."""

    def setup(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        self.optimizer = small.sgd(self.model)


def test_batch_norm_is_taken_anew_for_the_average_and_given_back() -> None:
    swa, data = SWA(2, unit="steps"), small.batches(6, 4)
    with Normalised(small.make_config(n_epochs=1, callbacks=[swa]), data) as trainer:
        trainer.fit()
        norm = trainer.model[1]
        before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
        with swa.averaged_weights():
            torch.optim.swa_utils.update_bn(data, trainer.model)
            with torch.no_grad():
                hidden = [trainer.model[0](x) for x, *_ in data]
            torch.testing.assert_close(norm.running_mean, torch.stack([h.mean(0) for h in hidden]).mean(0))
            torch.testing.assert_close(norm.running_var, torch.stack([h.var(0) for h in hidden]).mean(0))
            assert trainer.model.training
        assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())


def test_beside_another_average_that_validates_it_is_refused() -> None:
    config = small.make_config(n_epochs=1, callbacks=[SWA(1), EMA()])
    with (
        small.Alone(config, small.batches(1)) as trainer,
        pytest.raises(ConfigError, match="two averages would validate"),
    ):
        trainer.fit()
