"""What PyTorch's schedules do with stages of ours: every micro-batch once, gradients that add up, reduced when told."""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from tests import api
from tests.worlds import gloo_group, run_world

ROWS, WIDTH = 3, 4
ONE_STAGE = ("1F1B", "GPipe")
OTHERS = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def batch_of(
    schedule: str, layers: list[Any], run: Callable[..., Any], like: list[torch.Tensor], **options: Any
) -> tuple[list[int], Callable[[], None]]:
    """Numbers of this rank's layers, and what trains all by a batch; `like` is what each hands on."""
    last = len(layers) - 1
    ranks = api.ranks_of_stages(schedule, 2, len(layers) // 2)
    numbers = [number for number, rank in enumerate(ranks) if rank == dist.get_rank()]
    stages = [
        api.ScheduledStage(
            layers[number],
            partial(run, number),
            place=(number, len(layers)),
            inputs=like if number else [torch.arange(1)],
            outputs=[torch.empty(())] if number == last else like,
            device=torch.device("cpu"),
            group=dist.group.WORLD,  # type: ignore[arg-type]
            **options,
        )
        for number in numbers
    ]
    return numbers, partial(api.new_schedule(schedule, stages, 4), 0 in numbers, last in numbers)


def assert_close(pairs: Iterable[tuple[Any, Any]]) -> None:
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@gloo_group()
def run_batches(schedule: str) -> dict[str, Any]:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    layers, x = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), torch.randn(4, ROWS, WIDTH, dtype=torch.float64)
    expected = [p.detach().clone() for p in layers.parameters()]
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    fully_shard(layers, mesh=mesh["dp"], reshard_after_forward=False)
    ran: list[int] = []

    def run(_: int, args: tuple[Any, ...], micro_batch: int) -> Any:
        assert rank == 1 or int(args[0]) == micro_batch
        ran.append(micro_batch)
        # Turned, so that neither what is sent on nor what is sent back lies in order.
        output = layers(x[int(args[0])] if rank == 0 else args[0].T).T
        return output.square().sum() if rank == 1 else output

    between = torch.empty(WIDTH, ROWS, dtype=torch.float64, device="meta", requires_grad=True)
    _, batch = batch_of(schedule, [layers, layers], run, [between])
    wrapped: list[Any] = [layers]
    with api.as_one_backward(wrapped, reduces=False):
        batch()
    layers.reshard()  # what is gathered has gradients that nobody has reduced
    before = [p.grad for p in layers.parameters()]
    with api.as_one_backward(wrapped, reduces=True):
        batch()
    found = {
        "ran": ran,
        "before": before,
        "x": x,
        "weights": expected,
        "gradients": [p.grad.full_tensor() for p in layers.parameters()],  # type: ignore[union-attr]
    }
    dist.barrier()
    return found


@pytest.mark.parametrize("schedule", ONE_STAGE)
def test_gradients_of_two_batches_add_up_and_are_reduced_at_the_last(schedule: str) -> None:
    first, last = run_world(run_batches, 2, schedule)
    weights = [w.requires_grad_() for part in (first, last) for w in part["weights"]]
    x = first["x"].flatten(0, 1)
    output = (x @ weights[0].T + weights[1]) @ weights[2].T + weights[3]
    (2 * output.square().sum()).backward()
    assert_close(zip([*first["gradients"], *last["gradients"]], [w.grad for w in weights], strict=True))
    assert first["before"] == last["before"] == [None, None]
    assert sorted(first["ran"]) == sorted(last["ran"]) == [0, 0, 1, 1, 2, 2, 3, 3]


BESIDE = {
    "numbers": torch.tensor([[2**40 + 1, -3]]),
    "bytes": torch.tensor([[255, 7]], dtype=torch.uint8),
    "flags": torch.tensor([[True, False]]),
    "floats": torch.tensor([[0.1, float("nan")]]),
}


@gloo_group()
def hand_on(schedules: list[str], recomputed: bool = False) -> list[dict[str, Any]]:
    """Trains four layers on two ranks, that hand on beside what is learned what no gradient is of."""
    results = [hand_on_by(schedule, recomputed) for schedule in schedules]
    dist.barrier()
    return results


def hand_on_by(schedule: str, recomputed: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    ran: list[int] = []
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2 if schedule in ONE_STAGE else 4)]
    x, arrived = torch.randn(4, ROWS, WIDTH, dtype=torch.float64), []

    def layer_of(number: int, value: torch.Tensor) -> torch.Tensor:
        ran.append(number)
        output: torch.Tensor = layers[number](value).sin()
        return output

    def run(number: int, args: tuple[Any, ...], micro_batch: int) -> Any:
        value = x[int(args[0])] if number == 0 else args[0]
        beside = tuple(BESIDE.values()) if number == 0 else args[1:]
        output = checkpoint(layer_of, number, value, use_reentrant=False) if recomputed else layer_of(number, value)
        if number == len(layers) - 1:
            arrived.append(dict(zip(BESIDE, [tensor.clone() for tensor in beside], strict=True)))
            return output.square().sum()
        return (output.view_as(output), *beside)

    between = torch.empty(ROWS, WIDTH, dtype=torch.float64, device="meta", requires_grad=True)
    like = [between, *(torch.empty_like(tensor, device="meta") for tensor in BESIDE.values())]
    numbers, batch = batch_of(schedule, layers, run, like, may_split=lambda: not recomputed)
    for _ in range(2):
        batch()
    total = x.flatten(0, 1)
    copies = [copy.deepcopy(layer).requires_grad_() for layer in layers]
    for layer in copies:
        layer.zero_grad()
        total = layer(total).sin()
    (2 * total.square().sum()).backward()
    own = [(layers[n], copies[n]) for n in numbers]
    pairs = [pair for two in own for pair in zip(*[[p.grad for p in layer.parameters()] for layer in two], strict=True)]
    return {"pairs": pairs, "arrived": arrived, "ran": [ran.count(number) for number in numbers]}


