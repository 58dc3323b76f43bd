"""Replicas keep plain parameters: what is averaged, in which type and memory order, and what nobody touches."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from dream_trainer.trainer.step import gradients as step_gradients
from tests.api import GradientState, PerRankLoader
from tests.trainer.arithmetic import fill, same_bits
from tests.trainer.small import (
    WIDTH,
    Batch,
    Spread,
    batches,
    error_of,
    fused_adamw,
    make_config,
    mean_square,
    network,
    sgd,
    weights,
)
from tests.worlds import run_world

CPU = dt.DeviceParameters(device="cpu")
SIZE, STEPS = 4, 6


class Scene(nn.Module):
    """Convolutions whose memory is in channels-last order, beside a scalar and complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 5, 2))
        self.scale = nn.Parameter(torch.ones(()))
        self.waves = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolutions(x).mean((2, 3)).sum(1, keepdim=True) * self.scale + self.waves.sin().real.sum()


def images(count: int, size: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count * size, 3, 5, 5, generator=generator)
    numbers = torch.arange(count * size)
    return list(zip(x.split(size), x.mean((1, 2, 3))[:, None].split(size), numbers.split(size), strict=True))


class Painter(Spread):
    weigh: Any = None
    noted: Any = None

    def init_weights(self) -> None:
        for model in self.named_models().values():
            fill(model)

    def loss_of(self, batch: Batch) -> Tensor:
        dtype = next(self.model.parameters()).dtype
        return mse_loss(self.model(batch[0].to(dtype)).to(dtype), batch[1].to(dtype))

    def weight_of(self, batch: Batch) -> Any:
        return None if self.weigh is None else self.weigh(batch)


def train(
    cls: type[Painter] = Painter,
    data: Sequence[Batch] = batches(2 * STEPS),
    devices: dt.DeviceParameters = CPU,
    *,
    weigh: Any = None,
    make_model: Any = network,
    make_optimizer: Any = fused_adamw,
    in_window: int = 2,
    **training: Any,
) -> dict[str, Any]:
    """Trains on every rank's share of `data`; in one process a window is what all ranks' is."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    steps = {"n_epochs": 1, "gradient_accumulation_steps": in_window // ranks}
    config = make_config(devices=devices, **steps | training)
    trainer = cls(config, PerRankLoader(data[rank::ranks]), make_optimizer=make_optimizer)
    trainer.make_model, trainer.weigh = make_model, weigh
    with trainer:
        trainer.fit()
        models = {name: weights(model) for name, model in trainer.named_models().items()}
        return {"weights": models, "norms": trainer.norms, "noted": trainer.noted}


def small_network() -> nn.Module:
    return network().float()


def tokens_of(batch: Batch) -> float:
    """More than 2 ** 24, so that float32 would round them, and bfloat16 wildly."""
    return float(2**24 + 1 + int(batch[2][0]) % 3)


CASES: dict[str, dict[str, Any]] = {
    "channels last, complex": {"data": images(2 * STEPS, SIZE), "make_model": Scene, "make_optimizer": sgd},
    "float64": {},
    "bf16": {"devices": replace(CPU, precision="bf16"), "make_model": small_network},
    "weighted": {"weigh": tokens_of},
    "weighted float32": {"weigh": tokens_of, "make_model": small_network},
}
CLIP = 0.5


class Weighing(Painter):
    """Notes the totals of weights, by the type that gradients cross ranks in."""

    def pre_fit(self) -> None:
        self.noted = {}
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            cut = step_gradients.make_buckets(self.model.parameters(), self.world, GradientState(), dtype)
            for weight in (2**24 + 1.1 * self.world.rank, 1e-30, torch.tensor(0.1 + self.world.rank), -0.0):
                total = step_gradients.Averaging(cut, self.world).run(weight)
                self.noted.setdefault(dtype, []).append(float(total))
        for parameter in self.model.parameters():
            parameter.grad = None


class Sees(Painter):
    """Notes the numbers of buckets that are on their way when a backward ends."""

    def backward(self, loss: Any, **options: Any) -> None:
        super().backward(loss, **options)
        early = [len(averaging._sent) for averaging in self._runtime.accumulation._overlapping]
        self.noted = [*(self.noted or []), early]


class Thaws(Painter):
    """Trains its first block in two steps only, by an optimizer that has had it from the start."""

    def configure_optimizers(self) -> None:
        self.model[0][0].requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, fused=True)

    def post_train_step(self) -> None:
        self.model[0][0].requires_grad_(self.global_step in (2, 3))


class Toggles(Thaws):
    """Freezes and unfreezes it within the micro-batch, as turns of two networks often do."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.model[0][0].requires_grad_(batch_idx % 4 > 0)
        found = super().training_step(batch, batch_idx)
        self.model[0][0].requires_grad_(False)
        return found

    def post_train_step(self) -> None:
        pass


