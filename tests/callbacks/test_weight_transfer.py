"""WeightTransfer against target networks kept by hand in float64."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from tests.api import CheckpointParameters, ConfigError, WeightTransfer
from tests.callbacks.averages import Poisoned, by_hand_averaged, in_windows
from tests.trainer.small import (
    Alone,
    Batch,
    assert_same_weights,
    batches,
    fit,
    fused_adamw,
    make_config,
    network,
    sgd,
    weights,
)

WINDOWS = in_windows(batches(8))


class Pair(Poisoned):
    """Beside `model`, which is trained, a `target` that starts from other weights."""

    def setup(self) -> None:
        super().setup()
        self.target = network().requires_grad_(False)
        with torch.no_grad():
            for parameter in self.target.parameters():
                parameter.fill_(7.0)


@pytest.mark.parametrize(
    "options",
    [{"decay": 0.0}, {"decay": 0.0, "every_n_steps": 3}, {"decay": 0.9}, {"every_n_steps": 2, "copy_at_start": False}],
    ids=str,
)
def test_the_target_follows_as_by_hand(options: dict[str, Any]) -> None:
    options = {"decay": 0.5, "every_n_steps": 1, "copy_at_start": True} | options
    trainer = fit(Pair(make_config(n_epochs=1, callbacks=[WeightTransfer("model", "target", **options)]), batches(8)))
    start = None if options["copy_at_start"] else 7.0
    truth = by_hand_averaged(
        WINDOWS, decay=options["decay"], warm_up=False, every=options["every_n_steps"], start=start
    )
    assert_same_weights(weights(trainer.target), truth)


@pytest.mark.usefixtures("late_norms")
@pytest.mark.parametrize("make_optimizer", [sgd, fused_adamw], ids=["skipped by the host", "skipped on the device"])
@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_a_skipped_step_does_not_move_the_target(decay: float, make_optimizer: Any) -> None:
    config = make_config(n_epochs=1, callbacks=[WeightTransfer("model", "target", decay=decay)], on_nonfinite="skip")
    trainer = Pair(config, batches(8), make_optimizer=make_optimizer)
    trainer.poison = (1, 4, 5)
    fit(trainer)
    truth = by_hand_averaged(WINDOWS, decay=decay, warm_up=False, skipped=(1, 4, 5), make_optimizer=make_optimizer)
    assert_same_weights(weights(trainer.target), truth)


class Resumed(Pair, dt.CheckpointMixin):
    pass


def test_stopped_and_resumed_is_the_straight_run() -> None:
    for steps in (3, 8):
        follows, saves = WeightTransfer("model", "target", decay=0.5, every_n_steps=2), CheckpointParameters()
        trainer = fit(Resumed(make_config(max_steps=steps, callbacks=[follows], checkpoint=saves), batches(8)))
    assert_same_weights(weights(trainer.target), by_hand_averaged(WINDOWS, decay=0.5, warm_up=False, every=2))


class Parts(Alone):
    """An encoder with BatchNorm and tied weights inside of the model, followed by a teacher."""

    def setup(self) -> None:
        self.model = nn.ModuleDict({"encoder": encoder(), "head": nn.Linear(3, 1).double()})
        self.teacher = encoder().requires_grad_(False)
        self.optimizer = sgd(self.model)

    def loss_of(self, batch: Batch) -> Tensor:
        return mse_loss(self.model["head"](self.model["encoder"](batch[0])), batch[1])


def encoder() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False)).double()
    made[2].weight = made[0].weight
    return made


@pytest.mark.parametrize("buffers", [True, False])
def test_a_part_of_a_model_is_followed_with_or_without_its_buffers(buffers: bool) -> None:
    transfer = WeightTransfer("model.encoder", "teacher", buffers=buffers)
    trainer = fit(Parts(make_config(n_epochs=1, callbacks=[transfer]), batches(3, 4)))
    followed, teacher = trainer.model["encoder"], trainer.teacher
    assert_same_weights(weights(teacher), weights(followed))
    assert teacher[2].weight is teacher[0].weight
    if buffers:
        torch.testing.assert_close(teacher[1].running_mean, followed[1].running_mean, rtol=0, atol=0)
        assert int(teacher[1].num_batches_tracked) == 3
    else:
        assert not teacher[1].running_mean.any()
        assert int(teacher[1].num_batches_tracked) == 0


class Others(Pair):
    def setup(self) -> None:
        super().setup()
        self.wide, self.other = nn.Sequential(*network(), nn.Linear(1, 1)), network()
        self.other[1] = nn.Linear(3, 2)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("model", "tagret"), "no module 'tagret'; the models are .*'target'"),
        (("target", "model"), "no optimizer trains 'target'"),
        (("model", "wide"), "the same tensors: 2.bias, 2.weight are missing in one"),
        (("model", "other"), "the same tensors: 1.bias, 1.weight are missing in one, or differ"),
    ],
    ids=["no such model", "untrained", "other names", "other shapes"],
)
def test_models_that_do_not_pair_end_the_setup_with_an_error(names: tuple[str, str], message: str) -> None:
    config = make_config(n_epochs=1, callbacks=[WeightTransfer(*names)])
    with Others(config, batches(1)) as trainer, pytest.raises((ConfigError, AttributeError), match=message):
        trainer.fit()
