"""MetricBuffer: exact reductions over time and ranks, cheap to add to, never a hang."""

import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from dream_trainer.loggers import buffer as buffer_module
from tests.api import DeviceParameters, MetricBuffer, World, reading_waits
from tests.operations import Operations
from tests.worlds import run_world

# As on an accelerator, for which the CPU stands in; what crosses ranks, further down, is read at once as on a CPU.
pytestmark = pytest.mark.usefixtures("late_norms")


@pytest.fixture
def world() -> World:
    return World(DeviceParameters(device="cpu"), shard_by_default=False)


def exact_mean(pairs: list[tuple[float, float]]) -> float:
    total = sum((Fraction(weight) for _, weight in pairs), Fraction(0))
    return float(sum((Fraction(value) * Fraction(weight) for value, weight in pairs), Fraction(0)) / total)


@pytest.mark.pitfall(45)
def test_ragged_weighted_means_equal_the_closed_form(world: World) -> None:
    draw = random.Random(1)
    pairs = [(draw.uniform(-3, 3), draw.randint(0, 4000) + draw.random()) for _ in range(2000)]
    buffer = MetricBuffer()
    for value, weight in pairs:
        buffer.add("loss", torch.tensor(value, dtype=torch.float64), weight)
    assert buffer.reduce(world)["loss"] == pytest.approx(exact_mean(pairs), rel=1e-12)


@pytest.mark.parametrize(
    ("reduce", "expected"), [("mean", 2.0), ("sum", 10.0), ("min", -1.0), ("max", 7.0), ("last", 1.0)]
)
def test_each_reduction_does_what_it_says(world: World, reduce: str, expected: float) -> None:
    buffer = MetricBuffer()
    for value in (3.0, torch.tensor([7.0]), -1, torch.tensor(0, dtype=torch.int64), True):
        buffer.add("x", value, 2, reduce)
    assert buffer.reduce(world) == {"x": expected}


@pytest.mark.parametrize("reduce", ["mean", "sum", "min", "max", "last"])
def test_weight_zero_counts_for_nothing_under_any_reduction(world: World, reduce: str) -> None:
    buffer = MetricBuffer()
    buffer.add("x", 2.0, 1, reduce)
    buffer.add("x", math.nan, 0, reduce)
    buffer.add("x", torch.tensor(math.inf), torch.tensor(0.0), reduce)
    buffer.add("nothing", 5.0, 0, reduce)
    assert buffer.reduce(world) == {"x": 2.0}


@pytest.mark.parametrize("reduce", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("position", [0, 1])
def test_nan_stays_nan(world: World, reduce: str, position: int) -> None:
    buffer = MetricBuffer()
    values = [1.0, 2.0]
    values[position] = math.nan
    for value in values:
        buffer.add("x", value, 1, reduce)
    assert math.isnan(buffer.reduce(world)["x"])


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool]
)
def test_values_of_every_dtype_arrive_exactly(world: World, dtype: torch.dtype) -> None:
    value = torch.tensor(1 / 3 if dtype.is_floating_point else 7).to(dtype)
    buffer = MetricBuffer()
    buffer.add("x", value, reduce="last")
    buffer.add("y", torch.tensor(math.pi, dtype=torch.float64), reduce="last")
    assert buffer.reduce(world) == {"x": float(value.double()), "y": math.pi}


def test_what_is_taken_out_stays_as_it_was_while_more_comes_in(world: World) -> None:
    buffer, value = MetricBuffer(), torch.tensor(1.0)
    buffer.add("x", value)
    flight = buffer.begin()
    value.fill_(5.0)
    buffer.add("x", value.clone())
    with pytest.raises(ValueError, match="reduce='mean' and now with reduce='max'"):
        buffer.add("x", 1.0, reduce="max")
    assert buffer.finish(flight, world) == {"x": 1.0}
    assert buffer.reduce(world) == {"x": 5.0}


def test_adding_a_fresh_tensor_runs_nothing_on_the_device_but_its_detach() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss, count = (weight * 2).sum(), torch.tensor(7)
    buffer = MetricBuffer()
    with Operations() as operations:
        buffer.add("loss", loss, count)
        buffer.add_result({"loss2": loss.detach(), "number": 3.0}, 32)
    assert operations.names == ["detach"] * 2


def test_a_flush_copies_everything_at_once(world: World) -> None:
    buffer = MetricBuffer()
    for step in range(50):
        for name in "abcd":
            buffer.add(name, torch.tensor(float(step)), torch.tensor(2.0))
    with Operations() as operations:
        buffer.reduce(world)
    assert operations.names == ["stack"]


def test_a_tensor_on_the_cpu_is_read_at_once_and_exactly(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_module, "reading_waits", reading_waits)
    buffer, value = MetricBuffer(), torch.tensor(0.1, requires_grad=True)
    buffer.add("a", value * 3, weight=torch.tensor(2))
    with torch.no_grad():
        value.fill_(7)
    buffer.add("a", value, weight=2)
    with Operations() as operations:
        found = buffer.reduce(world)
    assert found == {"a": (float(torch.tensor(0.1) * 3) * 2 + 7.0 * 2) / 4}
    assert operations.names == []


