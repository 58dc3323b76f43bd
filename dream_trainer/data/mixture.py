"""Several sources of samples in one dataset, by weights that may change. A position's source and sample are arithmetic,
so a mixture begins anywhere at once.

Weights come from stages, ramps and changes made during the run. In a block of a segment each source has a part of a
line by its weight. The block's van der Corput offset moves the whole numbers on the line, so shares are exact to
log2(n) samples."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence, Sized
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from dream_trainer.checks import check_choice, check_integer, refuse
from dream_trainer.data.sampler import ENDLESS, OrderedDataset
from dream_trainer.data.sources.shard_files import lengths_of, mean_lengths
from dream_trainer.distributed.seeds import hash_seed
from dream_trainer.errors import ConfigError, DataError
from dream_trainer.screen import logger

Weights = Mapping[str, float]
_STEPS_OF_RAMP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Other weights from some place on.

    Attributes:
        at: Where they begin: samples, or tokens, of the mixture before it, as its `unit` says. Tokens are counted by
            the sources' mean lengths.
        weights: Of each source; one that is not named has none.
        ramp: Over how many samples or tokens, from `at` on, the weights become these, in up to 64 equal steps.
    """

    at: int
    weights: Weights
    ramp: int = 0

    def __post_init__(self) -> None:
        refuse(self.at < 0 or self.ramp < 0, f"a stage has at={self.at} and ramp={self.ramp}, which are not negative.")


def checked_weights(weights: Weights, names: Sequence[str]) -> dict[str, float]:
    unknown = [name for name in weights if name not in names]
    refuse(unknown, f"weights are given for {unknown}, and the sources are {list(names)}.")
    for name, weight in weights.items():
        is_wrong = not math.isfinite(weight) or weight < 0
        refuse(is_wrong, f"the weight of source {name!r} is {weight}. Give a finite number of at least 0.")
    refuse(not any(weights.values()), f"all weights are zero: {dict(weights)}. Give some source a weight above 0.")
    return {name: weights.get(name, 0) for name in names}


def check_stages(stages: Sequence[Stage], names: Sequence[str]) -> None:
    for stage in stages:
        checked_weights(stage.weights, names)
    for stage, following in pairwise(stages):
        if following.at < stage.at + max(stage.ramp, 1):
            raise ConfigError(
                f"the stage at {stage.at} has a ramp of {stage.ramp}, and the next one begins at {following.at}. Give "
                "stages in rising order, each with a ramp that ends before the next one begins."
            )


def weights_by_position(
    weights: dict[str, float],
    stages: Sequence[Stage],
    changes: Sequence[tuple[int, dict[str, float]]],
    means: Sequence[float] | None,
    first: int,
) -> list[tuple[int, tuple[Fraction, ...]]]:
    """From which position on each source has which weight in samples."""
    by_sample = [Fraction(1)] * len(weights) if means is None else [1 / Fraction(mean) for mean in means]
    # Stage, place as the unit counts it, and weights.
    plan = [(0, Fraction(0), [Fraction(weight) for weight in weights.values()])]
    for number, stage in enumerate(stages, 1):
        former, target = plan[-1][2], [Fraction(stage.weights.get(name, 0)) for name in weights]
        # A ramp between weights of other sums would not be linear.
        shares = [(one / sum(former), other / sum(target)) for one, other in zip(former, target, strict=True)]
        steps = min(_STEPS_OF_RAMP, stage.ramp)
        for step in range(steps):
            part = Fraction(2 * step + 1, 2 * steps)  # in the middle of the step
            mixed = [before + (after - before) * part for before, after in shares]
            plan.append((number, stage.at + Fraction(stage.ramp * step, steps), mixed))
        plan.append((number, Fraction(stage.at + stage.ramp), target))
    found: dict[int, list[Fraction]] = {}
    begins: dict[int, int] = {}  # maps each position to the start of the stage that its weights belong to
    starts: dict[int, int] = {}  # of stages
    position, last, per_sample = Fraction(0), Fraction(0), Fraction(1)
    for number, place, mixed in plan:
        position += (place - last) / per_sample
        at, last = math.ceil(position), place
        found[at], begins[at] = mixed, starts.setdefault(number, at)
        if means is not None:
            # Samples are drawn by weight / mean, and each has its mean: the tokens of all are the weights' sum.
            samples = sum((weight * by for weight, by in zip(mixed, by_sample, strict=True)), Fraction(0))
            per_sample = sum(mixed, Fraction(0)) / samples
    for at, changed in changes:
        # The rest of a running ramp is dropped: the change holds until the next stage.
        found = {place: value for place, value in found.items() if place <= at or begins[place] > at}
        found[at], begins[at] = [Fraction(weight) for weight in changed.values()], at
    begun = max(at for at in found if at <= first)
    kept = {first: found[begun]} | {at: value for at, value in found.items() if at > first}
    return [
        (at, tuple(weight * factor for weight, factor in zip(kept[at], by_sample, strict=True))) for at in sorted(kept)
    ]


