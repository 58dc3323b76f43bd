"""StreamLoader, and training from its lanes: one rank's windows, loaded by workers that own lanes, resumable at any
step."""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import KW_ONLY, asdict, dataclass
from itertools import count, islice, product
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple

import torch
import xxhash
from torch.utils.data import IterableDataset, default_collate

from dream_trainer.checks import check_count, divisors, refuse, spell
from dream_trainer.compat.pytorch import shutdown_workers
from dream_trainer.data.foreign import EpochAware, StatefulLoader
from dream_trainer.data.probe import summary
from dream_trainer.data.sampler import collates_without_draws, random_order
from dream_trainer.data.sources.stream_sources import HuggingFaceShards, ShardedSource
from dream_trainer.data.transforms import Item, SampleCalls, Transform, block_size, description
from dream_trainer.data.window import DataPosition, SavedState, TrainStream, Window
from dream_trainer.data.worker_start import started, worker_loader
from dream_trainer.distributed.seeds import hash_seed, preserved_random_state, seed_cpu
from dream_trainer.errors import DataError
from dream_trainer.screen import logger

MOST_LANES = 64  # lanes of a step where the user does not say: each holds an open file
MOST_TURNS = 4  # sets of lanes where the user does not say


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

    def chains(self, batch_size: int, dp_rank: int, dp_size: int) -> list[range]:
        """One rank's lanes, turn by turn, in the smallest chains that fill whole micro-batches: a worker loads each."""
        share = self.lanes // dp_size
        length = batch_size // math.gcd(batch_size, self.per_lane)
        return [
            range(first, first + length)
            for of_turn in range(dp_rank * share, self.lanes * self.turns, self.lanes)
            for first in range(of_turn, of_turn + share, length)
        ]


