"""The source of the training loop: one accumulation window after the other, each with the position that follows it. A
window never straddles two passes over the data, and a pass pulls no batch that it does not train."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from dream_trainer.compat.pytorch import end_workers
from dream_trainer.data.foreign import EpochAware, SeededPass, StatefulLoader, keeps_what_it_draws, set_epoch
from dream_trainer.data.lane_stream import LaneStream, StreamLoader
from dream_trainer.data.loader import DistributedDataLoader, ShardReader, foreign_iterable, loader_batch_size, rebuild
from dream_trainer.data.loader_groups import (
    GroupStream,
    LoaderGroup,
    count_of_one,
    naming_loader,
    refuse_state_of_group,
)
from dream_trainer.data.sample_count import SampleCount
from dream_trainer.data.sampler import ENDLESS, VALIDATION_EPOCH, OrderedDataset, Sharding
from dream_trainer.data.window import DataPosition, SavedState, TrainStream, Window
from dream_trainer.data.worker_start import workers_start
from dream_trainer.distributed.seeds import GENERATORS, hash_seed, preserved_random_state
from dream_trainer.errors import DataError
from dream_trainer.screen import logger


@dataclass(eq=False, repr=False)
class ForeignStream(TrainStream):
    """A foreign loader. Windows are fetched whole, since its end may cut one short."""

    source: Iterable[Any]
    _: KW_ONLY
    accumulation: int
    dp_rank: int
    dp_size: int
    seed: int
    count: SampleCount | None = None
    keeps_state: bool = True
    whole_windows: bool = False

    def __post_init__(self) -> None:
        try:
            length = len(self.source)  # type: ignore[arg-type]
        except TypeError:  # also of a DataLoader, which has __len__ even over a dataset that has none
            length = None
        least = self.accumulation if self.whole_windows else int(self.dp_size == 1)
        if length is not None and length < least:
            name = type(self.source).__name__
            raise DataError(f"The training loader ({name}) has {length} batches, fewer than one step of {least}.")
        steps = None if length is None else divmod(length, self.accumulation)
        self.steps_per_epoch = None if steps is None else steps[0] + (steps[1] > 0 and not self.whole_windows)
        self.is_even = self.dp_size == 1
        self._stateful = self.source if isinstance(self.source, StatefulLoader) else None
        self._batch_size = loader_batch_size(self.source)
        self._position = DataPosition(0, 0, 0)
        self._samples = 0  # of this rank in this pass
        self._iterator: SeededPass | None = None
        self._draws: bool | None = None
        self._drawn: Iterable[str] = ()
        self._is_exhausted = False
        # Whether the state of a finished pass was loaded. Some loaders begin the next pass from that state; others
        # must be read to their end before they begin again.
        self._holds_end = False
        self._was_read = False

    def seek(self, position: DataPosition, rank_state: SavedState, *, is_pass_over: bool, state: SavedState) -> None:
        refuse_state_of_group(state)
        if self._was_read and isinstance(self.source, Iterator):
            raise DataError(
                f"The training loader is of type {type(self.source).__name__}, an iterator that was read already and "
                "cannot be restarted. Give an object whose `__iter__` begins again."
            )
        if self._was_read and self._stateful is not None and not self.keeps_state:
            raise DataError(
                f"The training loader ({type(self.source).__name__}) was interrupted, and its state is kept only "
                "where checkpoints are saved. Build a new trainer, or add CheckpointMixin."
            )
        self._iterator = None
        self._holds_end = False
        self._position = position
        if rank_state is not None:
            self._draws = rank_state.get("draws", self._draws)
            self._drawn = rank_state.get("drawn", GENERATORS)
        if rank_state is not None and self._stateful is not None and self._resumes_by(rank_state):
            self._load(self._stateful, rank_state)
        elif is_pass_over:
            self._begin_pass(position.epoch + 1)
            return
        elif position.batches:
            self._read_again(position, rank_state)
        if is_pass_over:
            self.end_pass()

    def next_window(self) -> Window | None:
        epoch = self._position.epoch
        if not self._is_exhausted:
            iterator = self._iterator = self._iterator or self._open(self._position.batches)
            batches = iterator.take(self.accumulation)
            if not batches and self._holds_end:
                iterator = self._iterator = self._open(0)
                batches = iterator.take(self.accumulation)
            self._holds_end = False
            size = len(batches)
            self._is_exhausted = size < self.accumulation
            if size and not (self._is_exhausted and self.whole_windows):
                self._position = end = DataPosition(epoch, 0, self._position.batches + size)
                sizes = None if self.count is None else [self.count(batch, self._batch_size) for batch in batches]
                self._samples += sum(sizes or ())
                return Window(size, batches, None, end, self._rank_state(), False, None, sizes)
        if self._position.batches == 0 and self.dp_size == 1:
            name = type(self.source).__name__
            once = " It is an iterator, which can be read once: give an object whose `__iter__` begins again."
            raise DataError(
                f"The training loader ({name}) yielded no batch in pass {epoch}. Check its dataset, batch_size and "
                f"drop_last.{once if isinstance(self.source, Iterator) else ''}"
            )
        self._begin_pass(epoch + 1)
        return None

    def end_pass(self) -> None:
        if self._position.batches:
            if self._iterator is None and not self._is_exhausted:
                # A state was loaded and nothing read since. It may be from a pass whose end was not reached yet. The
                # loader keeps the state until it is read, so the next pass would begin at this one's end.
                with preserved_random_state():
                    self._open(self._position.batches).take(1)
            self._begin_pass(self._position.epoch + 1)

    def close(self) -> None:
        if self._iterator is not None:
            self._iterator.close()
        self._iterator = None
        end_workers(self.source)

    def _begin_pass(self, epoch: int) -> None:
        self._iterator = None
        self._is_exhausted = False
        self._samples = 0
        self._position = DataPosition(epoch, 0, 0)

    def _open(self, first: int) -> SeededPass:
        self._was_read = True
        epoch = self._position.epoch
        set_epoch(self.source, epoch)
        return SeededPass(
            self.source,
            seed=self.seed,
            epoch=epoch,
            dp_rank=self.dp_rank,
            first=first,
            draws=True if self._stateful is None else self._draws,  # also True if the answer is not needed
            drawn=self._drawn if first else (),
        )

    # -- the loader's own state

    def _rank_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "samples": self._samples,
            "batch_size": self._batch_size,
            "is_exhausted": self._is_exhausted,
        }
        if self._stateful is not None and self.keeps_state:
            if self._iterator is not None:
                self._draws, self._drawn = self._iterator.draws, self._iterator.drawn
            # A copy: the loader may keep changing the returned state, and the next window is read ahead.
            # An exhausted loader's own state means "begin the next pass", which is not the end of a short last window.
            loader = copy.deepcopy(self._stateful.state_dict())
            state |= {"loader": loader, "draws": self._draws, "drawn": self._drawn}
        return state

    def _resumes_by(self, rank_state: dict[str, Any]) -> bool:
        """Whether the loader's own state brings it back exactly; if not it is read again."""
        return (
            rank_state.get("loader") is not None
            and rank_state.get("batch_size", self._batch_size) == self._batch_size
            and keeps_what_it_draws(self.source, draws=self._draws)
        )

    def _load(self, loader: StatefulLoader, rank_state: dict[str, Any]) -> None:
        self._is_exhausted = self._holds_end = rank_state["is_exhausted"]
        self._samples = rank_state.get("samples", 0)
        with preserved_random_state(), workers_start(loader):
            loader.load_state_dict(copy.deepcopy(rank_state["loader"]))
            if self._is_exhausted:
                # StatefulDataLoader applies its state only when asked for something. Asked by the next pass, it would
                # draw that pass's order behind the finished one's, and so another order than without the interruption.
                loader.state_dict()

    # -- without it

    def _read_again(self, position: DataPosition, rank_state: dict[str, Any] | None) -> None:
        samples: int | None = None  # to read, or None where they are not counted
        if self.count is not None and rank_state is not None:
            samples = rank_state.get("samples") or None
        elif self.count is not None:
            share, rest = divmod(position.samples, self.dp_size)
            if rest:
                raise DataError(
                    f"The run resumes after {position.samples} samples of a pass over {type(self.source).__name__}, "
                    f"which dp_size={self.dp_size} data-parallel ranks cannot divide evenly. Resume on the former "
                    "number of ranks, or use a DistributedDataLoader."
                )
            samples = share or None
        self._begin_pass(position.epoch)
        if self.dp_rank == 0:
            logger.warning(
                "Resuming reads %s again to get past them, since %s has no state of its position and random draws for "
                "this number of ranks and batch size. A DistributedDataLoader starts anywhere at once.",
                f"{position.batches} batches" if samples is None else f"{samples} samples",
                type(self.source).__name__,
            )
        batches = 0
        with preserved_random_state():
            self._iterator = self._open(0)
            while batches < position.batches if samples is None else self._samples < samples:
                read = self._iterator.take(1)
                if not read:
                    break
                batches += 1
                self._samples += 0 if self.count is None else self.count(read[0], self._batch_size)
        self._is_exhausted = batches < position.batches if samples is None else self._samples < samples
        if samples is not None and self._samples != samples:
            raise DataError(
                f"The run resumes after {samples} samples of this pass, where no batch of the training loader "
                f"({type(self.source).__name__}) begins: its batches so far have {self._samples}. Give it the data "
                "and batch size it had, or use a DistributedDataLoader."
            )
        if rank_state is not None and samples is not None:
            self._is_exhausted = rank_state["is_exhausted"]
        self._position = DataPosition(position.epoch, 0, batches)