Integers = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS = 8
_HALF = np.uint64(32)


def scrambled(words: _Words) -> _Words:
    """64-bit words, each to one that is unrelated to it (splitmix64's finaliser)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class IndexPermutation:
    """Permutations of `range(length)`, one for each epoch, by arithmetic: no memory, and the same time for any index. A
    Feistel network permutes the fields of a slightly larger rectangle. Results outside `length` pass the network again
    until they fall inside. Lengths go up to 2**62."""

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self.seed = seed
        width = math.isqrt(length - 1) + 1
        self._width, self._height = np.uint64(width), np.uint64(-(-length // width))

    def __call__(self, places: Integers, epochs: Integers) -> Integers:
        base = np.uint64(self.seed & 0xFFFF_FFFF_FFFF_FFFF)
        with np.errstate(over="ignore"):
            keys = scrambled(base + scrambled(epochs.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)))
            found = self._network(places.astype(np.uint64), keys)
            outside = np.flatnonzero(found >= np.uint64(self.length))
            while len(outside):
                again = self._network(found[outside], keys[outside])
                found[outside] = again
                outside = outside[again >= np.uint64(self.length)]
        return found.astype(np.int64)

    def _network(self, words: _Words, keys: _Words) -> _Words:
        rows, columns = np.divmod(words, self._width)
        for number in range(0, _ROUNDS, 2):
            columns = (columns + (scrambled(rows + keys + np.uint64(number)) >> _HALF)) % self._width
            rows = (rows + (scrambled(columns + keys + np.uint64(number + 1)) >> _HALF)) % self._height
        return rows * self._width + columns


BLOCK = 1024  # positions of one block
_BITS = 64


@dataclass(frozen=True)
class Segment:
    first: int
    weights: tuple[Fraction, ...]
    drawn: tuple[int, ...]

    @cached_property
    def _limits(self) -> list[tuple[int, int]]:
        """The end of each source's part of a block, except the last's: whole slots, and the rest in 2**-64 slots."""
        total = sum(self.weights)
        ends, before = [], Fraction(0)
        for weight in self.weights[:-1]:
            before += weight
            whole, rest = divmod(before * BLOCK / total, 1)
            ends.append((int(whole), -(-rest.numerator * 2**_BITS // rest.denominator)))
        return ends

    def drawn_before_block(self, block: int) -> list[int]:
        ends = [whole * block + offsets_below(block, rest) for whole, rest in self._limits]
        bounds = [0, *ends, block * BLOCK]
        return [before + end - begin for before, begin, end in zip(self.drawn, bounds[:-1], bounds[1:], strict=True)]

    def sources(self, block: int, seed: int) -> Integers:
        offset = _reversed_bits(block)
        ends = [whole + (offset < rest) for whole, rest in self._limits]
        counts = np.diff([0, *ends, BLOCK])
        key = np.uint64(hash_seed(b"slots", seed, self.first + block * BLOCK))
        with np.errstate(over="ignore"):
            ranks = scrambled(np.arange(BLOCK, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key)
        return np.repeat(np.arange(len(counts)), counts)[np.argsort(ranks, kind="stable")]

    def drawn_before(self, position: int, seed: int) -> list[int]:
        block, slot = divmod(position - self.first, BLOCK)
        drawn = self.drawn_before_block(block)
        if slot:
            begun = np.bincount(self.sources(block, seed)[:slot], minlength=len(drawn))
            drawn = [before + int(more) for before, more in zip(drawn, begun, strict=True)]
        return drawn

    def first_position_with(self, source: int, count: int, end: int, seed: int) -> int:
        """The first position before which the source was drawn `count` times or more, as it was before `end`."""
        # How many whole blocks begin before that many were drawn.
        blocks = range(1, (end - self.first) // BLOCK + 1)
        low = bisect_left(blocks, count, key=lambda block: self.drawn_before_block(block)[source])
        missing = count - self.drawn_before_block(low)[source]
        if missing <= 0:
            return self.first
        slots = np.flatnonzero(self.sources(low, seed) == source)
        return self.first + low * BLOCK + int(slots[missing - 1]) + 1


def segments(
    changes: Sequence[tuple[int, tuple[Fraction, ...]]],
    drawn: Sequence[int],
    limits: Sequence[int | None],
    seed: int,
    known: Sequence[Segment],
) -> tuple[list[Segment], int]:
    """The segments of a mixture without the sources that are used up, and where it ends."""
    found: list[Segment] = []
    followed = {segment.first: (segment, later) for segment, later in pairwise(known)}
    counts = list(drawn)
    stops = [*(first for first, _ in changes[1:]), ENDLESS]
    for (first, weights), stop in zip(changes, stops, strict=True):
        position = first
        while position < stop:
            left = tuple(
                Fraction(0) if limit is not None and count >= limit else weight
                for weight, count, limit in zip(weights, counts, limits, strict=True)
            )
            if not any(left):
                return found, position
            segment = Segment(position, left, tuple(counts))
            same, later = followed.get(position, (segment, None))
            if later is not None and same == segment and later.first == stop:
                found.append(same)
                position, counts = stop, list(later.drawn)
                continue
            found.append(segment)
            position, counts = stop, segment.drawn_before(stop, seed)
            reached = [
                segment.first_position_with(source, limit, stop, seed)
                for source, limit in enumerate(limits)
                if limit is not None and left[source] and counts[source] >= limit
            ]
            if reached:
                position = min(reached)
                counts = segment.drawn_before(position, seed)
    return found, ENDLESS


def offsets_below(count: int, limit: int) -> int:
    """How many of the first `count` offsets are below `limit`, in 2**-64."""
    below, first = 0, 0
    for digit in reversed(range(count.bit_length())):
        if count >> digit & 1:
            # The offsets of 2**digit blocks from `first` on are one grid, which the digits of `first` move.
            step = 1 << _BITS - digit
            below += min(max(-((_reversed_bits(first) - limit) // step), 0), 1 << digit)
            first += 1 << digit
    return below


def _reversed_bits(number: int) -> int:
    """Van der Corput's offset of a block, in 2**-64."""
    return int(f"{number:0{_BITS}b}"[::-1], 2)


