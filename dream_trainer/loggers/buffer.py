"""Numbers on their way from `log` to the loggers: MetricBuffer, and Records, the lines in the making, of training, of
each validation loader and of listeners, and which of them `log` adds to now.

Adding does nothing on a device. Reducing waits in its second half, so that the copy runs while the device works."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from typing_extensions import override

from dream_trainer.compat.pytorch import is_dtensor, reading_waits, write_count
from dream_trainer.errors import HookError

if TYPE_CHECKING:
    from dream_trainer.distributed.ranks import Ranks
    from dream_trainer.loggers.interface import Media, MediaLog

Reduction = Literal["mean", "sum", "min", "max", "last"]
Scalar = Tensor | float
REDUCTIONS: tuple[str, ...] = get_args(Reduction)


class Stamp(NamedTuple):
    """The place of a set of metrics in a run."""

    step: int  # optimizer steps completed; the one axis of both training and validation
    epoch: int  # epochs completed, which is the 0-based number of the running one
    samples: int  # samples consumed by all ranks
    time: float  # wall-clock time in seconds since 1970


class Total(NamedTuple):
    value: float  # of one key: for "mean" the weighted sum, otherwise the reduced value
    weight: float  # the sum of weights


_NOTHING = Total(0.0, 0.0)
_WIDEST = 8  # bytes of a scalar; a larger storage means that the value is part of a larger tensor

Flight = Callable[[], dict[str, tuple[str, Total]]]  # waits for values on their way; their reductions and totals


class MetricBuffer:
    """Collects named scalars and reduces them over time and ranks.

    - "mean" is `sum(weight * value) / sum(weight)` over everything added on all ranks.
    - "sum", "min" and "max" are over every value whose weight is not zero; the weight does not scale them.
    - "last" is the value added last on the highest rank that added one.
    Only the first of several ranks with the same data (tp, cp) counts, except for "min" and "max", which take all. Any
    value of weight zero counts for nothing. A key without any weight is left out. NaN stays NaN."""

    def __init__(self) -> None:
        self._values: list[tuple[str, Scalar, Scalar]] = []  # with their weights, since the last `begin`
        self._mark = 0
        self._totals: dict[str, Total] = {}  # reduced values that are not taken out yet
        self._reductions: dict[str, str] = {}  # of every added key, in order of arrival
        # Reductions of all keys that ever crossed ranks, in an order that is the same on all of them.
        self._agreed: dict[str, str] = {}

    def add(self, name: str, value: Scalar, weight: Scalar = 1.0, reduce: str = "mean") -> None:
        """Adds one value. Nothing is computed or waited for, but all ranks of a DTensor's mesh must add it."""
        if type(value) is not float:
            value = keep(name, value)
        if type(weight) is not int and type(weight) is not float:
            weight = keep(f"{name}, as its weight,", weight)
        elif weight < 0:
            raise ValueError(f"the weight of metric {name!r} is {weight}. Use a weight of zero or more.")
        if self._reductions.get(name) != reduce:
            self._note_reduction(name, reduce)
        self._values.append((name, value, weight))

    def add_result(self, result: Mapping[str, Any], weight: Scalar, prefix: str = "") -> None:
        """Adds the scalars of a step's result as means, nested dicts as `outer/inner`; passes anything else over."""
        for key, value in result.items():
            name = f"{prefix}{key}"
            if prefix and name.startswith(prefix, len(prefix)):
                name = key
            kind = type(value)
            is_plain = kind is float or (kind is Tensor and value.dim() == 0 and value.is_floating_point())
            if is_plain and kind is Tensor and not reading_waits(value.device):  # as `keep` does, at half the price
                value = value.item()
            if is_plain or is_scalar(value):
                self.add(name, value, weight)
            elif isinstance(value, Mapping):
                self.add_result(value, weight, f"{name}/")

    def mark(self) -> None:
        """Remembers this point for `rewind`."""
        self._mark = len(self._values)

    def rewind(self) -> None:
        """Forgets values added since the last `mark` or `begin`."""
        del self._values[self._mark :]

    def reduce(self, world: Ranks) -> dict[str, float]:
        """`finish(begin())`: waits for the device once."""
        return self.finish(self.begin(), world)

    def begin(self) -> Flight:
        """Takes out everything added so far and starts its way to the host. Waits for nothing."""
        values, totals, reductions = self._values, self._totals, self._reductions
        self._values, self._totals, self._mark = [], {}, 0
        copied = start_copy([item for _, *pair in values for item in pair if isinstance(item, Tensor)])

        def land() -> dict[str, tuple[str, Total]]:
            numbers = iter(copied())
            pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in totals}
            for name, held, held_weight in values:
                value = next(numbers) if isinstance(held, Tensor) else held
                weight = next(numbers) if isinstance(held_weight, Tensor) else held_weight
                value = value * weight if weight and reductions[name] == "mean" else value
                pairs.setdefault(name, []).append((value, weight))
            return {
                name: (reduce, _combined(reduce, totals.get(name, _NOTHING), pairs[name]))
                for name, reduce in reductions.items()
                if name in pairs
            }

        return land

    def finish(self, flight: Flight, world: Ranks) -> dict[str, float]:
        """Values taken by `begin`, equal on all ranks: one collective, and a second one for new keys."""
        totals_by_name = flight()
        if world.world_size > 1:
            totals_by_name = {
                name: (self._agreed[name], _combined(self._agreed[name], _NOTHING, totals))
                for name, totals in _gather(_counted(totals_by_name, world), self._agreed, world).items()
            }
        return {
            name: value / weight if reduce == "mean" else value
            for name, (reduce, (value, weight)) in totals_by_name.items()
            if weight != 0
        }

    def state_dict(self, world: Ranks) -> dict[str, Any]:
        """All ranks' values since the last `begin`. Every rank must call it."""
        land = self.begin()
        landed = land()
        self._totals = {name: total for name, (_, total) in landed.items()}
        local_totals = {name: [reduce, *total] for name, (reduce, total) in _counted(landed, world).items()}
        return {"ranks": world.all_gather_object(local_totals), "copies": world.data_copies * world.stages}

    def load_state_dict(self, state: dict[str, Any], world: Ranks) -> None:
        """Restores the result of `state_dict`. If the ranks share data in another way, rank 0 holds it all."""
        ranks = state["ranks"]
        if len(ranks) == world.world_size and state.get("copies") == world.data_copies * world.stages:
            ranks = [ranks[world.rank]]
        elif not world.is_main:
            ranks = []
        self._values, self._totals, self._reductions, self._mark = [], {}, {}, 0
        for records in ranks:
            for name, (reduce, value, weight) in records.items():
                self._note_reduction(name, reduce)
                self._totals[name] = _combined(reduce, self._totals.get(name, _NOTHING), [(value, weight)])

    def _note_reduction(self, name: str, reduce: str) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"{name!r} is not a name for a metric. Use a string that is not empty.")
        known = self._reductions.get(name) or self._agreed.get(name, reduce)
        if known != reduce:
            raise ValueError(
                f"metric {name!r} was logged with reduce={known!r} and now with reduce={reduce!r}. "
                "Use one of them, or two names."
            )
        if reduce not in REDUCTIONS:
            raise ValueError(f"reduce={reduce!r} of metric {name!r} is not known. Use one of {', '.join(REDUCTIONS)}.")
        self._reductions[name] = reduce