def train_stream(
    loader: object,
    *,
    accumulation: int,
    dp_rank: int,
    dp_size: int,
    seed: int,
    batch_size: SampleCount | None = None,
    keeps_state: bool = True,
) -> TrainStream:
    """The stream over any loader, group or dict of loaders that a user may return from `configure_dataloaders`.

    `accumulation` is the micro-batches in a whole window; `batch_size` counts samples of batches that are not ours.
    """

    def open_one(loader: object, seed: int, count: SampleCount | None, name: str | None = None) -> TrainStream:
        """The stream over one loader. With the `name` it has in a group, it has whole windows only."""
        if isinstance(loader, StreamLoader):
            return LaneStream(loader, accumulation=accumulation, dp_rank=dp_rank, dp_size=dp_size, seed=seed)
        ours = loader if isinstance(loader, DistributedDataLoader) else rebuild(loader)
        if ours is None:
            return ForeignStream(
                foreign_iterable(loader, dp_size),
                accumulation=accumulation,
                dp_rank=dp_rank,
                dp_size=dp_size,
                seed=seed,
                count=count,
                keeps_state=keeps_state,
                whole_windows=name is not None,
            )
        # A plain loader's user did not ask for ragged shards, which would train wrong without `weight=`.
        drop_last = ours.drop_last or (dp_size > 1 and ours is not loader) or name is not None
        sharding = Sharding(ours.batch_size, dp_rank, dp_size)
        stream = ShardStream(ours, sharding, accumulation=accumulation, seed=seed, drop_last=drop_last)
        if dp_rank == 0 and not ours.drop_last and stream.dropped_samples:
            logger.warning(
                "The last %d samples of each epoch%s are dropped. Outside of a group, DistributedDataLoader with "
                "drop_last=False, and `weight=` in `backward`, trains all but fewer than dp_size.",
                stream.dropped_samples,
                "" if name is None else f" of the training loader {name!r}",
            )
        return stream

    if isinstance(loader, Mapping):
        loader = LoaderGroup(loader)
    if not isinstance(loader, LoaderGroup):
        return open_one(loader, seed, batch_size)
    streams = {}
    for name, one in loader.loaders.items():
        own_seed = hash_seed(b"loader" + name.encode(), seed)  # otherwise loaders of one length would have one order
        with naming_loader(name):
            streams[name] = open_one(one, own_seed, count_of_one(loader, name, batch_size), name)
    return GroupStream(loader, streams, accumulation)