class Drawn(NamedTuple):
    samples: int
    epochs: float


class Draw(NamedTuple):
    source: str
    sample: int
    epoch: int


# Packing reads up to 65,536 samples in any order; 100 kB each.
_PLANS_KEPT = 80


@dataclass(frozen=True, slots=True)
class _Plan:
    first: int
    end: int
    sources: Integers
    indices: Integers
    draws: list[Draw]


@dataclass(eq=False, repr=False)
class Mixture(OrderedDataset):
    """Samples of several sources, drawn by weights, each source in its own random order.

    The order only depends on the seed and the position. Every sample of a source is drawn once before any is drawn
    again. In `n` blocks of 1,024 samples a source is drawn as its weight says, to within `log2(n) + 1` samples.

    Args:
        sources: Maps names to map-style datasets: `__getitem__` and `__len__`.
        weights: Weight of each source: not negative; any sum. Default: equal weights.
        unit: Unit of weights and of the places of stages: "samples", or "tokens", which divides a source's weight by
            the mean of its `lengths`.
        stages: Other weights from given places on, in rising order.
        max_epochs: How often each of these sources may be gone through; then it is left out. The mixture ends when no
            source with a weight is left; without a limit it is endless.
        num_samples: The length of a pass. Stages, limits and counts of drawn samples continue over the whole run.
            Default: a pass is the whole mixture, and the next one restarts it in another order.
        seed: Seed of the order. Default: the run's.
        on_change: Policy when the checkpoint has another mixture: "refuse", or "continue" with this one from that
            position, with a warning that lists the differences. Sources of the same name and length then keep their
            position; a source of another length begins its next epoch.

    Raises:
        ConfigError: Weights are negative, not finite, all zero, or of unknown sources; or another option is.
        DataError: There is no source, or one is empty, not map-style, or lacks the `lengths` that "tokens" need.

    Example:
        ```python
        mixture = Mixture(
            {"code": code, "docs": docs},
            weights={"code": 3, "docs": 1},
            stages=[Stage(at=100_000, weights={"code": 1, "docs": 1}, ramp=20_000)],
            max_epochs={"docs": 4},
        )
        loader = DistributedDataLoader(mixture, batch_size=8)
        ```
    """

    sources: Mapping[str, Any]
    weights: Weights | None = None
    _: KW_ONLY
    unit: Literal["samples", "tokens"] = "samples"
    stages: Sequence[Stage] = ()
    max_epochs: Mapping[str, float] | None = None
    num_samples: int | None = None
    seed: int | None = None
    on_change: Literal["refuse", "continue"] = "refuse"

    def __post_init__(self) -> None:
        self.sources, self.stages = dict(self.sources), tuple(self.stages)
        self.names = names = list(self.sources)
        if not names:
            raise DataError('A mixture of no sources has no samples. Give them names: Mixture({"code": dataset, ...}).')
        for name, source in self.sources.items():
            kind = type(source).__name__
            if isinstance(source, IterableDataset | OrderedDataset) or not isinstance(source, Sized):
                raise DataError(f"source {name!r} ({kind}) has no samples by number. Give a map-style dataset.")
            refuse(len(source) == 0, f"source {name!r} ({kind}) has 0 samples. Check its path.", DataError)
        self._lengths = [len(source) for source in self.sources.values()]
        self._means = mean_lengths(self.sources) if self.unit == "tokens" else None
        self._weights = checked_weights(dict.fromkeys(names, 1) if self.weights is None else self.weights, names)
        self._max_epochs = dict(self.max_epochs or {})
        self._run_seed = 0
        check_choice("unit", self.unit, ("samples", "tokens"))
        check_choice("on_change", self.on_change, ("refuse", "continue"))
        if self.num_samples is not None:
            check_integer("num_samples", self.num_samples, minimum=1)
        check_stages(self.stages, self.names)
        for name, epochs in self._max_epochs.items():
            refuse(name not in self.names, f"max_epochs has {name!r}, and the sources are {self.names}.")
            if not 0 < epochs < math.inf:
                raise ConfigError(f"max_epochs[{name!r}]={epochs} is not positive and finite. Leave the source out.")
        self._changes: list[tuple[int, dict[str, float]]] = []
        self._asked: dict[str, float] | None = None
        self._origin = 0
        self._drawn_before = [0] * len(self.names)
        self._epoch = 0
        self._begins_pass = True
        self._told_at: int | None = None
        self._segments: list[Segment] = []
        self._segments_of: tuple[int, list[int | None]] | None = None
        self._compile()

    # -- the samples

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> Any:
        name, index, _ = self.locate(position)
        try:
            return self.sources[name][index]
        except Exception as error:
            raise DataError(
                f"sample {index} of source {name!r} ({type(self.sources[name]).__name__}), at position {position} of "
                f"the mixture, cannot be loaded: {type(error).__name__}: {error}"
            ) from error

    def locate(self, position: int) -> Draw:
        """The source, its sample and its epoch at a position of this pass."""
        if not 0 <= position < self._length:
            raise IndexError(f"position {position} of a mixture of {self._length} samples")
        position += self._offset
        plan = self._plan_of(position)
        return plan.draws[position - plan.first]

    def lengths(self, first: int, last: int) -> Integers:
        """Tokens of the samples at positions `first` to `last` (exclusive) of this pass, without loading them."""
        measured = [lengths_of(source, name) for name, source in self.sources.items()]
        found = np.empty(last - first, dtype=np.int64)
        position = first + self._offset
        while position < last + self._offset:
            plan = self._plan_of(position)
            end = min(plan.end, last + self._offset)
            part = slice(position - plan.first, end - plan.first)
            chosen, indices = plan.sources[part], plan.indices[part]
            into = found[position - first - self._offset : end - first - self._offset]
            for source, lengths in enumerate(measured):
                slots = np.flatnonzero(chosen == source)
                into[slots] = lengths[indices[slots]]
            position = end
        return found

    # -- drawn samples, and changing weights

    def drawn(self, position: int) -> dict[str, Drawn]:
        """Samples and epochs of each source before a position of this pass, in the whole run."""
        virtual = min(position + self._offset, self._end)
        counts = self._segment_of(max(virtual - 1, self._origin)).drawn_before(virtual, self._order_seed)
        return {
            name: Drawn(count, count / length)
            for name, count, length in zip(self.names, counts, self._lengths, strict=True)
        }

    def set_weights(self, weights: Weights) -> None:
        """Draws by other weights, from the first sample on that no window has; until the next stage.

        Call it on all ranks, between two steps. It is part of checkpoints.

        Raises:
            ConfigError: As in the constructor.
        """
        self._asked = checked_weights(weights, self.names)

    @property
    def may_change(self) -> bool:
        return self._asked is not None

    def changes_at(self, position: int, mark: Any = None) -> bool:
        if self._asked is None:
            return False
        at = position + self._offset
        self._changes = [*(change for change in self._changes if change[0] != at), (at, self._asked)]
        self._asked = None
        self._compile()
        return True

    def stages_within(self, first: int, last: int) -> list[int]:
        starts = (segment.first - self._offset for segment in self._segments)
        return [start for start in starts if first < start < last]

    def numbers_at(self, position: int, mark: Any = None) -> dict[str, float]:
        return {
            f"data/{name}/{unit}": value
            for name, drawn in self.drawn(position).items()
            for unit, value in zip(Drawn._fields, drawn, strict=True)
        }

    # -- resuming

    @property
    def first_position(self) -> int:
        return max(self._origin - self._offset, 0)

    def begin(self, seed: int, state: dict[str, Any] | None) -> None:
        self._run_seed = seed
        self._begins_pass = state is None
        if state is not None:
            self._take(state)
        elif self.num_samples is None:
            # The whole mixture again: with its stages, or with the weights that were set last.
            last = [] if self.stages else [(0, weights) for _, weights in self._changes[-1:]]
            self._forget_the_past(last)
        self._compile()

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if epoch == 0 and self._begins_pass:  # of a run before this one nothing is left
            self._forget_the_past([])
        self._compile()

    def _forget_the_past(self, changes: list[tuple[int, dict[str, float]]]) -> None:
        self._origin, self._drawn_before, self._changes = 0, [0] * len(self.names), changes

    def state_at(self, position: int, mark: Any = None) -> dict[str, Any]:
        return {
            "mixture": self._facts(),
            "changes": [[at, dict(weights)] for at, weights in self._changes],
            "asked": None if self._asked is None else dict(self._asked),
            "origin": [self._origin, dict(zip(self.names, self._drawn_before, strict=True))],
            "position": position + self._offset,
            "drawn": {name: drawn.samples for name, drawn in self.drawn(position).items()},
        }

    def _facts(self) -> dict[str, Any]:
        return {
            "sources": dict(zip(self.names, self._lengths, strict=True)),
            "weights": dict(self._weights),
            "stages": [[stage.at, dict(stage.weights), stage.ramp] for stage in self.stages],
            "unit": self.unit,
            "mean_tokens": self._means,
            "max_epochs": dict(self._max_epochs),
            "num_samples": self.num_samples,
            "seed": self.seed,
        }

    def _take(self, state: dict[str, Any]) -> None:
        before, now = state["mixture"], self._facts()
        changed = [key for key in now if before.get(key) != now[key]]
        # A source that was moved is another order of names: it counts.
        if not changed and list(before["sources"]) == self.names:
            self._origin, drawn = state["origin"]
            self._drawn_before = [drawn[name] for name in self.names]
            self._changes = [(at, dict(weights)) for at, weights in state["changes"]]
            if self._asked is None:
                self._asked = state["asked"]
            return
        differences = [f"{key} was {before.get(key)}, and is {now[key]}" for key in changed]
        told = "; ".join(differences) or "its sources were in another order"
        if self.on_change == "refuse" or "num_samples" in changed:
            raise DataError(
                f"the checkpoint is of another mixture ({told}). Give it what it had; or, except for num_samples, "
                'Mixture(..., on_change="continue") to continue with this mixture from that position.'
            )
        is_main = get_worker_info() is None and (not dist.is_initialized() or dist.get_rank() == 0)
        if self._told_at != state["position"] and is_main:  # a resume may call this several times
            logger.warning(
                "The run continues with another mixture, from position %d on: %s. With packed rows, the rest of the "
                "block that was begun is left out.",
                state["position"],
                told,
            )
        self._told_at = state["position"]
        self._origin, self._changes = state["position"], []
        self._drawn_before = []
        for name, length in zip(self.names, self._lengths, strict=True):
            drawn, length_before = state["drawn"].get(name, 0), before["sources"].get(name, length)
            self._drawn_before.append(drawn if length == length_before else -(-drawn // length_before) * length)

    # -- the order

    def _compile(self) -> None:
        """Lays out the segments; positions here are those of the whole run, or of the pass without num_samples."""
        self._order_seed = self._run_seed if self.seed is None else self.seed
        if self.num_samples is None and self._epoch:
            self._order_seed = hash_seed(b"pass", self._order_seed, self._epoch)
        limits = [
            None if name not in self._max_epochs else int(self._max_epochs[name] * length)
            for name, length in zip(self.names, self._lengths, strict=True)
        ]
        weights = weights_by_position(self._weights, self.stages, self._changes, self._means, self._origin)
        of = self._order_seed, limits
        known = self._segments if of == self._segments_of else []
        self._segments, self._end = segments(weights, self._drawn_before, limits, self._order_seed, known)
        self._segments_of = of
        self._orders = [
            IndexPermutation(length, hash_seed(b"mixture" + name.encode(), self._order_seed))
            for name, length in zip(self.names, self._lengths, strict=True)
        ]
        self._plan = _Plan(0, 0, np.empty(0, np.int64), np.empty(0, np.int64), [])
        self._plans: dict[int, _Plan] = {}
        self._offset = self._epoch * (self.num_samples or 0)
        self._length = min(self.num_samples or ENDLESS, self._end - self._offset)
        if self._length <= 0:
            raise DataError(
                f"max_epochs={self._max_epochs} lets {self._end} samples of the mixture be drawn, and pass "
                f"{self._epoch} (from 0) would begin at sample {self._offset}. Train fewer epochs, or raise max_epochs."
            )

    def _segment_of(self, position: int) -> Segment:
        return self._segments[bisect_right(self._segments, position, key=attrgetter("first")) - 1]

    def _plan_of(self, position: int) -> _Plan:
        plan = self._plan
        if plan.first <= position < plan.end:
            return plan
        segment = self._segment_of(position)
        block = (position - segment.first) // BLOCK
        found = self._plans.get(segment.first + block * BLOCK)
        if found is None:
            if len(self._plans) == _PLANS_KEPT:
                del self._plans[next(iter(self._plans))]
            found = self._make_plan(segment, block)
            self._plans[found.first] = found
        self._plan = found
        return found

    def _make_plan(self, segment: Segment, block: int) -> _Plan:
        chosen = segment.sources(block, self._order_seed)
        drawn = segment.drawn_before_block(block)
        indices, epochs = np.empty_like(chosen), np.empty_like(chosen)
        for source, (length, order, before) in enumerate(zip(self._lengths, self._orders, drawn, strict=True)):
            slots = np.flatnonzero(chosen == source)
            epochs[slots], places = np.divmod(np.arange(before, before + len(slots)), length)
            indices[slots] = order(places, epochs[slots])
        first = segment.first + block * BLOCK
        following = [later.first for later in self._segments if later.first > segment.first]
        names = [self.names[source] for source in chosen.tolist()]
        draws = [Draw(*draw) for draw in zip(names, indices.tolist(), epochs.tolist(), strict=True)]
        return _Plan(first, min([first + BLOCK, self._end, *following]), chosen, indices, draws)
