"""Lanes: the fixed number of sequences that a source's shards are dealt to, whatever ranks and workers read them. A
step takes equally many samples from each of `lanes` lanes; step s reads set s mod `turns` of them, so that workers can
load ahead."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dream_trainer.checks import divisors, spell
from dream_trainer.errors import DataError

MOST_LANES = 64  # lanes of a step where the user does not say: each holds an open file
MOST_TURNS = 4  # sets of lanes where the user does not say


@dataclass(frozen=True, slots=True)
class Chain:
    """Lanes of one turn that fill whole micro-batches among themselves, so that one worker can load them alone."""

    turn: int
    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LanePlan:
    """Which shards are in which lane, and which lanes are in which step."""

    num_shards: int
    global_batch: int
    lanes: int
    turns: int

    @property
    def per_lane(self) -> int:
        """Samples that a step takes from each of its lanes."""
        return self.global_batch // self.lanes

    def shards(self, lane: int) -> range:
        return range(lane, self.num_shards, self.lanes * self.turns)

    def consumed(self, lane: int, steps: int) -> int:
        """Samples of one lane that the first `steps` steps of a pass consume."""
        turn = lane // self.lanes
        return max(0, -(-(steps - turn) // self.turns)) * self.per_lane

    def chains(self, batch_size: int, dp_rank: int, dp_size: int) -> list[Chain]:
        """One rank's lanes, cut into the smallest parts that fill whole micro-batches of `batch_size`."""
        share = self.lanes // dp_size
        length = batch_size // math.gcd(batch_size, self.per_lane)
        return [
            Chain(turn, tuple(range(first, first + length)))
            for turn in range(self.turns)
            for first in range(turn * self.lanes + dp_rank * share, turn * self.lanes + (dp_rank + 1) * share, length)
        ]

    @property
    def facts(self) -> dict[str, Any]:
        return {"shards": self.num_shards, "lanes": self.lanes, "turns": self.turns, "global batch": self.global_batch}


def lane_plan(num_shards: int, global_batch: int, dp_size: int, lanes: int | None, turns: int | None) -> LanePlan:
    """The plan for a source; `lanes` None is the largest divisor of `global_batch` with shards for it, up to 64."""
    if num_shards < dp_size:
        raise DataError(
            f"the source has {num_shards} {_shards(num_shards)}, fewer than dp_size={dp_size} data-parallel ranks, and "
            "each rank "
            f"reads shards of its own. Use at most {num_shards} ranks, or write the data in {dp_size} shards or more."
        )
    possible = [lane for lane in divisors(global_batch) if lane <= num_shards]
    if lanes is None:
        lanes = max(lane for lane in possible if lane <= MOST_LANES)
    if lanes not in possible:
        raise DataError(
            f"lanes={lanes} is not a divisor of the global batch of {global_batch} samples, or more than the "
            f"{num_shards} {_shards(num_shards)} of the source. Every step takes equally many samples from each lane. "
            f"Use {spell(possible)}."
        )
    if lanes % dp_size:
        ranks = [size for size in divisors(lanes) if size <= num_shards]
        fitting = [lane for lane in possible if lane % dp_size == 0]
        other = f", or lanes={spell(fitting)} in a new run" if fitting else ""
        raise DataError(
            f"lanes={lanes} cannot be dealt evenly to dp_size={dp_size} data-parallel ranks ({num_shards} "
            f"{_shards(num_shards)}, global batch {global_batch}). Use {spell(ranks)} ranks{other}."
        )
    if turns is None:
        possible_turns = range(1, min(MOST_TURNS, num_shards // lanes) + 1)
        even = [turn for turn in possible_turns if num_shards % (lanes * turn) == 0]
        turns = max(even or possible_turns)
    if turns < 1 or lanes * turns > num_shards:
        raise DataError(
            f"lanes={lanes} with turns={turns} needs {lanes * turns} shards, and the source has {num_shards}. Use "
            f"turns from 1 to {num_shards // lanes}, or fewer lanes."
        )
    return LanePlan(num_shards, global_batch, lanes, turns)


def _shards(count: int) -> str:
    return "shard" if count == 1 else "shards"