def test_a_parameter_is_logged_as_it_was(world: World) -> None:
    parameter = torch.nn.Parameter(torch.tensor(1.0))
    running = torch.zeros(()).add_(5)
    buffer = MetricBuffer()
    buffer.add("parameter", parameter)
    buffer.add("running", running)
    with torch.no_grad():
        parameter.add_(1)
        running.add_(1)
    assert buffer.reduce(world) == {"parameter": 1.0, "running": 5.0}


def test_a_result_is_logged_by_its_scalars_and_nested_names(world: World) -> None:
    buffer = MetricBuffer()
    result = {
        "loss": torch.tensor([2.0]),
        "parts": {"a": 1, "deep": {"b": 3.0}},
        "logits": torch.zeros(2, 2),
        "text": "x",
    }
    buffer.add_result(result | {"none": None, "empty": torch.zeros(0)}, 4, "train/")
    assert buffer.reduce(world) == {"train/loss": 2.0, "train/parts/a": 1.0, "train/parts/deep/b": 3.0}


@pytest.mark.parametrize(
    ("add", "error"),
    [
        (lambda b: b.add("bad", torch.zeros(2)), TypeError),
        (lambda b: b.add("bad", "text"), TypeError),
        (lambda b: b.add("bad", 1.0, torch.zeros(2)), TypeError),
        (lambda b: b.add("bad", 1.0, -1), ValueError),
        (lambda b: b.add("bad", 1.0, 1, "median"), ValueError),
        (lambda b: (b.add("bad", 1.0), b.add("bad", 1.0, 1, "sum")), ValueError),
    ],
)
def test_what_cannot_be_logged_is_an_error_that_names_it(add: Callable[[MetricBuffer], Any], error: type) -> None:
    with pytest.raises(error, match="bad"):
        add(MetricBuffer())


@pytest.mark.parametrize("reduce", ["mean", "sum", "min", "max", "last"])
def test_saved_in_the_middle_and_loaded_gives_the_same_bits(world: World, reduce: str) -> None:
    draw = random.Random(2)
    pairs = [(draw.uniform(-3, 3), draw.uniform(0, 9)) for _ in range(40)]
    straight, first, second = MetricBuffer(), MetricBuffer(), MetricBuffer()
    for value, weight in pairs:
        straight.add("x", value, weight, reduce)
    for value, weight in pairs[:17]:
        first.add("x", value, weight, reduce)
    second.load_state_dict(first.state_dict(world), world)
    for value, weight in pairs[17:]:
        second.add("x", value, weight, reduce)
    assert second.reduce(world) == straight.reduce(world)


def records(rank: int) -> list[tuple[str, float, float, str]]:
    """What a rank logs: ragged counts and weights, some keys on some ranks only."""
    draw = random.Random(rank)
    found = [("loss", draw.uniform(-2, 2), float(draw.randint(0, 500)), "mean") for _ in range(3 + 4 * rank)]
    found += [("count", float(draw.randint(0, 9)), 1.0, "sum"), ("low", draw.random(), 1.0, "min")]
    found += [("high", draw.random(), 1.0, "max"), ("recent", float(rank), 1.0, "last")]
    found += [("padding", math.nan, 0.0, "mean")]
    if rank % 2:
        found += [("odd", float(rank), 2.0, "mean"), ("recent", 10.0 + rank, 1.0, "last")]
    else:
        found += [(f"only/{rank}", 1.0, 1.0, "sum")]
    return found


class Collectives:
    """Counts the collectives of a world."""

    def __init__(self, world: World) -> None:
        self.count = 0
        self._world = world

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._world, name)
        if name in ("all_gather", "all_gather_object", "all_reduce", "barrier", "broadcast_object"):
            self.count += 1
        return found


def on_a_rank() -> dict[str, Any]:
    world = World(DeviceParameters(device="cpu"), shard_by_default=False)
    counting = Collectives(world)
    buffer = MetricBuffer()
    flushes, costs = [], []
    for flush in range(4):
        # In the third flush only the last rank logs, in the fourth nobody does.
        if flush < 2 or (flush == 2 and world.rank == world.world_size - 1):
            for name, value, weight, reduce in records(world.rank):
                buffer.add(name, torch.tensor(value, dtype=torch.float64), weight, reduce)
        before = counting.count
        flushes.append(buffer.reduce(counting))  # type: ignore[arg-type]
        costs.append(counting.count - before)
    conflict = MetricBuffer()
    conflict.add("clash", 1.0, 1, "sum" if world.rank else "mean")
    with pytest.raises(ValueError) as error:
        conflict.reduce(world)
    late = MetricBuffer()
    if world.rank:
        late.add("late", 1.0, 1, "sum")
    flight = late.begin()
    late.add("late", 1.0, 1, "sum" if world.rank else "mean")
    late.finish(flight, world)
    with pytest.raises(ValueError) as late_error:
        late.reduce(world)
    half, rest = MetricBuffer(), MetricBuffer()
    mine = records(world.rank)
    for name, value, weight, reduce in mine[:4]:
        half.add(name, value, weight, reduce)
    state = half.state_dict(world)
    rest.load_state_dict(state, world)
    for name, value, weight, reduce in mine[4:]:
        rest.add(name, value, weight, reduce)
    resumed = rest.reduce(world)
    dtensors = of_dtensors(world)
    copies = on_copies(world) if world.world_size == 2 else {}
    world.close()
    errors = [str(error.value), str(late_error.value)]
    found = {"flushes": flushes, "costs": costs, "errors": errors, "resumed": resumed, "state": state}
    return found | {"copies": copies, "dtensors": dtensors}


