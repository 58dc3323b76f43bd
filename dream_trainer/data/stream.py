"""What the training loop pulls from: one accumulation window after the other, each with the position that follows it.

    loader --train_stream--> TrainStream --next_window--> Window(batches, end) ... None (the pass is over) ... Window
    ...

A window never straddles two passes over the data, and a pass pulls no batch that it does not train. A position is what
is saved: where a window ends, not where workers have read ahead to.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dream_trainer.data.foreign import StatefulLoader, iterate, known_length, set_epoch
from dream_trainer.data.loader import DistributedDataLoader, ShardReader, foreign_iterable, loader_batch_size, rebuild
from dream_trainer.data.sampler import Sharding, end_with_tail, end_without_tail
from dream_trainer.data.validation import validation_batches
from dream_trainer.distributed.seeds import preserved_random_state
from dream_trainer.errors import DataError

__all__ = ["DataPosition", "TrainStream", "Window", "loader_batch_size", "train_stream", "validation_batches"]

logger = logging.getLogger("dream_trainer")


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Where training is in the data."""

    epoch: int
    """Number of the pass over the data, from 0."""
    samples: int
    """Samples of this pass that all ranks consumed together; 0 for loaders that are not ours."""
    batches: int
    """Batches of this pass that this rank consumed."""


@dataclass(slots=True)
class Window:
    """The micro-batches of one optimizer step."""

    size: int
    """Number of micro-batches."""
    batches: Iterable[Any]
    """Exactly `size` batches; from our own loader they are loaded as they are iterated, and have to be before the next
    window is."""
    samples: int | None
    """Samples of all ranks together, or None where only counting them would tell."""
    end: DataPosition
    """The position after this window."""
    rank_state: dict[str, Any] | None
    """What `TrainStream.seek` needs besides `end`: the state of a loader that keeps its own, as it was after this
    window."""
    is_uneven: bool
    """Whether ranks or micro-batches hold different numbers of samples, so that only `weight=` makes each sample count
    alike."""
    is_last: bool | None
    """Whether this is the last window of its pass; None where only looking for the next one would tell."""


class TrainStream(ABC):
    """The training data of one rank, window by window."""

    steps_per_epoch: int | None
    """Windows in one whole pass; None if the loader does not know its length."""
    is_even: bool
    """Whether every rank gets windows of the same number of micro-batches, and equally many, by construction."""

    @abstractmethod
    def seek(self, position: DataPosition, rank_state: dict[str, Any] | None) -> None:
        """Goes on after `position`.

        Args:
            position: A window's `end`, from a run with any world size and accumulation if the loader is ours.
            rank_state: The same window's `rank_state` on this rank; None if it had none or the world size changed.
        """

    @abstractmethod
    def next_window(self) -> Window | None:
        """The next window; None if this pass is over, and the call after that begins the next pass.

        Raises:
            DataError: A pass came out empty, on a single data-parallel rank.
        """

    def indices(self, epoch: int, first: int, end: int) -> list[list[int]] | None:
        """This rank's batches of positions `first` to `end` of a pass, each as its samples' indices in the dataset;
        None if the loader alone knows."""
        return None

    @abstractmethod
    def end_pass(self) -> None:
        """Leaves out what is left of this pass; the next window is the first of the next one. No effect between
        passes."""

    @abstractmethod
    def close(self) -> None:
        """Ends worker processes. The stream may be used again after `seek`."""


def train_stream(loader: object, *, accumulation: int, dp_rank: int, dp_size: int, seed: int) -> TrainStream:
    """The stream over any loader that a user may return from `configure_dataloaders`.

    Args:
        loader: A DistributedDataLoader, a PerRankLoader, a torch `DataLoader` or any iterable of batches.
        accumulation: Micro-batches in a whole window.
        dp_rank: This rank among the data-parallel ones.
        dp_size: Number of data-parallel ranks.
        seed: The run's seed.

    Raises:
        DataError: The data is empty or too small for one window, or cannot be dealt to `dp_size` ranks.
    """
    own = loader if isinstance(loader, DistributedDataLoader) else rebuild(loader)
    if own is None:
        source = foreign_iterable(loader, dp_size)
        return ForeignStream(source, accumulation=accumulation, dp_rank=dp_rank, dp_size=dp_size, seed=seed)
    # A plain loader's user did not ask for ragged shards, which would train wrong without `weight=`.
    drop_last = own.drop_last or (dp_size > 1 and own is not loader)
    sharding = Sharding(own.batch_size, dp_rank, dp_size)
    stream = ShardStream(own, sharding, accumulation=accumulation, seed=seed, drop_last=drop_last)
    if dp_rank == 0 and not own.drop_last and stream.dropped_samples:
        reason = "they do not fill a global batch" if drop_last else "they are fewer than the data-parallel ranks"
        advice = (
            " Use DistributedDataLoader(drop_last=False) and `weight=` in `backward` to train them."
            if drop_last
            else ""
        )
        logger.warning("The last %d samples of each epoch are dropped: %s.%s", stream.dropped_samples, reason, advice)
    return stream


