"""The batches that one process loads of a stream: those of its own lanes, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import IterableDataset

from dream_trainer.data.sample_seeds import collates_without_draws
from dream_trainer.data.streams.lane_reader import Lane, LaneState, refuse_forgetful
from dream_trainer.data.streams.lanes import Chain, LanePlan
from dream_trainer.distributed.seeds import hash_seed, seed_cpu

if TYPE_CHECKING:
    from dream_trainer.data.streams.stream_loader import StreamLoader


class Mark(NamedTuple):
    """What a batch tells of one lane.

    Attributes:
        lane: Its number.
        begun: The state of the newest block that began with one of its samples, by value; None if none did.
        skipped: Samples that the lane has skipped so far.
        reports: Those that it skipped for this batch.
    """

    lane: int
    begun: bytes | None
    skipped: int
    reports: list[str]


Loaded = tuple[Any, list[Mark] | None, str | None]
"""A batch, what it tells of its lanes, and None; or at a pass's end two Nones, and why it is the end."""


class LaneBatches(IterableDataset[Loaded]):
    """The batches that one reader loads, in a worker or in the training process: those of its chains, step by step.

    Args:
        loader: What to load and how.
        plan: Which shards and samples are in which lane and step.
        chains: The lanes of this reader.
        accumulation: Micro-batches of the rank in a step.
        seed: The run's seed.
    """

    def __init__(
        self, loader: StreamLoader, plan: LanePlan, chains: Sequence[Chain], accumulation: int, seed: int
    ) -> None:
        self._options, self._collate, self._batch_size = loader.options, loader.collate_fn, loader.batch_size
        self._plan = plan
        self._chains = chains
        self._seed = seed
        self._draws = not collates_without_draws(loader.collate_fn)
        self.start(0, 0, {})

    def start(self, step: int, epoch: int, states: Mapping[str, Any]) -> None:
        """Sets where the next iterator begins: at a step of a pass, with the states of lanes that were read before."""
        self._first_step, self._epoch, self._states = step, epoch, states

    def __iter__(self) -> Iterator[Loaded]:
        first = self._chains[0].lanes[0]
        refuse_forgetful(self._options.source, self._plan.shards(first)[0])
        lanes = {lane: self._lane(lane) for chain in self._chains for lane in chain.lanes}
        try:
            yield from self._batches(lanes)
        finally:
            for lane in lanes.values():
                lane.close()

    def _batches(self, lanes: Mapping[int, Lane]) -> Iterator[Loaded]:
        per_lane, size = self._plan.per_lane, self._batch_size
        num_batches = len(self._chains[0].lanes) * per_lane // size  # of one chain in one step
        for step in count(self._first_step):
            for batch in range(num_batches):
                for chain in self._chains:
                    if chain.turn != step % self._plan.turns:
                        continue
                    places = range(batch * size, (batch + 1) * size)
                    numbers = [chain.lanes[place // per_lane] for place in places]
                    samples = []
                    for place, number in zip(places, numbers, strict=True):
                        try:
                            samples.append(next(lanes[number]))
                        except StopIteration:
                            yield None, None, _end(number, place % per_lane, per_lane)
                            return
                    if self._draws:
                        seed_cpu(hash_seed(b"collate", self._seed, step, numbers[0], batch))
                    yield self._collate(samples), _marks(lanes, dict.fromkeys(numbers)), None

    def _lane(self, number: int) -> Lane:
        saved = self._states.get(str(number))
        start = LaneState(epoch=self._epoch) if saved is None else LaneState(**saved)
        consumed = self._plan.consumed(number, self._first_step)
        return Lane(self._options, self._plan, number, seed=self._seed, start=start, consumed=consumed)


def _marks(lanes: Mapping[int, Lane], numbers: Iterable[int]) -> list[Mark] | None:
    """Takes what the lanes of a batch have to tell."""
    marks = []
    for number in numbers:
        lane = lanes[number]
        if lane.begun is not None or lane.calls.reports:
            marks.append(Mark(number, lane.begun, lane.calls.skipped, lane.calls.reports[:]))
            lane.begun = None
            lane.calls.reports.clear()
    return marks or None


def _end(lane: int, left: int, per_lane: int) -> str:
    return (
        f"lane {lane} has {left} of the {per_lane} samples that a step takes from each lane. They, and what other "
        "lanes still have, are not read in this pass."
    )