def is_scalar(value: Any) -> bool:
    """Whether `value` is a real number or a real tensor of one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)


def keep(name: str, value: Any) -> Scalar:
    """`value` as it is now, free of its graph: a float, or a 0-dim tensor that will not change."""
    if not isinstance(value, Tensor):
        if not isinstance(value, Real):
            is_metric = any(cls.__module__.startswith("torchmetrics") for cls in type(value).__mro__)
            hint = " One assigned to the trainer is logged after validations by itself; log its compute() elsewhere."
            raise TypeError(
                f"metric {name!r} is of type {type(value).__name__}. Log a number or a tensor of one element."
                f"{hint if is_metric else ''}"
            )
        return float(value)
    tensor = value if type(value) is Tensor else whole(value)
    if tensor.dim() != 0 or tensor.is_complex():
        if not is_scalar(tensor):
            raise TypeError(
                f"metric {name!r} is a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}. "
                "Log a real tensor of one element, such as its mean()."
            )
        tensor = tensor.reshape(())
    if not reading_waits(tensor.device):
        return float(tensor.item())
    if tensor.requires_grad:
        is_parameter, tensor = tensor.is_leaf, tensor.detach()
        if is_parameter:
            return tensor.clone()
    is_part = tensor.untyped_storage().nbytes() > _WIDEST
    return tensor.clone() if is_part or write_count(tensor) else tensor


def whole(value: Tensor) -> Tensor:
    """The global value of a DTensor, whose mesh's ranks all call it; anything else as it is."""
    return value.full_tensor() if is_dtensor(value) else value


