"""Code that treats a model as a plain module inside a step: on 2 shards and 2 replicas as in one process by hand."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.func import functional_call, grad
from torch.nn.functional import linear, mse_loss
from torch.utils.data import TensorDataset

import dream_trainer as dt
from tests.api import DistributedDataLoader
from tests.trainer.arithmetic import fill, same_bits
from tests.trainer.small import BY_BLOCKS, Sharded, error_of, make_config, train_by_hand, weights
from tests.worlds import run_world

WIDTH, LENGTH, SIZE = 6, 24, 3
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Bayesian(nn.Module):
    """A layer with a divergence of its own, an inverse, a local loss, and a tensor that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.rho = nn.Parameter(torch.empty(WIDTH, WIDTH)), nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.weight * self.rho.exp()
        return linear(x, self.weight + 0.1 * self.rho).view(-1, WIDTH)

    def divergence(self) -> Tensor:
        return (self.weight.square() + self.rho.exp()).mean()

    def inverse(self, z: Tensor) -> Tensor:
        return z @ self.weight

    def local_loss(self, x: Tensor) -> Tensor:
        return self.forward(x).square().mean()


class Net(nn.Module):
    """Blocks, a recurrent layer, a scripted one, transposed and channels-last weights, and a scale without shape."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Bayesian() for _ in range(3))
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.scripted = torch.jit.script(nn.Linear(WIDTH, WIDTH))
        self.image = nn.Conv2d(1, 2, 2).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.empty(5, WIDTH).t())
        self.scale = nn.Parameter(torch.empty(()))
        self.unused = nn.Parameter(torch.empty(3))
        self.double()
        fill(self)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            y += x
            x = y.tanh()
        x = self.recurrent(x[:, None])[0][:, 0] + self.scripted(x)
        return (x @ self.transposed).sum(1, keepdim=True) * self.scale + self.image(x.view(-1, 1, 2, 3)).mean(
            (1, 2, 3)
        )[:, None]

    def divergence(self) -> Tensor:
        return torch.stack([block.divergence() for block in self.blocks]).sum()

    def inverse(self, z: Tensor) -> Tensor:
        for block in self.blocks:
            z = block.inverse(z)
        return z

    def init_hidden(self, count: int) -> Tensor:
        return next(self.parameters()).new_ones(count, WIDTH)

    def as_object(self, x: Tensor) -> Any:
        return SimpleNamespace(value=self(x))


def fit_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(model(x), y)


def functional(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    blocks = dict(model.blocks.named_parameters())

    def of_blocks(parameters: dict[str, Tensor]) -> Tensor:
        return sum(functional_call(model.blocks[0], part(parameters, "0."), (x,)).square().mean() for _ in range(2))

    def part(parameters: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): p for name, p in parameters.items() if name.startswith(prefix)}

    inner = grad(of_blocks)(blocks)
    return fit_loss(model, x, y) + of_blocks(blocks) + sum(g.square().sum() for g in inner.values())


def kept(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model(x)
    return model.blocks[1].kept.square().mean()


def clamped(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)
    return fit_loss(model, x, y)


def replaced_data(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.99
    return fit_loss(model, x, y)


def loaded(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model.load_state_dict({name: value * 0.99 for name, value in model.state_dict().items()})
    return fit_loss(model, x, y)


def distilled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    for block in model.blocks:
        block.kept = None  # no module with a tensor of a graph can be copied
    teacher = copy.deepcopy(model)
    return fit_loss(model, x, y) + (model(x) - teacher(x).detach() * 0.5).square().mean()


def frozen_block(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model.blocks[0].requires_grad_(False)
    loss = fit_loss(model, x, y)
    model.blocks[0].requires_grad_(True)
    return loss


def gradient_penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    values = model.inverse(x).tanh() + model.blocks[0](x).tanh()
    (inner,) = torch.autograd.grad(values.sum(), x, create_graph=True)
    return fit_loss(model, x, y) + inner.square().mean()


KINDS: dict[str, Loss] = {
    "forward": fit_loss,
    "method only": lambda model, x, y: model.divergence(),
    "method first": lambda model, x, y: model.divergence() + fit_loss(model, x, y),
    "penalty on all": lambda model, x, y: fit_loss(model, x, y) + sum(p.square().sum() for p in model.parameters()),
    "weight of a block": lambda model, x, y: fit_loss(model, x, y) + model.blocks[1].weight.square().sum(),
    "methods of blocks": lambda model, x, y: model.inverse(x).tanh().mean() + model.blocks[0].local_loss(x),
    "hidden state": lambda model, x, y: fit_loss(model, x + model.init_hidden(len(x)), y),
    "functional": functional,
    "kept": kept,
    "object": lambda model, x, y: mse_loss(model.as_object(x).value, y),
    "clamped": clamped,
    "replaced data": replaced_data,
    "loaded": loaded,
    "copied": distilled,
    "frozen in the step": frozen_block,
    "gradient penalty": gradient_penalty,
}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(LENGTH, width, dtype=torch.float64, generator=generator) for width in (WIDTH, 1))
    return TensorDataset(x, y)


def parts(size: int) -> list[Any]:
    return list(zip(*(tensor.split(size) for tensor in data().tensors), strict=True))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.05)


def sum_of_squares(model: nn.Module) -> float:
    return float(sum(p.detach().square().sum() for p in model.parameters()))


class Plain(Sharded):
    """Notes what its weights are after each step, and what they give at the end of an epoch."""

    make_model = Net

    def __init__(self, config: Any, own_loss: Loss) -> None:
        loaders = (DistributedDataLoader(data(), SIZE) for _ in range(2))
        super().__init__(config, *loaders, make_optimizer=optimizer_of)
        self.own_loss = own_loss
        self.after: list[float] = []
        self.ended = 0.0

    def loss_of(self, batch: Any) -> Tensor:
        return self.own_loss(self.model, *batch)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        result = super().training_step(batch, batch_idx)
        if not self.is_accumulating_gradients:
            self.after.append(sum_of_squares(self.model))
        return result

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {}

    def post_epoch(self) -> None:
        self.ended = float(self.model.divergence().detach())


def train(kind: str, shards: int, accumulation: int) -> dict[str, Any]:
    devices = dt.DeviceParameters(device="cpu", dp_shard=shards, dp_replicate=2 // shards)
    config = make_config(devices=devices, n_epochs=1, gradient_accumulation_steps=accumulation)
    with Plain(config, KINDS[kind]) as trainer:
        trainer.fit()
        found = weights(trainer.model)
        output = trainer.model(parts(2)[0][0]).detach()
        return {"weights": found, "norms": trainer.norms, "after": trainer.after, "ended": trainer.ended, "out": output}


def by_hand(kind: str, accumulation: int) -> dict[str, Any]:
    model = Net()
    # Steps that change weights by a factor do so once in a micro-batch, which two ranks share.
    norms, after = loop_by_hand(model, KINDS[kind], accumulation, 1 if kind in ("replaced data", "loaded") else 2)
    end = float(model.divergence().detach())
    output = model(parts(2)[0][0]).detach()
    return {"weights": weights(model), "norms": norms, "after": after, "ended": end, "out": output}


def loop_by_hand(model: nn.Module, loss_of: Loss, accumulation: int, ranks: int) -> tuple[list[float], list[float]]:
    """Trains `model` as `ranks` ranks do, one after the other; norms, and sums of squares of weights, at each step."""
    optimizer, norms, after = optimizer_of(model), [], []
    batches = parts(2 * SIZE // ranks)
    for first in range(0, len(batches), ranks * accumulation):
        window = batches[first : first + ranks * accumulation]
        norms += train_by_hand(model, optimizer, [window], lambda model, batch: loss_of(model, *batch))
        after.append(sum_of_squares(model))
    return norms, after


def train_all(cases: list[tuple[str, int, int]]) -> list[dict[str, Any]]:
    return [train(*case) for case in cases]


@pytest.mark.pitfall(104)
@pytest.mark.parametrize("shards", [2, 1])
def test_code_that_treats_the_model_as_a_plain_module_trains_as_one_process(shards: int) -> None:
    cases = [(kind, shards, 1 + number % 2) for number, kind in enumerate(KINDS)]
    for found, *_, (kind, _, accumulation) in zip(*run_world(train_all, 2, cases), cases, strict=True):
        torch.testing.assert_close(
            found, by_hand(kind, accumulation), rtol=1e-10, atol=1e-10, msg=f"{kind}: {{}}".format
        )


def local_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([block.weight.to_local().square().sum() for block in model]).sum()


class ByBlocks(Plain):
    """Only weights that `fully_shard` takes."""

    make_model = staticmethod(lambda: nn.Sequential(Bayesian(), Bayesian()).double())
    post_epoch = dt.BaseTrainer.post_epoch


def of_shards_alone() -> tuple[str, bool]:
    config = make_config(devices=dt.DeviceParameters(device="cpu", dp_shard=2), fsdp=BY_BLOCKS, n_epochs=1)
    trainer = ByBlocks(config, local_loss)
    said = error_of(trainer)
    expected = ByBlocks.make_model()
    fill(expected)
    return said, same_bits(weights(trainer.model), weights(expected))


@pytest.mark.pitfall(104)
def test_a_loss_of_shards_alone_is_refused_before_weights_move() -> None:
    for message, are_equal in run_world(of_shards_alone, 2):
        assert "model.0.weight" in message
        assert are_equal
