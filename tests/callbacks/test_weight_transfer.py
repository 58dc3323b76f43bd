"""WeightTransfer against target networks kept by hand in float64."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from tests.api import CheckpointParameters, ConfigError, WeightTransfer
from tests.trainer.arithmetic import fill
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


class Pair(Alone):
    """Trains `online`; `target` starts from other weights. Some steps have a loss of NaN."""

    poison: Sequence[int] = ()

    def setup(self) -> None:
        self.online, self.target = network(), network().requires_grad_(False)
        fill(self.online)
        with torch.no_grad():
            for parameter in self.target.parameters():
                parameter.fill_(7.0)
        self.optimizer = self.make_optimizer(self.online)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        bad = self.global_step + 1 in self.poison
        self.backward(mse_loss(self.online(batch[0]), batch[1]) * (float("nan") if bad else 1.0))
        self.step(self.online, self.optimizer)
        return {}


def by_hand(
    data: Sequence[Batch],
    *,
    decay: float,
    every: int = 1,
    poison: Sequence[int] = (),
    copies_at_start: bool = True,
    make_optimizer: Any = sgd,
) -> dict[str, Tensor]:
    online = network()
    fill(online)
    optimizer = make_optimizer(online)
    target = weights(online) if copies_at_start else {n: torch.full_like(w, 7.0) for n, w in weights(online).items()}
    for step, (x, y, _) in enumerate(data, start=1):
        if step in poison:
            continue
        mse_loss(online(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0:
            target = {name: decay * target[name] + (1 - decay) * w for name, w in weights(online).items()}
    return target


@pytest.mark.parametrize(
    "options",
    [{"decay": 0.0}, {"decay": 0.0, "every": 3}, {"decay": 0.9}, {"decay": 0.5, "every": 2, "copies_at_start": False}],
    ids=str,
)
def test_the_target_follows_as_by_hand(options: dict[str, Any]) -> None:
    transfer = WeightTransfer(
        "online",
        "target",
        decay=options["decay"],
        every_n_steps=options.get("every", 1),
        copy_at_start=options.get("copies_at_start", True),
    )
    trainer = fit(Pair(make_config(n_epochs=1, callbacks=[transfer]), batches(8)))
    assert_same_weights(weights(trainer.target), by_hand(batches(8), **options))


@pytest.mark.usefixtures("late_norms")
@pytest.mark.parametrize("make_optimizer", [sgd, fused_adamw], ids=["skipped by the host", "skipped on the device"])
@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_a_skipped_step_does_not_move_the_target(decay: float, make_optimizer: Any) -> None:
    config = make_config(n_epochs=1, callbacks=[WeightTransfer("online", "target", decay=decay)], on_nonfinite="skip")
    trainer = Pair(config, batches(8), make_optimizer=make_optimizer)
    trainer.poison = (1, 4, 5)
    fit(trainer)
    truth = by_hand(batches(8), decay=decay, poison=(1, 4, 5), make_optimizer=make_optimizer)
    assert_same_weights(weights(trainer.target), truth)


class Resumed(Pair, dt.CheckpointMixin):
    pass


def test_stopped_and_resumed_is_the_straight_run() -> None:
    for steps in (3, 8):
        config = make_config(
            max_steps=steps, callbacks=[WeightTransfer("online", "target", decay=0.5, every_n_steps=2)]
        )
        config.checkpoint_parameters = CheckpointParameters(save_every_n_epochs=None)
        trainer = fit(Resumed(config, batches(8)))
    assert_same_weights(weights(trainer.target), by_hand(batches(8), decay=0.5, every=2))


class Parts(Pair):
    """An encoder with BatchNorm and tied weights inside of the online model, followed by a teacher."""

    def setup(self) -> None:
        self.online = nn.ModuleDict({"encoder": encoder(), "head": nn.Linear(3, 1).double()})
        self.teacher = encoder().requires_grad_(False)
        self.optimizer = sgd(self.online)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.backward(mse_loss(self.online["head"](self.online["encoder"](batch[0])), batch[1]))
        self.step(self.online, self.optimizer)
        return {}


def encoder() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False)).double()
    made[2].weight = made[0].weight
    return made


@pytest.mark.parametrize("buffers", [True, False])
def test_a_part_of_a_model_is_followed_with_or_without_its_buffers(buffers: bool) -> None:
    transfer = WeightTransfer("online.encoder", "teacher", buffers=buffers)
    trainer = fit(Parts(make_config(n_epochs=1, callbacks=[transfer]), batches(3, 4)))
    followed, teacher = trainer.online["encoder"], trainer.teacher
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
        (("online", "tagret"), "no module 'tagret'; the models are .*'target'"),
        (("target", "online"), "no optimizer trains 'target'"),
        (("online", "wide"), "the same tensors: 2.bias, 2.weight are missing in one"),
        (("online", "other"), "the same tensors: 1.bias, 1.weight are missing in one, or differ"),
    ],
    ids=["no such model", "untrained", "other names", "other shapes"],
)
def test_models_that_do_not_pair_end_the_setup_with_an_error(names: tuple[str, str], message: str) -> None:
    config = make_config(n_epochs=1, callbacks=[WeightTransfer(*names)])
    with Others(config, batches(1)) as trainer, pytest.raises((ConfigError, AttributeError), match=message):
        trainer.fit()
