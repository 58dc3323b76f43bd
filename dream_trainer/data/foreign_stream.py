"""Training from a loader that is not ours, in its own order: its windows, and how it comes back to where it was."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from dream_trainer.compat.pytorch import end_workers
from dream_trainer.data.foreign import (
    SeededPass,
    StatefulLoader,
    iterate,
    keeps_what_it_draws,
    known_length,
    set_epoch,
    take,
    workers_outlive_signals,
)
from dream_trainer.data.loader import loader_batch_size
from dream_trainer.data.loader_groups.group_stream import refuse_state_of_group
from dream_trainer.data.sample_count import SampleCount
from dream_trainer.data.window import DataPosition, SavedState, TrainStream, Window
from dream_trainer.distributed.seeds import GENERATORS, preserved_random_state
from dream_trainer.errors import DataError
from dream_trainer.screen import logger

_END = object()


class ForeignStream(TrainStream):
    """A foreign loader. Windows are fetched whole, since its end may cut one short."""

    def __init__(
        self,
        source: Iterable[Any],
        *,
        accumulation: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
        count: SampleCount | None = None,
        keeps_state: bool = True,
        whole_windows: bool = False,
    ) -> None:
        length = known_length(source)
        least = accumulation if whole_windows else int(dp_size == 1)
        if length is not None and length < least:
            raise DataError(
                f"The training loader ({type(source).__name__}) has {length} batches in a pass, fewer than one step of "
                f"{least}. Check its dataset, batch_size and drop_last, or lower the accumulation."
            )
        steps = None if length is None else divmod(length, accumulation)
        self.steps_per_epoch = None if steps is None else steps[0] + (steps[1] > 0 and not whole_windows)
        self.is_even = dp_size == 1
        self._source = source
        self._stateful = source if isinstance(source, StatefulLoader) else None
        self._accumulation = accumulation
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._seed = seed
        self._count = count
        self._keeps_state = keeps_state
        self._whole_windows = whole_windows
        self._batch_size = loader_batch_size(source)
        self._position = DataPosition(0, 0, 0)
        self._samples = 0  # of this rank in this pass
        self._iterator: Iterator[Any] | None = None
        self._draws: bool | None = None
        self._drawn: Iterable[str] = ()
        self._is_exhausted = False
        # Whether the state of a finished pass was loaded. Some loaders begin the next pass from that state; others
        # must be read to their end before they begin again.
        self._holds_end = False
        self._was_read = False

    def seek(
        self, position: DataPosition, rank_state: SavedState, *, is_pass_over: bool = False, state: SavedState = None
    ) -> None:
        refuse_state_of_group(state)
        if self._was_read and isinstance(self._source, Iterator):
            raise DataError(
                f"The training loader is of type {type(self._source).__name__}, an iterator that was read already and "
                "cannot be restarted. Give an object whose `__iter__` begins again."
            )
        if self._was_read and self._stateful is not None and not self._keeps_state:
            raise DataError(
                f"The training loader ({type(self._source).__name__}) was interrupted, and its state is kept only "
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
            batches = take(iterator, self._accumulation)
            if not batches and self._holds_end:
                iterator = self._iterator = self._open(0)
                batches = take(iterator, self._accumulation)
            self._holds_end = False
            size = len(batches)
            self._is_exhausted = size < self._accumulation
            if size and not (self._is_exhausted and self._whole_windows):
                self._position = end = DataPosition(epoch, 0, self._position.batches + size)
                sizes = None if self._count is None else [self._count(batch, self._batch_size) for batch in batches]
                self._samples += sum(sizes or ())
                return Window(size, batches, None, end, self._rank_state(), False, None, sizes)
        if self._position.batches == 0 and self._dp_size == 1:
            raise self._empty_pass()
        self._begin_pass(epoch + 1)
        return None

    def end_pass(self) -> None:
        if self._position.batches:
            if self._iterator is None and not self._is_exhausted:
                # A state was loaded and nothing read since. It may be from a pass whose end was not reached yet. The
                # loader keeps the state until it is read, so the next pass would begin at this one's end.
                with preserved_random_state():
                    next(self._open(self._position.batches), None)
            self._begin_pass(self._position.epoch + 1)

    def close(self) -> None:
        if isinstance(self._iterator, SeededPass):
            self._iterator.close()
        self._iterator = None
        end_workers(self._source)

    def _begin_pass(self, epoch: int) -> None:
        self._iterator = None
        self._is_exhausted = False
        self._samples = 0
        self._position = DataPosition(epoch, 0, 0)

    def _open(self, first: int) -> Iterator[Any]:
        self._was_read = True
        epoch = self._position.epoch
        set_epoch(self._source, epoch)
        return iterate(
            self._source,
            seed=self._seed,
            epoch=epoch,
            dp_rank=self._dp_rank,
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
        if self._stateful is not None and self._keeps_state:
            if isinstance(self._iterator, SeededPass):
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
            and keeps_what_it_draws(self._source, draws=self._draws)
        )

    def _load(self, loader: StatefulLoader, rank_state: dict[str, Any]) -> None:
        self._is_exhausted = self._holds_end = rank_state["is_exhausted"]
        self._samples = rank_state.get("samples", 0)
        with preserved_random_state(), workers_outlive_signals(loader):
            loader.load_state_dict(copy.deepcopy(rank_state["loader"]))
            if self._is_exhausted:
                # StatefulDataLoader applies its state only when asked for something. Asked by the next pass, it would
                # draw that pass's order behind the finished one's, and so another order than without the interruption.
                loader.state_dict()

    # -- without it

    def _read_again(self, position: DataPosition, rank_state: dict[str, Any] | None) -> None:
        samples = self._samples_to_read(position, rank_state)
        self._begin_pass(position.epoch)
        self._say_what_is_read_again(position, samples)
        batches, batch = 0, _END
        with preserved_random_state():
            self._iterator = self._open(0)
            while batches < position.batches if samples is None else self._samples < samples:
                batch = next(self._iterator, _END)
                if batch is _END:
                    break
                batches += 1
                self._samples += 0 if self._count is None else self._count(batch, self._batch_size)
        self._is_exhausted = batches < position.batches if samples is None else self._samples < samples
        if samples is not None and self._samples != samples:
            raise self._cannot_read_up_to(samples, batch)
        if rank_state is not None and samples is not None:
            self._is_exhausted = rank_state["is_exhausted"]
        self._position = DataPosition(position.epoch, 0, batches)

    def _samples_to_read(self, position: DataPosition, rank_state: dict[str, Any] | None) -> int | None:
        if self._count is None:
            return None
        if rank_state is not None:
            return rank_state.get("samples") or None
        share, rest = divmod(position.samples, self._dp_size)
        if rest:
            raise DataError(
                f"The run resumes in the middle of a pass, after {position.samples} samples of all ranks, which "
                f"dp_size={self._dp_size} data-parallel ranks cannot divide evenly, and only "
                f"{type(self._source).__name__} knows which they were. Resume on the former number of ranks, or use a "
                "DistributedDataLoader."
            )
        return share or None

    def _say_what_is_read_again(self, position: DataPosition, samples: int | None) -> None:
        if self._dp_rank > 0:
            return
        amount = f"{position.batches} batches" if samples is None else f"{samples} samples"
        reason = "cannot resume by itself"
        if self._stateful is not None:
            reason = (
                "draws from the global random generators what its own state does not hold, or its state is of another "
                "number of ranks or batch size"
            )
        logger.warning(
            "Resuming reads %s again to get past them, since %s %s. A DistributedDataLoader starts anywhere at once, "
            "as does a loader with `state_dict` and `load_state_dict` that keeps its own random generator in them.",
            amount,
            type(self._source).__name__,
            reason,
        )

    def _cannot_read_up_to(self, samples: int, batch: Any) -> DataError:
        name = type(self._source).__name__
        if batch is _END or self._count is None:
            return DataError(
                f"The run resumes after {samples} samples of this pass, and the training loader ({name}) ended after "
                f"{self._samples}: its data changed. Give it the data it had, or start another experiment."
            )
        last = self._count(batch, self._batch_size)
        return DataError(
            f"The run resumes after {samples} samples of this pass, and the training loader ({name}) has no batch that "
            f"begins there: it yielded a batch of {last} after {self._samples - last}. Use the batch size it had, or "
            "a DistributedDataLoader, which starts at any sample."
        )

    def _empty_pass(self) -> DataError:
        name, epoch = type(self._source).__name__, self._position.epoch
        if isinstance(self._source, Iterator):
            return DataError(
                f"The training loader is of type {name}, an iterator that can be read once, and pass {epoch} over it "
                "found nothing. Give an object whose `__iter__` begins again, e.g. a class with a generator method "
                "`__iter__`."
            )
        return DataError(
            f"The training loader ({name}) yielded no batch in pass {epoch}. Check its dataset, batch_size "
            "and drop_last."
        )
