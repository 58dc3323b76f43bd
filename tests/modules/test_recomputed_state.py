"""Whatever a block's forward changes, a second run of it in backward starts where the first one did, and is unseen."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from tests.api import EXPENSIVE_OPERATIONS, StepError, recompute

WIDTH = 4


class Codebook(nn.Module):
    """Averages of what it sees, as a VQ-VAE's; `.data` hides writes from autograd."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.hidden = hidden
        self.register_buffer("codes", torch.zeros(WIDTH))
        self.register_buffer("constant", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        codes = self.codes.data if self.hidden else self.codes
        with torch.no_grad():
            codes.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return x + torch.tanh(h * self.codes.clone() + self.constant)


class Remembers(nn.Module):
    """State in plain attributes: a tensor, a number, a list, a queue of tensors that are written into."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.memory: Tensor | None = None
        self._calls = 0
        self.seen: list[Tensor] = []
        self.queue = [torch.zeros(WIDTH, dtype=torch.float64)]

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        h = self.up(x) * (1 + self._calls % 3)
        if self.memory is not None:
            h = h + self.memory.mean(0)
        self.memory = h.detach()
        self.seen.append(h.mean(0).detach())
        self.queue[0].add_(h.detach().mean(0))
        return torch.tanh(h * self.queue[0].clone()) + self.seen[len(self.seen) // 2]


class OneDistribution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x)) if random.random() < 0.5 else self.up(x).sin()


def quantized() -> nn.Module:
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    fake = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=15, averaging_constant=0.3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), fake, nn.Linear(WIDTH, WIDTH), nn.Tanh())


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "spectral_norm": spectral,
    "codebook": lambda: Codebook(hidden=False),
    "codebook by data": lambda: Codebook(hidden=True),
    "fake quantisation": quantized,
    "attributes": Remembers,
    "batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()),
    "batch norm's mean": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)),
    "instance norm": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.Unflatten(0, (-1, 3)),
        nn.InstanceNorm1d(3, track_running_stats=True),
        nn.Flatten(0, 1),
    ),
    "random relu": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU()),
    "choice": OneDistribution,
}


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def state_of(model: nn.Module) -> list[Any]:
    return [
        value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
        for module in model.modules()
        for values in (module._buffers, {n: v for n, v in vars(module).items() if n in ("memory", "_calls", "seen")})
        for value in values.values()
    ]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


def train(model: nn.Module, twice: bool) -> list[Any]:
    """Losses, gradients, and what forwards change, after each backward; two forwards come before the third, and with
    `twice` two backwards after the fourth."""
    torch.manual_seed(1)
    random.seed(1)
    found: list[Any] = []
    for step in range(5):
        x = torch.randn(6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        if step == 2:
            loss = loss + model(2 * x).square().mean()
        if step == 3 and twice:
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None), *state_of(model)]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad if parameter.grad is not None else 0)
    model.eval()
    return [*found, model(x).detach()]


def changed(kind: str, block: nn.Module) -> None:
    recompute(block, EXPENSIVE_OPERATIONS if kind == "selective" else ())


def assert_as_plain(make: Callable[[], Any], kind: str) -> None:
    torch.manual_seed(0)
    plain = make().double()
    again = copy.deepcopy(plain)
    for block in again.blocks:
        changed(kind, block)
    twice = kind != "selective"  # whose graphs PyTorch lets go backward once
    assert same(train(again, twice), train(plain, twice))


@pytest.mark.pitfall(92)
@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("name", BLOCKS)
def test_what_a_forward_changes_moves_once_and_gradients_are_the_plain_models(name: str, kind: str) -> None:
    assert_as_plain(lambda: Net(BLOCKS[name]), kind)


class Encodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skips: list[Tensor], record: dict[str, Tensor]) -> Tensor:
        x = torch.tanh(self.up(x))
        skips.append(x)
        record["last"] = record["last"] * x
        return x


class Decodes(Encodes):
    def forward(self, x: Tensor, skips: list[Tensor], record: dict[str, Tensor]) -> Tensor:
        x = torch.sin(self.up(x * skips.pop()))
        record["last"] = record["last"] + x
        return x


class Hourglass(nn.Module):
    """Blocks take from and add to a list that they are given, and hand on a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Encodes(), Encodes(), Decodes(), Decodes()])

    def forward(self, x: Tensor) -> Tensor:
        skips, record = [x], {"last": x}
        for block in self.blocks:
            x = block(x, skips, record=record)
        assert len(skips) == 1
        return x + record["last"]


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_lists_and_dicts_that_a_block_is_given_are_as_they_were_when_it_runs_again(kind: str) -> None:
    assert_as_plain(Hourglass, kind)


class FromOutside(nn.Module):
    """Takes what it multiplies with from a place that no argument or attribute leads to."""

    def __init__(self, others: list[Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.take = lambda: others.pop()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x) * self.take())


@pytest.mark.pitfall(92)
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_other_numbers_of_a_second_run_are_an_error_that_names_the_block(kind: str) -> None:
    others = [torch.full((WIDTH,), float(number)) for number in range(9)]
    block = FromOutside(others)
    changed(kind, block)
    block.block_name = "model.blocks.3"
    loss = block(torch.randn(2, WIDTH)).sum()
    with pytest.raises(StepError, match=r"model.blocks.3 \(FromOutside\) gives other numbers .* outside of the block"):
        loss.backward()


def test_an_error_of_a_second_run_names_the_block() -> None:
    block = FromOutside([torch.ones(WIDTH)])
    recompute(block, name="model.blocks.3")
    loss = block(torch.randn(2, WIDTH)).sum()
    with pytest.raises(IndexError, match="pop from empty list") as raised:
        loss.backward()
    assert "model.blocks.3 (FromOutside)" in raised.value.__notes__[0]


class WritesLater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.ones(WIDTH))
        self.starts = False

    def forward(self, x: Tensor) -> Tensor:
        if self.starts:
            self.codes.add_(1)
        return torch.tanh(self.up(x) * self.codes)


def test_a_buffer_that_begins_to_move_later_is_an_error_and_one_that_others_write_to_is_not() -> None:
    block, x = WritesLater(), torch.randn(2, WIDTH)
    recompute(block, name="model.blocks.3")
    block(x).sum().backward()
    block.codes.add_(1)  # as a hook between steps may
    block(x).sum().backward()
    block.starts = True
    with pytest.raises(StepError, match=r"model.blocks.3 \(WritesLater\) wrote into 'codes'.*Resume from the last"):
        block(x)
