"""Replicas keep plain parameters: what is averaged, in which type and memory order, and what nobody touches."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import dream_trainer as dt
from dream_trainer.trainer.step import buckets
from tests.api import GradientState, PerRankLoader, StepError, start
from tests.trainer.arithmetic import fill
from tests.trainer.small import WIDTH, Batch, Spread, batches, fused_adamw, make_config, network, sgd, weights
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


@torch.no_grad()
def fill_evenly(model: nn.Module) -> None:
    for index, parameter in enumerate(model.parameters()):
        parameter.copy_(torch.linspace(-0.3, 0.4, parameter.numel()).view(parameter.shape) + 0.01 * index)


class Painter(Spread):
    weigh: Any = staticmethod(lambda batch: None)
    make_model: Any = staticmethod(network)

    def configure_models(self) -> None:
        self.model = self.make_model()

    def init_weights(self) -> None:
        fill_evenly(self.model)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        dtype = next(self.model.parameters()).dtype
        loss = mse_loss(self.model(batch[0].to(dtype)).to(dtype), batch[1].to(dtype))
        self.backward(loss, weight=self.weigh(batch))
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.model, self.optimizer)))
        return {"loss": loss}


def train(
    data: list[Batch],
    devices: dt.DeviceParameters = CPU,
    *,
    weigh: Any = None,
    make_model: Any = network,
    make_optimizer: Any = fused_adamw,
) -> dict[str, Any]:
    """Trains on every rank's share of `data`; in one process a window is what all ranks' is."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    n_ranks_of_windows = 2
    config = make_config(
        devices=devices, gradient_clip_norm=0.5, gradient_accumulation_steps=n_ranks_of_windows // ranks, n_epochs=1
    )
    trainer = Painter(config, PerRankLoader(data[rank::ranks]), make_optimizer=make_optimizer)
    trainer.make_model = make_model
    trainer.weigh = weigh or trainer.weigh
    with trainer:
        trainer.fit()
        return {"weights": weights(trainer.model), "norms": trainer.norms}


def small_network() -> nn.Module:
    return network().float()


def tokens_of(batch: Batch) -> float:
    """More than 2 ** 24, so that float32 would round them, and bfloat16 wildly."""
    return float(2**24 + 1 + int(batch[2][0]) % 3)


CASES: dict[str, dict[str, Any]] = {
    "channels last, complex": {"data": images(2 * STEPS, SIZE), "make_model": Scene, "make_optimizer": sgd},
    "float64": {"data": batches(2 * STEPS)},
    "bf16": {"data": batches(2 * STEPS), "devices": replace(CPU, precision="bf16"), "make_model": small_network},
    "weighted": {"data": batches(2 * STEPS), "weigh": tokens_of},
    "weighted float32": {"data": batches(2 * STEPS), "weigh": tokens_of, "make_model": small_network},
}