def lane_plan(num_shards: int, global_batch: int, dp_size: int, lanes: int | None, turns: int | None) -> LanePlan:
    """The plan for a source; `lanes` None is the largest divisor of `global_batch` with shards for it, up to 64."""
    possible = [lane for lane in divisors(global_batch) if lane <= num_shards]
    if lanes is None:
        lanes = max(lane for lane in possible if lane <= MOST_LANES)
    if lanes not in possible:
        raise DataError(
            f"lanes={lanes} is not a divisor of the global batch of {global_batch} samples, or more than the "
            f"{num_shards} shards of the source. Use {spell(possible)}."
        )
    if lanes % dp_size:
        ranks, fitting = divisors(lanes), [lane for lane in possible if lane % dp_size == 0]
        other = f", or lanes={spell(fitting)} in a new run" if fitting else ""
        raise DataError(
            f"lanes={lanes} cannot be dealt evenly to dp_size={dp_size} data-parallel ranks ({num_shards} shards, "
            f"global batch {global_batch}). Use {spell(ranks)} ranks{other}. Each rank reads different shards."
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


class Lane:
    def __init__(
        self, loader: StreamLoader, plan: LanePlan, number: int, *, seed: int, start: LaneState, consumed: int
    ) -> None:
        self.begun: bytes | None = None
        self.calls = SampleCalls(seed, number, loader.max_skipped, start.skipped)
        self._loader = loader
        self._shards = plan.shards(number)
        self._state = start
        self._block_size = block_size(loader.transforms)
        self._reader: StatefulLoader | None = None
        self._iterator: Iterator[Any] | None = None
        self.samples = self._from(start, consumed)

    def close(self) -> None:
        close(self._iterator)
        self._reader = self._iterator = None

    def _from(self, state: LaneState, consumed: int) -> Iterator[Any]:
        order = self._order(state.epoch)
        while True:
            state.skipped = self.calls.skipped
            if self._reader is not None:
                state.reader = self._reader.state_dict()
            begun: bytes | None = pickle.dumps(asdict(state))  # by value, before anything more is read
            for item in self.calls.transformed(self._loader.transforms, self._block(order)):
                state.yielded += 1
                state.yielded_in_epoch += 1
                if begun is not None:
                    self.begun, begun = begun, None
                if state.yielded > consumed:
                    yield item.value
                else:
                    self.calls.reports.clear()  # reported before the run was interrupted
            if state.place == len(order):
                if not self._loader.repeat:
                    return  # also of a lane that yielded nothing: on other ranks another lane may have ended the pass
                if state.yielded_in_epoch == 0:
                    names = ", ".join(self._loader.source.name(shard) for shard in self._shards[:3])
                    raise DataError(
                        f"lane {self.calls.lane} yielded no sample in a whole pass over its shards ({names}): the "
                        "transforms keep none. Check the filters, or use fewer lanes."
                    )
                state.epoch, state.place, state.yielded_in_epoch = state.epoch + 1, 0, 0
                order = self._order(state.epoch)

    def _block(self, order: Sequence[int]) -> Iterator[Item]:
        """The next samples as the source has them, up to a whole block, and none of the next epoch."""
        state, source, left = self._state, self._loader.source, self._block_size
        while left and state.place < len(order):
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
                raise DataError(f"sample {state.read} of {name} cannot be read: {what}") from error
            else:
                item = Item(value, state.number, name, state.read)
                state.number, state.read, left = state.number + 1, state.read + 1, left - 1
                yield item

    def _order(self, epoch: int) -> Sequence[int]:
        if not self._loader.shuffle_shards:
            return self._shards
        order = random_order(len(self._shards), hash_seed(b"shards", self.calls.seed, self.calls.lane, epoch))
        return [self._shards[place] for place in order.tolist()]


def opened(source: ShardedSource, shard: int, epoch: int, state: Any) -> tuple[StatefulLoader, Iterator[Any]]:
    """A reader of one shard and its iterator, from `state` on."""
    reader: Any = source.open(shard)
    if not isinstance(reader, StatefulLoader) or not isinstance(reader, Iterable):
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
    try:
        reader, iterator = opened(source, shard, 0, None)
        for _ in islice(iterator, 4):
            pass
        state = pickle.loads(pickle.dumps(reader.state_dict()))
        expected = [summary(sample) for sample in islice(iterator, 16)]
        _, iterator = opened(source, shard, 0, state)
        found = [summary(sample) for sample in islice(iterator, 16)]
    except Exception:  # the lane that reads the shard will raise it too, with the sample
        return
    if found != expected:
        raise DataError(
            f"{source.name(shard)} does not come back to where it was by its own state: other samples follow it than "
            "before. It may shuffle in a buffer or draw from random generators that its state leaves out. Let it read "
            "in order, and use shuffle_shards=True and the transforms Shuffle and Map of dream_trainer.data."
        )


@dataclass(eq=False, repr=False)
class StreamLoader:
    """Batches from a sequential source in shards, dealt to ranks and workers, that resumes at any step.

    The samples of an optimizer step only depend on the seed and the source, not on ranks, workers or accumulation.
    Shards are dealt to lanes, and a step takes equally many samples from each of its lanes (docs/data.md). The trainer
    passes it rank and seed. Without a trainer it yields the samples of a single process with seed 0.

    Args:
        source: A ShardedSource (`WebDatasetShards`, `IterableShards`, `HuggingFaceShards` or your own), or a streaming
            dataset of Hugging Face's `datasets`.
        batch_size: Samples in one micro-batch of one rank.
        transforms: Transforms, in this order: `Map`, `Filter`, `Batch`, `Unbatch`, `Shuffle`. Run in workers.
        lanes: Lanes that each step reads; it divides the global batch, and the data-parallel ranks divide it. None for
            the largest divisor of the global batch that there are shards for, up to 64.
        turns: Sets of lanes, read by consecutive steps in turn, so that several workers find work if a step has one
            micro-batch; `lanes * turns` shards are read at a time. None for up to 4, limited by the number of shards,
            or for the number that deals the shards evenly.
        shuffle_shards: Whether each lane reads its shards in a different random order in each epoch. Samples are
            shuffled by `Shuffle(window)` among the transforms.
        repeat: Whether each lane begins its shards again when it has read them. With False a pass ends for all with the
            last step that each lane can fill, and the next epoch begins with all shards.
        num_workers: Processes that load ahead; 0 loads in the training process.
        collate_fn: Turns a list of samples into a batch.
        max_skipped: How many samples whose transform raises each lane may skip in the whole run, or with `repeat=False`
            in each pass. They are counted in the logs. Errors of the source itself end the run.
        pin_memory: As in DistributedDataLoader, like the next three.
        prefetch_factor: Batches that each worker loads ahead.
        multiprocessing_context: How workers start.
        timeout: Seconds to wait for a batch from a worker.
        worker_init_fn: Called with 0 in each worker when it starts.

    Raises:
        DataError: The source is none, has no shards, or an option has no meaning.
    """

    source: Any
    batch_size: int
    _: KW_ONLY
    transforms: Sequence[Transform] = ()
    lanes: int | None = None
    turns: int | None = None
    shuffle_shards: bool = False
    repeat: bool = True
    num_workers: int = 0
    collate_fn: Callable[[Any], Any] | None = None
    max_skipped: int = 0
    pin_memory: bool = False
    prefetch_factor: int | None = None
    multiprocessing_context: str | BaseContext | None = None
    timeout: float = 0
    worker_init_fn: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size, hint="Give the samples of one rank's micro-batch.")
        datasets = sys.modules.get("datasets")  # only a process that imported it can hold one of its objects
        if datasets is not None and isinstance(self.source, datasets.IterableDataset):
            self.source = HuggingFaceShards(self.source)
        if not isinstance(self.source, ShardedSource):
            raise DataError(
                f"{type(self.source).__name__} is not a source in shards. Give a streaming dataset of Hugging Face, "
                "WebDatasetShards or IterableShards; samples by number belong in a DistributedDataLoader."
            )
        if self.source.num_shards < 1:
            raise DataError(f"the source ({type(self.source).__name__}) has 0 shards. Check its path and split.")

    def __iter__(self) -> Iterator[Any]:
        with closing(LaneStream(self, accumulation=1, dp_rank=0, dp_size=1, seed=0)) as stream:
            while (window := stream.next_window()) is not None:
                yield from window.batches