class Turns(Painter):
    """Both networks go back before either is stepped, when the critic is frozen; one window is not finite at first."""

    has_failed = False

    def configure_models(self) -> None:
        self.generator, self.critic = nn.Linear(WIDTH, WIDTH).double(), network()

    def configure_optimizers(self) -> None:
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.generator, self.critic)]

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        made = self.generator(batch[0])
        self.critic.requires_grad_(True)
        critic = self.critic[1:] if int(batch[2][0]) == 4 else self.critic  # of one rank's batches alone
        self.backward(mse_loss(critic(made.detach()), batch[1]), model=self.critic)
        self.critic.requires_grad_(False)
        loss = self.critic(made).mean()
        if int(batch[2][0]) == 8 and not self.has_failed:
            self.has_failed, loss = True, loss * torch.nan
        self.backward(loss, model=self.generator)
        if not self.is_accumulating_gradients:
            for model, optimizer in zip((self.generator, self.critic), self.optimizers, strict=True):
                self.norms.append(float(self.step(model, optimizer)))
        return {}


class Pair(Painter):
    """Two models that share a layer, and one of them a parameter with itself."""

    def configure_models(self) -> None:
        self.encoder, self.decoder = network(), network()
        self.decoder[1].weight = self.encoder[1].weight
        self.decoder[0][1] = self.decoder[0][0]

    def configure_optimizers(self) -> None:
        both = dict.fromkeys((*self.encoder.parameters(), *self.decoder.parameters()))
        self.optimizer = torch.optim.AdamW(both, lr=0.02, fused=True)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        loss = mse_loss(self.encoder(batch[0]) + self.decoder(batch[0]), batch[1])
        self.backward(loss, model=self.encoder)
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.encoder, self.optimizer)))
        return {"loss": loss}

    def post_fit(self) -> None:
        assert self.decoder[1].weight is self.encoder[1].weight


class Held(Painter):
    """Holds the gradients of a step over the next one, and notes whether they are what they were."""

    held: Any = ()

    def pre_fit(self) -> None:
        assert [type(module) for module in self.model.modules()] == [type(module) for module in network().modules()]
        assert {type(parameter) for parameter in self.model.parameters()} == {nn.Parameter}
        assert not [m for m in self.model.modules() if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks]

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.backward(self.loss_of(batch))
        held = [parameter.grad for parameter in self.model.parameters()]
        self.step(self.model, self.optimizer)
        self.noted, self.held = [torch.equal(*pair) for pair in self.held], [(grad, grad.clone()) for grad in held]
        return {}


TURNS: dict[str, Any] = {"gradient_clip_norm": CLIP, "on_nonfinite": "retry"}
OVERLAPPED = replace(CPU, overlap_reduce=True)
ONE_EACH = 1  # byte, so that each parameter is a bucket


def train_all() -> dict[str, Any]:
    found = {name: train(**case, gradient_clip_norm=CLIP) for name, case in CASES.items()}
    found |= {cls.__name__: train(cls) for cls in (Weighing, Pair, Held)}
    step_gradients.BUCKET_BYTES = 40  # so that there are as many buckets as parameters
    found["many buckets"] = train(**CASES["weighted float32"], gradient_clip_norm=CLIP)
    step_gradients.BUCKET_BYTES = ONE_EACH
    for place, devices in {"in step": CPU, "in backward": OVERLAPPED}.items():
        found[f"Sees {place}"] = train(Sees, batches(4 * STEPS), devices, in_window=4, gradient_clip_norm=CLIP)
        found[f"Turns {place}"] = train(Turns, devices=devices, **TURNS)
        found |= {f"{cls.__name__} {place}": train(cls, devices=devices) for cls in (Thaws, Toggles)}
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_world(train_all, 2)