def by_ddp() -> dict[str, Any]:
    """The loop of PyTorch's documentation, on the data of the case "float64"."""
    torch.distributed.init_process_group("gloo")
    model = network()
    fill_evenly(model)
    wrapped, optimizer, rank = DistributedDataParallel(model), fused_adamw(model), int(os.environ["RANK"])
    norms = []
    for x, y, _ in batches(2 * STEPS)[rank::2]:
        mse_loss(wrapped(x), y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    found = {"weights": weights(model), "norms": norms}
    del wrapped  # freed after the group, it hangs now and then
    torch.distributed.destroy_process_group()
    return found


def train_all() -> dict[str, Any]:
    found = {name: train(**case) for name, case in CASES.items()} | {"ddp": by_ddp()}
    buckets.BUCKET_BYTES = 40  # so that there are as many buckets as parameters
    found["many buckets"] = train(**CASES["weighted float32"])
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {name: train(**case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_world(train_all, 2)


@pytest.mark.parametrize("name", CASES)
def test_two_replicas_are_one_process(name: str, ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """To the bit, as far as the mean of two numbers is: under bf16 too, where both compute by autocast."""
    is_exact = not name.startswith("weighted")  # there the two processes round at other places
    tolerance = {"rtol": 0.0, "atol": 0.0} if is_exact else {"rtol": 1e-6, "atol": 1e-7}
    if name == "weighted":
        tolerance = {"rtol": 1e-12, "atol": 1e-13}
    for rank in ranks:
        assert rank[name]["norms"] == pytest.approx(alone[name]["norms"], rel=1e-12 if "float32" not in name else 1e-5)
        for key, value in alone[name]["weights"].items():
            torch.testing.assert_close(rank[name]["weights"][key], value, **tolerance)
            assert torch.equal(rank[name]["weights"][key], ranks[0][name]["weights"][key])


def test_replicas_train_as_distributed_data_parallel_does(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["float64"]["norms"] == pytest.approx(rank["ddp"]["norms"], rel=1e-14)
        for key, value in rank["ddp"]["weights"].items():
            torch.testing.assert_close(rank["float64"]["weights"][key], value, rtol=1e-14, atol=1e-15)


def test_how_gradients_are_cut_into_buckets_changes_no_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for key, value in rank["weighted float32"]["weights"].items():
            assert torch.equal(rank["many buckets"]["weights"][key], value)


class Weighing(Spread):
    def pre_fit(self) -> None:
        self.totals: dict[torch.dtype, list[float]] = {}
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            cut = buckets.make_buckets(self.model.parameters(), self.world, GradientState(), dtype)
            for weight in (2**24 + 1.1 * self.world.rank, 1e-30, torch.tensor(0.1 + self.world.rank), -0.0):
                total = buckets.Averaging(cut, self.world).run(weight)
                self.totals.setdefault(dtype, []).append(float(total))
        for parameter in self.model.parameters():
            parameter.grad = None


def weigh() -> dict[torch.dtype, list[float]]:
    with Weighing(make_config(max_steps=1, n_epochs=None), PerRankLoader(batches(8))) as trainer:
        trainer.fit()
        return trainer.totals


def test_weights_are_summed_exactly_whatever_type_gradients_cross_ranks_in() -> None:
    expected = [2**24 + (2**24 + 1.1), 2e-30, float(torch.tensor(0.1)) + float(torch.tensor(1.1)), 0.0]
    for rank in run_world(weigh, 2):
        assert rank == dict.fromkeys((torch.float64, torch.float32, torch.bfloat16, torch.float16), expected)


OVERLAPPED = replace(CPU, overlap_reduce=True)
ONE_EACH = 1  # byte, so that each parameter is a bucket


class Sees(Painter):
    """Counts the buckets that are on their way when a backward ends."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        loss = mse_loss(self.model(batch[0]), batch[1])
        self.backward(loss)
        early = [len(averaging._sent) for averaging in self._runtime.accumulation._overlapping]
        self.sent = [*self.sent, early]
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.model, self.optimizer)))
        return {"loss": loss}

    sent: Any = ()


def overlap() -> dict[str, Any]:
    buckets.BUCKET_BYTES = ONE_EACH
    found: dict[str, Any] = {}
    for name, devices in {"in step": CPU, "in backward": OVERLAPPED}.items():
        data = batches(4 * STEPS)[int(os.environ["RANK"]) :: 2]
        config = make_config(devices=devices, gradient_accumulation_steps=2, gradient_clip_norm=0.5, n_epochs=1)
        with Sees(config, PerRankLoader(data), make_optimizer=fused_adamw) as trainer:
            trainer.fit()
            found[name] = {"weights": weights(trainer.model), "norms": trainer.norms, "sent": trainer.sent}
    return found


def test_gradients_that_leave_within_backward_are_the_same_bits() -> None:
    for rank in run_world(overlap, 2):
        early, late = rank["in backward"], rank["in step"]
        assert early["norms"] == late["norms"]
        assert all(torch.equal(early["weights"][key], value) for key, value in late["weights"].items())
        # Of six parameters all but the one that backward comes to last, from the second window on.
        assert early["sent"] == [[], [], *([[0], [5]] * (STEPS - 1))]
        assert late["sent"] == [[]] * 2 * STEPS


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


def thaw() -> list[list[dict[str, Any]]]:
    buckets.BUCKET_BYTES = ONE_EACH
    found: list[list[dict[str, Any]]] = []
    for cls in (Thaws, Toggles):
        found.append([])
        for devices in (CPU, OVERLAPPED):
            data = PerRankLoader(batches(2 * STEPS)[int(os.environ["RANK"]) :: 2])
            with cls(make_config(devices=devices, n_epochs=1), data) as trainer:
                trainer.fit()
                found[-1].append({"weights": weights(trainer.model), "norms": trainer.norms})
    return found


def test_parameters_that_are_trained_later_leave_within_backward_too() -> None:
    for rank in run_world(thaw, 2):
        for late, early in rank:
            assert early["norms"] == late["norms"]
            assert all(torch.equal(early["weights"][key], value) for key, value in late["weights"].items())


class Turns(Spread):
    """Both networks go back before either is stepped, when the critic is frozen; one window is not finite at first."""

    has_failed = False

    def configure_models(self) -> None:
        self.generator, self.critic = nn.Linear(WIDTH, WIDTH).double(), network()

    def init_weights(self) -> None:
        fill(self.generator)
        fill(self.critic)

    def configure_optimizers(self) -> None:
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.generator, self.critic)]

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        made = self.generator(batch[0])
        self.critic.requires_grad_(True)
        self.backward(mse_loss(self.critic(made.detach()), batch[1]), model=self.critic)
        self.critic.requires_grad_(False)
        loss = self.critic(made).mean()
        if int(batch[2][0]) == 8 and not self.has_failed:
            self.has_failed, loss = True, loss * torch.nan
        self.backward(loss, model=self.generator)
        if not self.is_accumulating_gradients:
            for model, optimizer in zip((self.generator, self.critic), self.optimizers, strict=True):
                self.norms.append(float(self.step(model, optimizer)))
        return {}


def train_turns(layouts: tuple[dt.DeviceParameters, ...] = (CPU, OVERLAPPED)) -> list[Any]:
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    buckets.BUCKET_BYTES = ONE_EACH if ranks > 1 else buckets.BUCKET_BYTES
    training: dict[str, Any] = {"gradient_accumulation_steps": 2 // ranks, "gradient_clip_norm": 0.5}
    found = []
    for devices in layouts:
        data = PerRankLoader(batches(2 * STEPS)[rank::ranks])
        with Turns(make_config(devices=devices, n_epochs=1, on_nonfinite="retry", **training), data) as trainer:
            trainer.fit()
            found.append((trainer.norms, weights(trainer.generator), weights(trainer.critic)))
    return found


def test_turns_of_two_networks_are_those_of_one_process() -> None:
    (expected,) = train_turns((CPU,))
    for rank in run_world(train_turns, 2):
        for found in rank:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, equal_nan=True)


class Twice(Painter):
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.backward(mse_loss(self.model(batch[0]), batch[1]))
        self.backward(self.model(batch[0]).square().mean())
        self.step(self.model, self.optimizer)
        return {}


class Meddles(Painter):
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.backward(mse_loss(self.model(batch[0]), batch[1]))
        self.model[1].weight.grad.mul_(2.0)
        self.step(self.model, self.optimizer)
        return {}


def meet_what_was_sent() -> list[str]:
    buckets.BUCKET_BYTES = ONE_EACH
    found = []
    for cls, devices in ((Twice, CPU), (Twice, OVERLAPPED), (Meddles, CPU), (Meddles, OVERLAPPED)):
        trainer = cls(make_config(devices=devices, max_steps=3, n_epochs=None), PerRankLoader(batches(8)))
        try:
            start(trainer._runtime)
            trainer._train()
            found.append("trained")
        except StepError as error:
            found.append(str(error))
    return found


def test_what_others_could_not_see_any_more_is_refused() -> None:
    for twice, twice_overlapped, *meddled in run_world(meet_what_was_sent, 2):
        assert twice == "trained"
        assert "a second backward" in twice_overlapped
        assert "overlap_reduce=False" in twice_overlapped
        assert all("reduce_gradients" in message for message in meddled)


class Pair(Spread):
    """Two models that share a layer, and one of them a parameter with itself."""

    def configure_models(self) -> None:
        self.encoder, self.decoder = network(), network()
        self.decoder[1].weight = self.encoder[1].weight
        self.decoder[0][1] = self.decoder[0][0]

    def init_weights(self) -> None:
        fill(self.encoder)
        fill(self.decoder)

    def configure_optimizers(self) -> None:
        both = dict.fromkeys((*self.encoder.parameters(), *self.decoder.parameters()))
        self.optimizer = torch.optim.AdamW(both, lr=0.02, fused=True)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        loss = mse_loss(self.encoder(batch[0]) + self.decoder(batch[0]), batch[1])
        self.backward(loss, model=self.encoder)
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.encoder, self.optimizer)))
        return {"loss": loss}


def train_pair() -> dict[str, Any]:
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    config = make_config(n_epochs=1, gradient_accumulation_steps=2 // ranks)
    with Pair(config, PerRankLoader(batches(2 * STEPS)[rank::ranks])) as trainer:
        trainer.fit()
        assert trainer.decoder[1].weight is trainer.encoder[1].weight
        return {"weights": weights(trainer.encoder) | weights(trainer.decoder), "norms": trainer.norms}


def test_models_may_share_parameters() -> None:
    expected = train_pair()
    for rank in run_world(train_pair, 2):
        assert rank["norms"] == expected["norms"]
        for key, value in expected["weights"].items():
            assert torch.equal(rank["weights"][key], value)


class Held(Spread):
    held: Any = ()

    def pre_fit(self) -> None:
        modules = list(self.model.modules())
        self.hooks = [m for m in modules if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks]
        self.classes = [type(module) for module in modules]
        self.parameters = {type(parameter) for parameter in self.model.parameters()}

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        loss = mse_loss(self.model(batch[0]), batch[1])
        self.backward(loss)
        held = [parameter.grad for parameter in self.model.parameters()]
        self.step(self.model, self.optimizer)
        self.before, self.held = self.held, [(gradient, gradient.clone()) for gradient in held]
        return {"loss": loss}


def look_at_a_replica() -> dict[str, Any]:
    with Held(make_config(max_steps=3, n_epochs=None), PerRankLoader(batches(8))) as trainer:
        trainer.fit()
        return {
            "classes": trainer.classes == [type(module) for module in network().modules()],
            "parameters": trainer.parameters,
            "hooks": len(trainer.hooks),
            "kept": [torch.equal(gradient, copy) for gradient, copy in trainer.before],
        }


def test_nothing_of_a_replicated_model_is_wrapped_and_gradients_that_a_user_keeps_stay() -> None:
    for rank in run_world(look_at_a_replica, 2):
        assert rank["classes"]
        assert rank["parameters"] == {nn.Parameter}
        assert rank["hooks"] == 0
        assert len(rank["kept"]) == 6
        assert all(rank["kept"])