def test_integers_and_floats_without_gradients_cross_as_they_are_under_every_schedule() -> None:
    for results in zip(*run_world(hand_on, 2, [*ONE_STAGE, *OTHERS]), strict=True):
        assert_close(pair for result in results for pair in result["pairs"])
        arrived = [beside for result in results for beside in result["arrived"]]
        assert len(arrived) == 8
        for beside in arrived:
            for name, sent in BESIDE.items():
                torch.testing.assert_close(beside[name], sent, rtol=0, atol=0, equal_nan=True)


def test_what_is_computed_again_is_so_once_where_schedules_would_split_backwards() -> None:
    for results in zip(*run_world(hand_on, 2, OTHERS, True), strict=True):
        assert_close(pair for result in results for pair in result["pairs"])
        assert [count for result in results for count in result["ran"]] == [2 * 2 * 4] * 4


class HandsOnItsOwn(nn.Module):
    """Beside what it computes of its input, a parameter that no input leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.own = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Parameter(torch.randn(WIDTH).double())

    def forward(self, x: torch.Tensor, handed: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        own = self.own.tanh().expand_as(x)
        return self.layer(x).sin(), own if handed is None else own * handed.sigmoid().mean().detach()


class UsesTwice(nn.Module):
    """A weight in two places, one behind the other, and two parameters whose gradients are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.own = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Parameter(torch.randn(WIDTH).double())
        self.other, self.outer = nn.Parameter(torch.randn(WIDTH).double()), nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: torch.Tensor, handed: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.outer(self.layer(x).sin()) * self.layer.weight.norm(), x * (self.own + self.other)


class AddsUp(UsesTwice):
    """Each but once."""

    def forward(self, x: torch.Tensor, handed: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.outer(self.layer(x).sin()), x * (self.own + self.other)


@gloo_group()
def hand_on_own(kind: type[nn.Module], schedules: list[str]) -> list[tuple[Any, Any]]:
    """Trains four layers on two ranks by each schedule; what each hands on of its own meets the next one's input."""
    results = [pair for schedule in schedules for pair in hand_on_own_by(kind, schedule)]
    dist.barrier()
    return results


def hand_on_own_by(kind: type[nn.Module], schedule: str) -> list[tuple[Any, Any]]:
    torch.manual_seed(0)
    layers, x = [kind() for _ in range(4)], torch.randn(4, ROWS, WIDTH, dtype=torch.float64)

    def run(number: int, args: tuple[Any, ...], _: int = 0, of: list[nn.Module] = layers) -> Any:
        value, *handed = args if number else (x[int(args[0])],)
        output, own = of[number](sum(handed, value), *handed)
        return (output * own).sum() if number == 3 else (output, own)

    between = torch.empty(ROWS, WIDTH, dtype=torch.float64, device="meta", requires_grad=True)
    numbers, batch = batch_of(schedule, layers, run, [between, between])
    batch()
    copies = copy.deepcopy(layers)
    for micro_batch in range(4):
        given: Any = (micro_batch,)
        for number in range(4):
            given = run(number, given, of=copies)
        given.backward()
    found, expected = [[p.grad for n in numbers for p in of[n].parameters()] for of in (layers, copies)]
    return list(zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", [HandsOnItsOwn, UsesTwice, AddsUp])
def test_whatever_is_handed_on_or_shared_has_its_gradient_in_split_backwards(kind: type[nn.Module]) -> None:
    for pairs in run_world(hand_on_own, 2, kind, OTHERS):
        assert_close(pairs)


def test_a_copy_follows_its_module_and_keeps_what_was_left_out_of_it() -> None:
    module = nn.Bilinear(2, 2, 2)
    module.compile(backend="eager")
    copied = api.shallow_copy(module)
    copied.register_parameter("bias", None)
    module.weight, module.factor = nn.Parameter(torch.ones(2, 2, 2)), 3.0  # type: ignore[assignment]
    api.refresh_copy(copied, module)
    assert copied.weight is module.weight
    assert copied.factor == 3.0
    assert copied.bias is None
    assert module.bias is not None
    # What was compiled computes with the module's own parameters.
    assert torch.equal(copied(torch.ones(2), torch.ones(2)), torch.full((2,), 4.0))


def test_what_a_stage_gives_becomes_the_next_ones_arguments() -> None:
    x = torch.zeros(1)
    assert api.as_tuple(x) == api.as_tuple([x]) == api.as_tuple((x,)) == (x,)