@pytest.mark.parametrize("name", CASES)
def test_two_replicas_are_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    """To the bit, as far as the mean of two numbers is: under bf16 too, where both compute by autocast."""
    alone = train(**CASES[name], gradient_clip_norm=CLIP)
    is_exact = not name.startswith("weighted")  # there the two processes round at other places
    tolerance = {"rtol": 0.0, "atol": 0.0} if is_exact else {"rtol": 1e-6, "atol": 1e-7}
    if name == "weighted":
        tolerance = {"rtol": 1e-12, "atol": 1e-13}
    for rank in ranks:
        assert rank[name]["norms"] == pytest.approx(alone["norms"], rel=1e-12 if "float32" not in name else 1e-5)
        torch.testing.assert_close(rank[name]["weights"], alone["weights"], **tolerance)
        torch.testing.assert_close(rank[name]["weights"], ranks[0][name]["weights"], rtol=0, atol=0)


def test_weights_are_summed_exactly_whatever_type_gradients_cross_ranks_in(ranks: list[dict[str, Any]]) -> None:
    expected = [2**24 + (2**24 + 1.1), 2e-30, float(torch.tensor(0.1)) + float(torch.tensor(1.1)), 0.0]
    for rank in ranks:
        found = rank["Weighing"]["noted"]
        assert found == dict.fromkeys((torch.float64, torch.float32, torch.bfloat16, torch.float16), expected)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("many buckets", "weighted float32"),
        *((f"{kind} in backward", f"{kind} in step") for kind in ("Sees", "Thaws", "Toggles")),
    ],
)
def test_how_and_when_gradients_leave_changes_no_bit(one: str, other: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank[one]["norms"] == rank[other]["norms"]
        assert same_bits(rank[one]["weights"]["model"], rank[other]["weights"]["model"])


def test_gradients_leave_within_backward_where_that_is_asked_for(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        # Of six parameters all but the one that backward comes to last, from the second window on.
        assert rank["Sees in backward"]["noted"] == [[], [], *([[0], [5]] * (STEPS - 1))]
        assert rank["Sees in step"]["noted"] == [[]] * 2 * STEPS


def test_turns_of_two_networks_are_those_of_one_process(ranks: list[dict[str, Any]]) -> None:
    (expected,) = run_world(partial(train, Turns, **TURNS), 1)
    for found in (rank[f"Turns {place}"] for rank in ranks for place in ("in step", "in backward")):
        torch.testing.assert_close(found["norms"], expected["norms"], rtol=1e-10, atol=1e-12, equal_nan=True)
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=1e-10, atol=1e-12)


def test_models_may_share_parameters(ranks: list[dict[str, Any]]) -> None:
    expected = train(Pair)
    for rank in ranks:
        assert rank["Pair"]["norms"] == expected["norms"]
        torch.testing.assert_close(rank["Pair"]["weights"], expected["weights"], rtol=0, atol=0)


def test_gradients_of_plain_replicas_stay_where_a_user_keeps_them(ranks: list[dict[str, Any]]) -> None:
    assert [rank["Held"]["noted"] for rank in ranks] == [[True] * 6] * 2


class Twice(Painter):
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.backward(mean_square(self.model, batch))
        self.backward(self.model(batch[0]).square().mean())
        self.step(self.model, self.optimizer)
        return {}


class Meddles(Painter):
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.backward(mean_square(self.model, batch))
        self.model[1].weight.grad.mul_(2.0)
        self.step(self.model, self.optimizer)
        return {}


def deep_network() -> nn.Module:
    """With more parameters than are watched where nothing leaves before `step`."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(20)), nn.Linear(WIDTH, 1)).double()


def meet_what_was_sent() -> list[str]:
    step_gradients.BUCKET_BYTES = ONE_EACH
    errors = []
    for cls, make_model in ((Twice, network), (Meddles, network), (Meddles, deep_network)):
        for devices in (CPU, OVERLAPPED):
            trainer = cls(make_config(devices=devices, max_steps=3, n_epochs=None), PerRankLoader(batches(8)))
            trainer.make_model = make_model
            errors.append(error_of(trainer))
    return errors


def test_what_others_could_not_see_any_more_is_refused() -> None:
    for twice, twice_overlapped, *meddled, _, deep in run_world(meet_what_was_sent, 2):
        assert twice == ""
        assert "a second backward" in twice_overlapped
        assert "overlap_reduce=False" in twice_overlapped
        assert all("reduce_gradients" in message for message in meddled)
        assert "overlap_reduce=False" in deep