class ShardStream(TrainStream):
    """One rank's share of a DistributedDataLoader. All positions are arithmetic, so every rank knows every other's
    windows.

    Args:
        loader: What to load and how.
        sharding: This rank's part of each chunk.
        accumulation: Micro-batches in a whole window.
        seed: The run's seed.
        drop_last: Whether samples that do not fill a global batch are dropped.
    """

    is_even = True

    def __init__(
        self, loader: DistributedDataLoader, sharding: Sharding, *, accumulation: int, seed: int, drop_last: bool
    ) -> None:
        self._length = len(loader.dataset)
        self._sharding = sharding
        self._global_batch_size = sharding.chunk_size * accumulation
        self._drop_last = drop_last
        self._end = self._pass_end(0)
        if self._end == 0:
            raise self._too_small()
        self.steps_per_epoch = -(-self._end // self._global_batch_size)
        self.dropped_samples = self._length - self._end
        self._reader = ShardReader(loader, sharding, seed=seed, shuffle=loader.shuffle)
        self._iterator: Iterator[Any] | None = None
        self._position = DataPosition(0, 0, 0)

    def seek(self, position: DataPosition, rank_state: dict[str, Any] | None) -> None:
        batches = -(
            -position.samples // self._sharding.chunk_size
        )  # in this layout, whatever it was where it was saved
        self._begin(DataPosition(position.epoch, position.samples, batches))

    def next_window(self) -> Window | None:
        position = self._position
        samples = min(self._global_batch_size, self._end - position.samples)
        if samples <= 0:
            self._begin(DataPosition(position.epoch + 1, 0, 0))
            return None
        if self._iterator is None:
            self._iterator = self._reader.batches(position.epoch, position.samples, self._end)
        size, last_chunk = divmod(samples, self._sharding.chunk_size)
        is_uneven = False
        if last_chunk:
            size += 1
            is_uneven = self._sharding.dp_size > 1 and (size > 1 or last_chunk % self._sharding.dp_size > 0)
        self._position = DataPosition(position.epoch, position.samples + samples, position.batches + size)
        is_last = self._position.samples >= self._end
        return Window(size, islice(self._iterator, size), samples, self._position, None, is_uneven, is_last)

    def indices(self, epoch: int, first: int, end: int) -> list[list[int]]:
        return self._reader.sampler.indices(epoch, first, end)

    def end_pass(self) -> None:
        if self._position.samples:
            self._begin(DataPosition(self._position.epoch + 1, 0, 0))

    def close(self) -> None:
        self._iterator = None
        self._reader.close()

    def _begin(self, position: DataPosition) -> None:
        self._iterator = None
        self._reader.release()
        self._position = position
        self._end = self._pass_end(position.samples)

    def _pass_end(self, consumed: int) -> int:
        if self._drop_last:
            return end_without_tail(self._length, consumed, self._global_batch_size)
        return end_with_tail(self._length, consumed, self._sharding)

    def _too_small(self) -> DataError:
        batch_size, dp_size = self._sharding.batch_size, self._sharding.dp_size
        if not self._drop_last:
            return DataError(
                f"The training dataset has {self._length} samples, fewer than dp_size={dp_size} data-parallel ranks. "
                "Use fewer ranks."
            )
        accumulation = self._global_batch_size // self._sharding.chunk_size
        return DataError(
            f"The training dataset has {self._length} samples, fewer than one global batch of "
            f"{self._global_batch_size} (batch_size={batch_size} x dp_size={dp_size} x accumulation={accumulation}), "
            "and incomplete global batches are dropped. Lower one of the three, or use "
            "DistributedDataLoader(drop_last=False)."
        )


class ForeignStream(TrainStream):
    """A loader that is not ours, in its own order.

    A window is fetched whole, since only fetching tells whether the loader's end cuts it short. The end is looked for
    once.

    Args:
        source: An iterable of this rank's batches.
        accumulation: Micro-batches in a whole window.
        dp_rank: This rank among the data-parallel ones.
        dp_size: Number of data-parallel ranks.
        seed: The run's seed.
    """

    def __init__(self, source: Iterable[Any], *, accumulation: int, dp_rank: int, dp_size: int, seed: int) -> None:
        length = known_length(source)
        if length == 0 and dp_size == 1:
            raise DataError(
                f"The training loader ({type(source).__name__}) has 0 batches. Check its dataset, batch_size and "
                "drop_last."
            )
        self.steps_per_epoch = None if length is None else -(-length // accumulation)
        self.is_even = dp_size == 1
        self._source = source
        self._stateful = source if isinstance(source, StatefulLoader) else None
        self._accumulation = accumulation
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._seed = seed
        self._position = DataPosition(0, 0, 0)
        self._iterator: Iterator[Any] | None = None
        self._is_exhausted = False
        self._was_read = False

    def seek(self, position: DataPosition, rank_state: dict[str, Any] | None) -> None:
        if self._was_read and isinstance(self._source, Iterator):
            raise DataError(
                f"The training loader is of type {type(self._source).__name__}, an iterator that was read already and "
                "cannot go back. Give an object whose `__iter__` begins anew."
            )
        self._iterator = None
        self._is_exhausted = False
        self._position = position
        if rank_state is not None and self._stateful is not None:
            self._is_exhausted = rank_state["is_exhausted"]
            with preserved_random_state():
                self._stateful.load_state_dict(rank_state["loader"])
                if self._is_exhausted:
                    # StatefulDataLoader applies its state only when asked for something. Asked by the next pass, it
                    # would draw that pass's order behind the finished one's, and so another order than without the
                    # interruption.
                    self._stateful.state_dict()
        elif position.batches:
            self._replay(position)

    def next_window(self) -> Window | None:
        epoch = self._position.epoch
        if not self._is_exhausted:
            if self._iterator is None:
                self._iterator = self._open(self._position.batches)
            batches = list(islice(self._iterator, self._accumulation))
            size = len(batches)
            self._is_exhausted = size < self._accumulation
            if size:
                self._position = end = DataPosition(epoch, 0, self._position.batches + size)
                return Window(size, batches, None, end, self._rank_state(), False, None)
        if self._position.batches == 0 and self._dp_size == 1:
            raise self._empty_pass()
        self._begin_pass(epoch + 1)
        return None

    def end_pass(self) -> None:
        if self._position.batches:
            if self._iterator is None and not self._is_exhausted:
                # A state was loaded and nothing read since. It may be of a pass whose end had not been looked for yet,
                # and a loader keeps it until it is read: the next pass would begin at this one's end.
                with preserved_random_state():
                    next(self._open(self._position.batches), None)
            self._begin_pass(self._position.epoch + 1)

    def close(self) -> None:
        # Workers that outlive an iterator belong to the loader, and that to the user.
        self._iterator = None

    def _begin_pass(self, epoch: int) -> None:
        self._iterator = None
        self._is_exhausted = False
        self._position = DataPosition(epoch, 0, 0)

    def _open(self, first: int) -> Iterator[Any]:
        self._was_read = True
        epoch = self._position.epoch
        set_epoch(self._source, epoch)
        return iterate(self._source, seed=self._seed, epoch=epoch, dp_rank=self._dp_rank, first=first)

    def _replay(self, position: DataPosition) -> None:
        if self._dp_rank == 0:
            logger.warning(
                "Resuming reads %d batches again to get past them, since %s cannot resume by itself. A "
                "DistributedDataLoader starts "
                "anywhere at once, as does a loader with `state_dict` and `load_state_dict`.",
                position.batches,
                type(self._source).__name__,
            )
        with preserved_random_state():
            self._iterator = self._open(0)
            read = sum(1 for _ in islice(self._iterator, position.batches))
        self._is_exhausted = read < position.batches

    def _rank_state(self) -> dict[str, Any] | None:
        if self._stateful is None:
            return None
        # An exhausted loader's own state means "begin the next pass", which is not where a short last window ends.
        return {"loader": self._stateful.state_dict(), "is_exhausted": self._is_exhausted}

    def _empty_pass(self) -> DataError:
        name, epoch = type(self._source).__name__, self._position.epoch
        if isinstance(self._source, Iterator):
            return DataError(
                f"The training loader is of type {name}, an iterator that can be read once, and pass {epoch} over it "
                "found nothing. Give an object whose `__iter__` begins anew, e.g. a class with a generator method "
                "`__iter__`."
            )
        return DataError(
            f"The training loader ({name}) yielded no batch in pass {epoch}. Check its dataset, batch_size "
            "and drop_last."
        )
