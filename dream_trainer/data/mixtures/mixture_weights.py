"""The weights of a mixture over its course: stages, ramps, and what was changed while the run went on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from dream_trainer.checks import refuse
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
        if following.at <= stage.at:
            places = [stage.at for stage in stages]
            raise ConfigError(f"the stages of a mixture begin at {places}. Give them in rising order.")
        if following.at < stage.at + stage.ramp:
            raise ConfigError(
                f"the stage at {stage.at} has a ramp of {stage.ramp}, and the next one begins at {following.at}, "
                f"before its end. Make the ramp {following.at - stage.at} at most."
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
    found: dict[int, list[Fraction]] = {0: [Fraction(weight) for weight in weights.values()]}
    begins = {0: 0}  # of each position, where the stage begins whose weights those are
    place = _Places(by_sample, is_tokens=means is not None)
    planned = found[0]
    place.weigh(planned)
    for stage in stages:
        begin = place.position_of(Fraction(stage.at))
        target = [Fraction(stage.weights.get(name, 0)) for name in weights]
        # A ramp between weights of other sums would not be linear.
        sums = sum(planned), sum(target)
        shares = [(before / sums[0], after / sums[1]) for before, after in zip(planned, target, strict=True)]
        steps = min(_STEPS_OF_RAMP, stage.ramp)
        for step in range(steps):
            part = Fraction(2 * step + 1, 2 * steps)  # in the middle of the step
            mixed = [before + (after - before) * part for before, after in shares]
            at = place.position_of(stage.at + Fraction(stage.ramp * step, steps))
            found[at], begins[at] = mixed, begin
            place.weigh(mixed)
        at = place.position_of(Fraction(stage.at + stage.ramp))
        found[at], begins[at] = target, begin
        place.weigh(target)
        planned = target
    for at, changed in changes:
        # What is left of a ramp that has begun is left out: the change counts until the next stage.
        found = {place: value for place, value in found.items() if place <= at or begins[place] > at}
        found[at], begins[at] = [Fraction(weight) for weight in changed.values()], at
    begun = max(at for at in found if at <= first)
    kept = {first: found[begun]} | {at: value for at, value in found.items() if at > first}
    return [
        (at, tuple(weight * factor for weight, factor in zip(kept[at], by_sample, strict=True))) for at in sorted(kept)
    ]


class _Places:
    """Positions of places that are counted in samples, or in tokens by the mean under the weights of their time."""

    def __init__(self, by_sample: list[Fraction], *, is_tokens: bool) -> None:
        self._by_sample = by_sample
        self._is_tokens = is_tokens
        self._place = self._position = Fraction(0)
        self._tokens_per_sample = Fraction(1)

    def weigh(self, weights: list[Fraction]) -> None:
        if self._is_tokens:
            # Samples are drawn by weight / mean, and each has its mean: the tokens of all are the weights' sum.
            samples = sum((weight * by for weight, by in zip(weights, self._by_sample, strict=True)), Fraction(0))
            self._tokens_per_sample = sum(weights, Fraction(0)) / samples

    def position_of(self, place: Fraction) -> int:
        """The first position at or after a place, which is not before the last one asked for."""
        self._position += (place - self._place) / self._tokens_per_sample
        self._place = place
        return math.ceil(self._position)