def _counted(mine: dict[str, tuple[str, Total]], world: Ranks) -> dict[str, tuple[str, Total]]:
    """This rank's part of all ranks' totals; if another counts the same data, only extremes."""
    if world.counts_data:
        return mine
    return {name: (reduce, total if reduce in ("min", "max") else _NOTHING) for name, (reduce, total) in mine.items()}


def _combined(reduce: str, total: Total, totals: Iterable[tuple[float, float]]) -> Total:
    """`total` and further ones, from left to right too; means as their weighted sums."""
    value, weight = total
    for new_value, new_weight in totals:
        if new_weight == 0:
            continue
        if reduce == "mean":
            value += new_value
        elif weight == 0 or reduce == "last":
            value = new_value
        elif reduce == "sum":
            value += new_value
        elif math.isnan(new_value) or (new_value < value if reduce == "min" else new_value > value):
            value = new_value
        weight += new_weight
    return Total(value, weight)


def _gather(local: dict[str, tuple[str, Total]], agreed: dict[str, str], world: Ranks) -> dict[str, list[Total]]:
    """Every rank's totals by key, in rank order; adds keys that are new to `agreed`."""
    unknown = {name: record for name, record in local.items() if agreed.get(name) != record[0]}
    vector = [float(len(unknown))]
    for name in agreed:
        vector += local[name][1] if name in local else _NOTHING
    rows = world.all_gather(torch.tensor(vector, dtype=torch.float64)).tolist()
    totals_by_name = {
        name: [Total(*row[i : i + 2]) for row in rows] for i, name in zip(range(1, len(vector), 2), agreed, strict=True)
    }
    if not any(row[0] for row in rows):
        return totals_by_name
    for records in world.all_gather_object(unknown):
        for name, (reduce, total) in records.items():
            if agreed.setdefault(name, reduce) != reduce:
                raise ValueError(
                    f"metric {name!r} was logged with reduce={agreed[name]!r} on one rank and {reduce!r} on another. "
                    "Use one of them."
                )
            totals_by_name.setdefault(name, []).append(total)
    return totals_by_name


def start_copy(tensors: Sequence[Tensor]) -> Callable[[], list[float]]:
    """Copies 0-dim tensors to the host, a stack per device and dtype; the result waits and gives them in order."""
    indices_of: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        indices_of.setdefault((tensor.device, tensor.dtype), []).append(index)
    copies = [_start(torch.stack([tensors[index] for index in indices])) for indices in indices_of.values()]

    def values() -> list[float]:
        values_in_order = [0.0] * len(tensors)
        for indices, numbers in zip(indices_of.values(), copies, strict=True):
            for index, number in zip(indices, numbers(), strict=True):
                values_in_order[index] = float(number)
        return values_in_order

    return values


