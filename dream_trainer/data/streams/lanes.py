"""Lanes: the fixed number of sequences that a source's shards are dealt to, for any ranks and workers. A
step takes equally many samples from each of `lanes` lanes; step s reads set s mod `turns` of them, so that workers can
load ahead."""

from __future__ import annotations

import math
import pickle
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from dream_trainer.checks import divisors, spell
from dream_trainer.data.foreign import EpochAware
from dream_trainer.data.probe import summary
from dream_trainer.data.sources.stream_sources import ShardedSource, StatefulIterable
from dream_trainer.data.transforms import Item, SampleCalls, Transform, block_size, shuffled
from dream_trainer.distributed.seeds import hash_seed
from dream_trainer.errors import DataError

MOST_LANES = 64  # lanes of a step where the user does not say: each holds an open file
MOST_TURNS = 4  # sets of lanes where the user does not say


@dataclass(frozen=True, slots=True)
class Chain:
    """Lanes of one turn that fill whole micro-batches among themselves, so a single worker can load them."""

    turn: int
    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LanePlan:
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
            f"each rank reads different shards. Use at most {num_shards} ranks, or write the data in {dp_size} shards "
            "or more."
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


@dataclass(frozen=True, slots=True)
class LaneOptions:
    source: ShardedSource
    transforms: Sequence[Transform]
    shuffle_shards: bool
    repeat: bool
    max_skipped: int


@dataclass(slots=True)
class LaneState:
    yielded: int = 0
    number: int = 0
    epoch: int = 0
    place: int = 0
    read: int = 0
    yielded_in_epoch: int = 0
    skipped: int = 0
    reader: Any = None


class Lane(Iterator[Any]):
    def __init__(
        self, options: LaneOptions, plan: LanePlan, number: int, *, seed: int, start: LaneState, consumed: int
    ) -> None:
        self.begun: bytes | None = None
        self.calls = SampleCalls(seed, number, options.max_skipped, start.skipped)
        self._options = options
        self._shards = plan.shards(number)
        self._numbers = seed, number
        self._state = start
        self._block_size = block_size(options.transforms)
        self._reader: StatefulIterable | None = None
        self._iterator: Iterator[Any] | None = None
        self._samples = self._from(start, consumed)

    def __next__(self) -> Any:
        return next(self._samples)

    def close(self) -> None:
        close(self._iterator)
        self._reader = self._iterator = None

    def _from(self, state: LaneState, consumed: int) -> Iterator[Any]:
        order = self._order(state.epoch)
        while True:
            state.skipped = self.calls.skipped
            begun: bytes | None = self._copied()
            block = self.calls.transformed(self._options.transforms, self._block(order))
            for item in block:
                state.yielded += 1
                state.yielded_in_epoch += 1
                if begun is not None:
                    self.begun, begun = begun, None
                if state.yielded > consumed:
                    yield item.value
                else:
                    self.calls.reports.clear()  # reported before the run was interrupted
            if state.place == len(order):
                if not self._options.repeat:
                    return  # also of a lane that yielded nothing: on other ranks another lane may have ended the pass
                if state.yielded_in_epoch == 0:
                    names = ", ".join(self._options.source.name(shard) for shard in self._shards[:3])
                    raise DataError(
                        f"lane {self._numbers[1]} yielded no sample in a whole pass over its shards ({names}): the "
                        "transforms keep none. Check the filters, or use fewer lanes."
                    )
                state.epoch, state.place, state.yielded_in_epoch = state.epoch + 1, 0, 0
                order = self._order(state.epoch)

    def _block(self, order: Sequence[int]) -> Iterator[Item]:
        """The next samples as the source has them, up to a whole block, and none of the next epoch."""
        for _ in range(self._block_size):
            item = self._read(order)
            if item is None:
                return
            yield item

    def _read(self, order: Sequence[int]) -> Item | None:
        """The next sample of this epoch; None at its end."""
        state, source = self._state, self._options.source
        while state.place < len(order):
            shard = order[state.place]
            name = source.name(shard)
            try:
                if self._iterator is None:
                    self._reader, self._iterator = opened(source, shard, state.epoch, state.reader)
                value = next(self._iterator)
            except StopIteration:
                if state.read == 0:
                    raise DataError(f"{name} is empty. Leave it out, or write samples to it.") from None
                self.close()
                state.place, state.read, state.reader = state.place + 1, 0, None
            except Exception as error:
                what = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
                raise DataError(f"sample {state.read} of {source.place(shard)} cannot be read: {what}") from error
            else:
                item = Item(value, state.number, name, state.read)
                state.number, state.read = state.number + 1, state.read + 1
                return item
        return None

    def _copied(self) -> bytes:
        """The state by value, before anything more is read."""
        if self._reader is not None:
            self._state.reader = self._reader.state_dict()
        return pickle.dumps(asdict(self._state))

    def _order(self, epoch: int) -> Sequence[int]:
        if not self._options.shuffle_shards:
            return self._shards
        seed, lane = self._numbers
        order = shuffled(len(self._shards), hash_seed(b"shards", seed, lane, epoch))
        return [self._shards[place] for place in order]


def opened(source: ShardedSource, shard: int, epoch: int, state: Any) -> tuple[StatefulIterable, Iterator[Any]]:
    """A reader of one shard and its iterator, from `state` on."""
    reader = source.open(shard)
    if not isinstance(reader, StatefulIterable):
        raise DataError(
            f"{type(reader).__name__} cannot tell its position in its shard, so a run could not resume in its middle. "
            "Give it `state_dict()` and `load_state_dict(state)` besides `__iter__`, or use an indexed dataset."
        )
    if isinstance(reader, EpochAware):
        reader.set_epoch(epoch)
    if state is not None:
        reader.load_state_dict(pickle.loads(pickle.dumps(state)))  # a reader may keep and change the object
    return reader, iter(reader)


def close(iterator: Iterator[Any] | None) -> None:
    """Closes the files that a generator holds open."""
    if isinstance(iterator, Generator):
        iterator.close()


def refuse_forgetful(source: ShardedSource, shard: int) -> None:
    """Reads a few samples of a shard twice, the second time from a state; raises if they differ."""
    expected: list[Any] = []
    found: list[Any] = []
    before = 0
    for before in _READ_BEFORE:
        try:
            expected, found = _read_twice(source, shard, before)
        except Exception:  # the lane that reads the shard will raise it too, with the sample
            return
        if expected:
            break
    if found != expected:
        raise DataError(
            f"{source.name(shard)} does not come back to where it was by its own state: from the state after "
            f"{before} samples other samples follow than before. It may shuffle in a buffer or draw from "
            "random generators that its state leaves out. Let the source read in order, and use the transforms Shuffle "
            "and Map of dream_trainer.data, whose draws are seeded by sample."
        )


def _read_twice(source: ShardedSource, shard: int, before: int) -> tuple[list[Any], list[Any]]:
    reader, iterator = opened(source, shard, 0, None)
    try:
        for _ in islice(iterator, before):
            pass
        state = pickle.loads(pickle.dumps(reader.state_dict()))
        expected = [summary(sample) for sample in islice(iterator, _READ_AFTER)]
        close(iterator)
        _, iterator = opened(source, shard, 0, state)
        return expected, [summary(sample) for sample in islice(iterator, _READ_AFTER)]
    finally:
        close(iterator)


_READ_BEFORE, _READ_AFTER = (16, 4, 1), 4  # fewer where the shard has no more