def of_dtensors(world: World) -> dict[str, float]:
    mesh, buffer = world.mesh["dp_replicate"], MetricBuffer()
    buffer.add("partial", DTensor.from_local(torch.tensor(1.0 + world.rank), mesh, [Partial()]))
    buffer.add("replicated", DTensor.from_local(torch.tensor(5.0), mesh, [Replicate()]))
    return buffer.reduce(world)


def on_copies(world: World) -> dict[str, Any]:
    """Two ranks that see the same data, as under tensor parallelism: what they log, save, and load at other layouts."""
    parallel = World(DeviceParameters(device="cpu", tensor_parallel=2), shard_by_default=False)

    def fill(buffer: MetricBuffer) -> MetricBuffer:
        for reduce, value in {"mean": 4.0, "sum": 3.0, "max": 5.0 + world.rank, "min": 5.0 - world.rank}.items():
            buffer.add(reduce, value, 8, reduce)
        return buffer

    def moved(state: dict[str, Any], where: World) -> dict[str, float]:
        buffer = MetricBuffer()
        buffer.load_state_dict(state, where)
        return buffer.reduce(where)

    state, ranks_state = fill(MetricBuffer()).state_dict(parallel), fill(MetricBuffer()).state_dict(world)
    found = {
        "logged": fill(MetricBuffer()).reduce(parallel),
        "resumed": moved(state, parallel),
        "with other data": moved(state, world),
        "from other data": moved(ranks_state, parallel),
        "state": state,
    }
    parallel.close()
    return found


def expected(ranks: list[int]) -> dict[str, float]:
    """The closed form, by plain Python over everything."""
    entries: dict[str, list[tuple[int, float, float, str]]] = {}
    for rank in ranks:
        for name, value, weight, reduce in records(rank):
            if weight:
                entries.setdefault(name, []).append((rank, value, weight, reduce))
    found = {}
    for name, items in entries.items():
        values, reduce = [value for _, value, _, _ in items], items[0][3]
        if reduce == "mean":
            found[name] = exact_mean([(value, weight) for _, value, weight, _ in items])
        else:
            found[name] = {"sum": sum, "min": min, "max": max, "last": lambda v: v[-1]}[reduce](values)
    return found


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow), 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_world(on_a_rank, request.param)


@pytest.mark.pitfall(46)
def test_ranks_with_different_keys_agree_on_exact_values_without_a_hang(ranks: list[dict[str, Any]]) -> None:
    everyone = list(range(len(ranks)))
    for rank in ranks:
        first, second, third, fourth = rank["flushes"]
        assert first == second == ranks[0]["flushes"][0]
        assert first == pytest.approx(expected(everyone), rel=1e-12)
        assert third == pytest.approx(expected(everyone[-1:]), rel=1e-12)
        assert fourth == {}


def test_a_flush_of_known_keys_is_one_collective(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["costs"] == [2, 1, 1, 1]


def test_one_key_with_two_reductions_is_an_error_on_every_rank_also_midway(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "'clash'" in rank["errors"][0]
        assert "'late'" in rank["errors"][1]


def test_pending_values_of_all_ranks_survive_a_save(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["resumed"] == ranks[0]["flushes"][0]


def test_pending_values_survive_a_change_of_world_size(ranks: list[dict[str, Any]], world: World) -> None:
    buffer = MetricBuffer()
    buffer.load_state_dict(ranks[0]["state"], world)
    saved = [record for rank in range(len(ranks)) for record in records(rank)[:4]]
    pairs = [(value, weight) for name, value, weight, _ in saved if name == "loss"]
    assert buffer.reduce(world)["loss"] == pytest.approx(exact_mean(pairs), rel=1e-12)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_ranks_that_see_the_same_data_count_once_but_for_extremes(ranks: list[dict[str, Any]], world: World) -> None:
    once = {"mean": 4.0, "sum": 3.0, "max": 6.0, "min": 4.0}
    for rank in ranks:
        copies = rank["copies"]
        assert copies["logged"] == copies["resumed"] == copies["with other data"] == once
        assert copies["from other data"] == once | {"sum": 6.0}
    alone = MetricBuffer()
    alone.load_state_dict(ranks[0]["copies"]["state"], world)
    assert alone.reduce(world) == once


def test_dtensors_are_logged_by_their_global_value(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["dtensors"] == {"partial": sum(range(1, len(ranks) + 1)), "replicated": 5.0}