def _start(stack: Tensor) -> Callable[[], list[float]]:
    """Starts to copy a vector, and returns what gives its numbers."""
    if stack.device.type != "cuda":
        return stack.tolist
    host = stack.to("cpu", non_blocking=True)  # pinned
    arrived = torch.cuda.Event()
    arrived.record()

    def numbers() -> list[float]:
        arrived.synchronize()
        return host.tolist()

    return numbers


# A name, the value logged under it, and its stamp if that is known already
Logged = tuple[str, "Media", Stamp | None]


@dataclass(kw_only=True, eq=False, repr=False)
class Record:
    """A line in the making."""

    prefix: str = ""
    media: list[Logged] | None = None
    media_stamp: Callable[[], Stamp | None] = lambda: None
    needs_weight: str = ""
    is_own_line: bool = False
    metrics: MetricBuffer = field(default_factory=MetricBuffer)
    weight: Scalar = 1.0

    def add(self, name: str, value: Scalar, weight: Scalar | None, reduce: str) -> None:
        if weight is None and self.needs_weight and reduce == "mean":
            raise HookError(
                f"log({name!r}) without weight= in a validation under {self.needs_weight}, and ranks have different "
                "numbers of labels in their parts of a sequence. Pass weight=the number of labels."
            )
        self.metrics.add(self._own_name(name), value, self.weight if weight is None else weight, reduce)

    def _own_name(self, name: str) -> str:
        if self.prefix:
            return name.removeprefix("val/")
        if name in Stamp._fields:
            raise ValueError(
                f"metric {name!r} would hide the {name} that each line has. Use another name, such as 'my/{name}'."
            )
        return name


class TrainingRecord(Record):
    def __init__(
        self, of_batch: Callable[[], tuple[Scalar | None, int]], media_stamp: Callable[[], Stamp | None]
    ) -> None:
        self.waiting: list[Logged] = []
        super().__init__(media=self.waiting, media_stamp=media_stamp)
        self._of_batch = of_batch
        self.undecided: list[tuple[str, Scalar, str, int]] = []
        self._n_media = 0  # of before the running window

    @override
    def add(self, name: str, value: Scalar, weight: Scalar | None, reduce: str) -> None:
        size = 0
        if weight is None:
            weight, size = self._of_batch()
        if weight is not None:
            self.metrics.add(self._own_name(name), value, weight, reduce)
            return
        if reduce not in REDUCTIONS:
            raise ValueError(f"reduce={reduce!r} of metric {name!r} is not known. Use one of {', '.join(REDUCTIONS)}.")
        self.undecided.append((self._own_name(name), keep(name, value), reduce, size))

    def decide(self, weight: Scalar | None = None) -> None:
        """Gives the values that wait for it the backward weight, or their batch's samples if there is none."""
        undecided, self.undecided = self.undecided, []  # one that is refused is refused once
        for name, value, reduce, size in undecided:
            self.metrics.add(name, value, size if weight is None else weight, reduce)

    def window_started(self) -> None:
        if self.undecided:
            self.decide()
        self.metrics.mark()
        self._n_media = len(self.waiting)

    def window_dropped(self) -> None:
        self.undecided.clear()
        self.metrics.rewind()
        del self.waiting[self._n_media :]

    def clear(self) -> None:
        self.undecided.clear()
        self.waiting.clear()
        self.metrics = MetricBuffer()


class NoRecord(Record):
    """A record that logs nothing: numbers are ignored, with a warning."""

    def __init__(self, where: str, warn_once: Callable[[str, str], None], media: list[Logged] | None) -> None:
        super().__init__(prefix="val/", media=media)
        self._where, self._warn_once = where, warn_once

    @override
    def add(self, name: str, value: Tensor | float, weight: Scalar | None, reduce: str) -> None:
        self._warn_once("log outside", f"log({name!r}) was called in {self._where}, which logs nothing: ignored.")


class Records:
    def __init__(self) -> None:
        self.current = Record()
        self.validation_media: list[Logged] = []
        self.media: MediaLog | None = None

    @contextmanager
    def inside(self, record: Record) -> Iterator[None]:
        before, self.current = self.current, record
        try:
            yield
        finally:
            self.current = before