class ShardStream(TrainStream):
    """One rank's share of a DistributedDataLoader; positions are arithmetic, so a rank knows every other's windows."""

    is_even = True
    reader: ShardReader
    global_batch_size: int

    def __init__(
        self, loader: DistributedDataLoader, sharding: Sharding, *, accumulation: int, seed: int, drop_last: bool
    ) -> None:
        self._sharding = sharding
        self.global_batch_size = sharding.chunk_size * accumulation
        self._drop_last = drop_last
        self.reader = ShardReader(loader, sharding, seed=seed, shuffle=loader.shuffle)
        self._position = DataPosition(0, 0, 0)
        self._state: dict[str, Any] | None = None
        self._ended: DataPosition | None = None  # where the pass before ended, until something of this one is read
        self._state_before: dict[str, Any] | None = None
        self._numbers_before: Mapping[str, float] = {}
        self._measure()
        self.steps_per_epoch = None if self.length == ENDLESS else -(-self._end // self.global_batch_size)
        self.dropped_samples = self.length - self._end

    @property
    def length(self) -> int:
        return self.reader.sampler.length

    def seek(self, position: DataPosition, rank_state: SavedState, *, is_pass_over: bool, state: SavedState) -> None:
        refuse_state_of_group(state)
        is_ordered, name = self.reader.ordered is not None, type(self.reader.loader.dataset).__name__
        if (is_ordered and state is None and position.samples) or (not is_ordered and state is not None):
            raise DataError(
                f"The checkpoint's data and the dataset ({name}) are of two kinds: only one decides its order itself. "
                "Give it what it had, or start a new run from the checkpoint's weights."
            )
        if is_pass_over:
            self.reader.begin(position.epoch, state)
            self._begin(DataPosition(position.epoch + 1, 0, 0), ended=position)
            return
        # In this layout, whatever it was where it was saved.
        batches = -(-position.samples // self._sharding.chunk_size)
        self._begin(DataPosition(position.epoch, position.samples, batches, position.length))
        self._state = state

    def numbers_at(self, position: DataPosition) -> Mapping[str, float]:
        if self.reader.ordered is None:
            return {}
        if position.epoch != self._position.epoch and self._ended is None:
            return self._numbers_before
        return self.reader.ordered.numbers_at(position.samples, self.reader.newest_mark(position.samples))

    def state_at(self, position: DataPosition) -> dict[str, Any] | None:
        if self.reader.ordered is None:
            return None
        if position.epoch != self._position.epoch and self._ended is None:
            return self._state_before
        if position.epoch == self._position.epoch and not self.reader.is_started and self._state is not None:
            return self._state
        return self.reader.ordered.state_at(position.samples, self.reader.newest_mark(position.samples))

    def next_window(self) -> Window | None:
        position = self._position
        if self.reader.ordered is not None:
            self._look_for_changes(self.reader.ordered)
        if not self.reader.is_started:
            self._measure()
            self.reader.start(position.epoch, position.samples, self._end)
        samples = min(self.global_batch_size, self._end - position.samples)
        if samples <= 0:
            self._next_pass()
            return None
        sharding = self._sharding
        size, last_chunk = divmod(samples, sharding.chunk_size)
        sizes, is_uneven = [sharding.batch_size] * size, False
        if last_chunk:
            sizes.append(sharding.samples_in(size, samples))
            size += 1
            is_uneven = sharding.dp_size > 1 and (size > 1 or last_chunk % sharding.dp_size > 0)
        self._position = DataPosition(position.epoch, position.samples + samples, position.batches + size, self.length)
        is_last = self._position.samples >= self._end
        return Window(size, self.reader.take(size), samples, self._position, None, is_uneven, is_last, sizes)

    def _look_for_changes(self, ordered: OrderedDataset) -> None:
        samples, reader = self._position.samples, self.reader
        if reader.is_started:
            reader.forget_marks_before(samples)
        else:
            if self._ended is not None:
                self._state_before, self._numbers_before = self.state_at(self._ended), self.numbers_at(self._ended)
                self._ended = None
            self._measure()  # a state that it begins with may say that a change was asked for
        if ordered.may_change and ordered.changes_at(samples, reader.newest_mark(samples)):
            self._state = ordered.state_at(samples, reader.newest_mark(samples))
            reader.release()

    def end_pass(self) -> None:
        if self._position.samples:
            self._next_pass()

    def close(self) -> None:
        self.reader.close()

    def _next_pass(self) -> None:
        self._begin(DataPosition(self._position.epoch + 1, 0, 0), ended=self._position)

    def _begin(self, position: DataPosition, *, ended: DataPosition | None = None) -> None:
        self.reader.release()
        self._position, self._ended, self._state = position, ended, None

    def _measure(self) -> None:
        """Looks how long the dataset is in this pass, before anything of it is read: it may change between two."""
        position, dataset = self._position, self.reader.loader.dataset
        if isinstance(dataset, OrderedDataset):  # checks itself whether it can resume there
            self.reader.begin(position.epoch, self._state)
        else:
            if isinstance(dataset, EpochAware):
                dataset.set_epoch(position.epoch)
            length = len(self.reader.loader.dataset)
            if position.samples and position.length not in (None, length):
                raise DataError(
                    f"The run resumes in the middle of a pass over {position.length} training samples, and the dataset "
                    f"now has {length}. Give it the {position.length} it had, or resume from the end of a pass. "
                    "A dataset that changes must do so in its `set_epoch`, or in `pre_epoch` from `current_epoch`."
                )
            if length != self.length or isinstance(dataset, EpochAware):
                self.reader.dataset_changed()
        length, sharding = self.length, self._sharding
        rest = (length - position.samples) % (self.global_batch_size if self._drop_last else sharding.chunk_size)
        # A last chunk that is kept is trained if it has a sample for each rank.
        is_whole = length == ENDLESS or (not self._drop_last and rest >= sharding.dp_size)
        self._end = length if is_whole else length - rest
        if self._end == 0:
            least = f"dp_size={sharding.dp_size}. Use fewer ranks."
            if self._drop_last:
                least = (
                    f"one global batch of {self.global_batch_size} (batch_size={sharding.batch_size} x "
                    f"dp_size={sharding.dp_size} x accumulation={self.global_batch_size // sharding.chunk_size}). "
                    "Lower one of the three, or use DistributedDataLoader(drop_last=False)."
                )
            raise DataError(f"The training dataset has {length} samples, fewer than {least}")


# -- Validation: every sample once over all ranks, in the dataset's order, the same each time.


def validation_batches(loader: object, *, dp_rank: int, dp_size: int, seed: int) -> ValidationBatches:
    """The validation batches of one rank from any loader that a user may return from `configure_dataloaders`. Our and
    plain ones are read whole and in the dataset's order, regardless of their `shuffle` and `drop_last`. Ranks may
    differ by a sample in their last batch, and some have one batch less, or none."""
    distributed_loader = loader if isinstance(loader, DistributedDataLoader) else rebuild(loader)
    if distributed_loader is not None:
        return ShardValidation(distributed_loader, Sharding(distributed_loader.batch_size, dp_rank, dp_size), seed)
    source = foreign_iterable(loader, dp_size)
    if isinstance(source, Iterator):
        name = type(source).__name__
        raise DataError(f"The validation loader ({name}) can be read once. Give one whose `__iter__` begins again.")
    return ForeignValidation(source, dp_rank, seed)


class ShardValidation:
    """This rank's part of our loader's batches."""

    batch_size = None  # of a full batch: not needed

    def __init__(self, loader: DistributedDataLoader, sharding: Sharding, seed: int) -> None:
        self._dataset = loader.dataset
        if len(loader.dataset) == ENDLESS:
            name = type(loader.dataset).__name__
            raise DataError(f"The validation dataset ({name}) never ends. Give it a length (Mixture(num_samples=...)).")
        self.reader = ShardReader(loader, sharding, seed=seed, shuffle=False)

    def __iter__(self) -> Iterator[Any]:
        self.reader.begin(0, None)
        length = len(self._dataset)  # data may have come since the last validation
        if length != self.reader.sampler.length:
            self.reader.dataset_changed()
        return self.reader.batches(VALIDATION_EPOCH, 0, length)

    def samples_in(self, number: int) -> int:
        """Samples in batch `number` of the running iteration."""
        return self.reader.sampler.sharding.samples_in(number, self.reader.sampler.length)

    def any_batch(self) -> Any:
        """A batch, for a rank that has none but must keep others company."""
        dataset = self.reader.keyed_dataset
        with dataset.apart:
            return dataset.load((VALIDATION_EPOCH, [0]))

    def close(self) -> None:
        self.reader.close()


class ForeignValidation:
    """The batches of a loader that is not ours, which does not say how many samples are in each."""

    reader = None

    def __init__(self, source: Iterable[Any], dp_rank: int, seed: int) -> None:
        self._source, self._dp_rank, self._seed = source, dp_rank, seed
        self.batch_size = loader_batch_size(source)

    def __iter__(self) -> Iterator[Any]:
        return iter(SeededPass(self._source, seed=self._seed, epoch=VALIDATION_EPOCH, dp_rank=self._dp_rank))

    def samples_in(self, number: int) -> None:
        return None

    def any_batch(self) -> Any | None:
        return next(iter(self), None)

    def close(self) -> None:
        end_workers(self._source)


ValidationBatches = ShardValidation | ForeignValidation  # each iteration starts from the beginning
