"""The source of each sample of a mixture, as arithmetic on the position. Weights come from stages, ramps and changes
made during the run. In a block of a segment each source has a part of a line by its weight. The block's van der Corput
offset moves the whole numbers on the line, so shares are exact to log2(n) samples."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dream_trainer.checks import refuse
from dream_trainer.distributed.seeds import hash_seed
from dream_trainer.errors import ConfigError

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
    """Permutations of `range(length)`, one for each epoch, by arithmetic: no memory, and the same time for any index.

    A Feistel network permutes the fields of a slightly larger rectangle. Results outside `length` pass the network
    again until they fall inside. Lengths go up to 2**62.
    """

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self.seed = seed
        width = math.isqrt(length - 1) + 1
        self._width, self._height = np.uint64(width), np.uint64(-(-length // width))

    def __call__(self, indices: npt.ArrayLike, epochs: npt.ArrayLike = 0) -> Integers:
        places = np.asarray(indices, dtype=np.int64)
        epochs = np.broadcast_to(np.asarray(epochs, dtype=np.int64), places.shape)
        base = np.uint64(self.seed & 0xFFFF_FFFF_FFFF_FFFF)
        with np.errstate(over="ignore"):
            keys = scrambled(base + scrambled(epochs.reshape(-1).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)))
            found = self._network(places.reshape(-1).astype(np.uint64), keys)
            outside = np.flatnonzero(found >= np.uint64(self.length))
            while len(outside):
                again = self._network(found[outside], keys[outside])
                found[outside] = again
                outside = outside[again >= np.uint64(self.length)]
        return found.astype(np.int64).reshape(places.shape)

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
    end: int,
    seed: int,
    known: Sequence[Segment] = (),
) -> tuple[list[Segment], int]:
    """The segments of a mixture without the sources that are used up, and where it ends."""
    found: list[Segment] = []
    followed = {segment.first: (segment, later) for segment, later in pairwise(known)}
    counts = list(drawn)
    stops = [*(first for first, _ in changes[1:]), end]
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
    return found, end


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