class LaneStream(TrainStream):
    steps_per_epoch = None
    resumes_from_all_ranks = True

    def __init__(self, loader: StreamLoader, *, accumulation: int, dp_rank: int, dp_size: int, seed: int) -> None:
        source, global_batch = loader.source, loader.batch_size * accumulation * dp_size
        self._plan = lane_plan(source.num_shards, global_batch, dp_size, loader.lanes, loader.turns)
        self.is_even = loader.repeat or dp_size == 1
        self.skipped: dict[int, int] = {}
        self._loader = loader
        self._accumulation = accumulation
        self._dp_rank = dp_rank
        self._seed = seed
        self._chains = self._plan.chains(loader.batch_size, dp_rank, dp_size)
        self._position = DataPosition(0, 0, 0)
        self._states: dict[str, Any] = {}  # of this pass, by lane; never changed, since windows hold it
        self._readers: list[Iterator[Loaded]] | None = None
        names = [source.name(shard).rpartition("/")[2] for shard in range(self._plan.num_shards)]
        self.facts = {
            "shards": self._plan.num_shards,
            "lanes": self._plan.lanes,
            "turns": self._plan.turns,
            "global batch": self._plan.global_batch,
            "names of shards": f"{names[0]} ... {names[-1]}, {xxhash.xxh3_64_hexdigest(repr(names).encode())}",
            "shuffled shards": loader.shuffle_shards,
            "repeats": loader.repeat,
            "transforms": [description(transform) for transform in loader.transforms],
            "block": block_size(loader.transforms),
        }

    def seek(self, position: DataPosition, rank_state: SavedState, *, is_pass_over: bool, state: SavedState) -> None:
        self._begin(position.epoch + is_pass_over)
        if is_pass_over or not position.samples:
            return
        saved: dict[str, Any] = {"stream": {}, "lanes": {}} | (rank_state or {})
        former, states = saved["stream"], saved["lanes"]
        differing = [
            f"{name}: {former.get(name)} then, {fact} now"
            for name, fact in self.facts.items()
            if former and former.get(name) != fact
        ]
        if differing:
            raise DataError(
                f"The run resumes in the middle of a stream that has changed ({'; '.join(differing)}). Give it the "
                "source and options it had, or start another experiment."
            )
        steps = -(-position.samples // self._plan.global_batch)
        # Lanes that this rank reads, and that were read before.
        lanes = [lane for chain in self._chains for lane in chain if self._plan.consumed(lane, steps)]
        missing = [lane for lane in lanes if str(lane) not in states]
        if missing:
            raise DataError(
                f"The states of lanes {missing[:8]} are not known on this rank. Seek with the `united` ones."
            )
        self._states = {str(lane): states[str(lane)] for lane in lanes}
        self.skipped = {int(lane): kept["skipped"] for lane, kept in self._states.items()}
        self._position = DataPosition(position.epoch, position.samples, steps * self._accumulation)

    def united(self, rank_states: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
        known = [state for state in rank_states if state is not None and "lanes" in state]
        if not known:
            return None
        return known[0] | {"lanes": {lane: kept for state in known for lane, kept in state["lanes"].items()}}

    def numbers_at(self, position: DataPosition) -> Mapping[str, float]:
        return {f"data/lane_{lane}/skipped": float(count) for lane, count in self.skipped.items() if count}

    def next_window(self) -> Window | None:
        position = self._position
        step = position.samples // self._plan.global_batch
        try:
            batches, marks, end = self._load(step)
        except BaseException:
            # A window that was not loaded whole, for any reason including a signal, does not count: it is loaded again.
            self.close()
            raise
        if end is not None:
            logger.warning("The pass over the training data ends after %d steps: %s", step, end)
            self._begin(position.epoch + 1)
            refuse(step == 0, f"The training data has not one whole step of all lanes: {end}", DataError)
            return None
        begun = {str(mark.lane): pickle.loads(mark.begun) for mark in marks if mark.begun is not None}
        self._states = self._states | begun if begun else self._states
        for mark in marks:
            self.skipped[mark.lane] = mark.skipped
            for report in mark.reports:
                logger.warning("skipped %s (lane %d has skipped %d)", report, mark.lane, mark.skipped)
        samples = position.samples + self._plan.global_batch
        self._position = DataPosition(position.epoch, samples, position.batches + self._accumulation)
        state = {"stream": self.facts, "lanes": self._states}
        is_last = False if self._loader.repeat else None
        sizes = [self._loader.batch_size] * len(batches)
        return Window(len(batches), batches, self._plan.global_batch, self._position, state, False, is_last, sizes)

    def end_pass(self) -> None:
        if self._position.samples:
            self._begin(self._position.epoch + 1)

    def _begin(self, epoch: int) -> None:
        self.close()
        self._position = DataPosition(epoch, 0, 0)
        self._states = {}

    def close(self) -> None:
        for reader in self._readers or ():
            close(reader)
            shutdown_workers(reader)
        self._readers = None

    def _load(self, step: int) -> tuple[list[Any], list[Mark], str | None]:
        if self._readers is None:
            self._readers = self._open(step)
        batches: list[Any] = []
        told: list[Mark] = []
        turn, num_chains = step % self._plan.turns, len(self._chains) // self._plan.turns
        of_turn = [*range(turn * num_chains, (turn + 1) * num_chains)]
        with preserved_random_state() if self._loader.num_workers == 0 else nullcontext():
            for chain in of_turn * (self._accumulation // num_chains):
                loaded = next(self._readers[chain % len(self._readers)])
                if isinstance(loaded, str):
                    return [], [], loaded
                batches.append(loaded[0])
                told += loaded[1]
        return batches, told, None

    def _open(self, step: int) -> list[Iterator[Loaded]]:
        """An iterator for each worker, which loads some chains, or for the training process."""
        loader, epoch, readers = self._loader, self._position.epoch, list[Iterator[Loaded]]()
        count = min(max(1, loader.num_workers), len(self._chains))
        for number in range(count):
            chains = self._chains[number::count]
            batches = LaneBatches(loader, self._plan, chains, self._seed, step, epoch, self._states)
            if loader.num_workers == 0:
                readers.append(iter(batches))
                continue
            seed = hash_seed(b"workers", self._seed, epoch, step, self._dp_rank)
            generator = torch.Generator("cpu").manual_seed(seed)
            # A process for each reader, which can then load any lanes in any order.
            readers.append(started(worker_loader(batches, loader, generator, batch_size=None, num_workers=1)))
        return readers


class Mark(NamedTuple):
    # a batch's record of one lane
    lane: int
    begun: bytes | None
    skipped: int
    reports: list[str]


# A batch and what it tells of its lanes; at a pass's end, why it is the end
Loaded = tuple[Any, list[Mark]] | str


@dataclass(eq=False, repr=False)
class LaneBatches(IterableDataset[Loaded]):
    """The batches that one reader loads, in a worker or in the training process: those of its chains, step by step."""

    loader: StreamLoader
    plan: LanePlan
    chains: Sequence[range]
    seed: int
    first_step: int
    epoch: int
    states: Mapping[str, Any]  # of lanes that were read before

    def __iter__(self) -> Iterator[Loaded]:
        refuse_forgetful(self.loader.source, self.plan.shards(self.chains[0][0])[0])
        lanes = {}
        for number in (number for chain in self.chains for number in chain):
            start = LaneState(**self.states.get(str(number), {"epoch": self.epoch}))
            consumed = self.plan.consumed(number, self.first_step)
            lanes[number] = Lane(self.loader, self.plan, number, seed=self.seed, start=start, consumed=consumed)
        try:
            yield from self._batches(lanes)
        finally:
            for lane in lanes.values():
                lane.close()

    def _batches(self, lanes: Mapping[int, Lane]) -> Iterator[Loaded]:
        per_lane, size, collate = self.plan.per_lane, self.loader.batch_size, self.loader.collate_fn or default_collate
        num_batches = len(self.chains[0]) * per_lane // size  # of one chain in one step
        for step in count(self.first_step):
            of_turn = [chain for chain in self.chains if chain[0] // self.plan.lanes == step % self.plan.turns]
            for batch, chain in product(range(num_batches), of_turn):
                places = range(batch * size, (batch + 1) * size)
                numbers = [chain[place // per_lane] for place in places]
                samples = []
                for place, number in zip(places, numbers, strict=True):
                    try:
                        samples.append(next(lanes[number].samples))
                    except StopIteration:
                        yield (
                            f"lane {number} has {place % per_lane} of the {per_lane} samples that a step takes from "
                            "each lane. They, and the rest of the other lanes, are not read in this pass."
                        )
                        return
                if not collates_without_draws(collate):
                    seed_cpu(hash_seed(b"collate", self.seed, step, numbers[0], batch))
                yield collate(samples), _marks(lanes, dict.fromkeys(numbers))


def _marks(lanes: Mapping[int, Lane], numbers: Iterable[int]) -> list[Mark]:
    marks = []
    for number in numbers:
        lane = lanes[number]
        if lane.begun is not None or lane.calls.reports:
            marks.append(Mark(number, lane.begun, lane.calls.skipped, lane.calls.reports[:]))
            lane.begun = None
            lane.calls.reports.clear()
    return marks
