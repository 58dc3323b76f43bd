"""Windows of training data, and the positions between them. A position is where a window ends, not where workers have
read ahead to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SavedState = dict[str, Any] | None  # plain data of a checkpoint, if there is any


@dataclass(slots=True)  # not frozen: in each step that would cost 1 us
class DataPosition:
    """The position of training in the data. Made for each window, never changed."""

    epoch: int  # number of the pass over the data, from 0
    samples: int  # of this pass, consumed by all ranks; 0 if the loader is not ours: the trainer counts those
    batches: int  # of this pass, consumed by this rank
    length: int | None = field(default=None, compare=False)  # samples of the dataset in this pass, if it is ours


@dataclass(slots=True)
class Window:
    """The micro-batches of one optimizer step."""

    size: int  # number of micro-batches
    batches: Iterable[Any]  # `size` of them; ours load when they are iterated, which ends before the next window is
    samples: int | None  # of all ranks together, or None if unknown without counting
    end: DataPosition  # the position after this window
    rank_state: dict[str, Any] | None  # for `TrainStream.seek`: of a loader that keeps its own, after this window
    is_uneven: bool  # whether ranks or micro-batches hold different numbers of samples, and need `weight=`
    is_last: bool | None  # of its pass; None if unknown without fetching the next one
    sizes: list[int] | None = None  # samples in each micro-batch of this rank; None if not counted


class TrainStream(ABC):
    """The training data of one rank, window by window."""

    steps_per_epoch: int | None  # windows in one whole pass; None if the loader does not know its length
    is_even: bool  # whether ranks have equal numbers of windows and of micro-batches, by construction
    reader: Any = None  # the ShardReader that loads the samples that are dealt to ranks; None of a loader not ours
    global_batch_size: Any = None  # samples of a whole window over all ranks; None of a loader not ours
    resumes_from_all_ranks: bool = False  # whether, in another layout, `united` makes this state from all ranks'
    facts: Mapping[str, Any] = {}  # about the data, that must be equal on all ranks, in addition to `reader`

    @property
    def length(self) -> int | None:
        """Samples of the dataset in this pass; None of a loader that is not ours."""
        return None

    def united(self, rank_states: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
        """This rank's state for `seek` from those of all ranks of another layout; None if they cannot be united."""
        return None

    @property
    def parts(self) -> Mapping[str, TrainStream]:
        """Maps loader names of a group to their streams; a single loader's name is ""."""
        return {"": self}

    @abstractmethod
    def seek(self, position: DataPosition, rank_state: SavedState, *, is_pass_over: bool, state: SavedState) -> None:
        """Goes on after `position`, the end of a window of any world size and accumulation; or with the next pass.
        `rank_state` is that window's on this rank, None in another world size; `state` what `state_at` gave on any."""

    def state_at(self, position: DataPosition) -> dict[str, Any] | None:
        """State that `seek` needs on every rank besides the position, for a dataset that decides its own order."""
        return None

    def numbers_at(self, position: DataPosition) -> Mapping[str, float]:
        """Named numbers to log about the data at `position`; positions as in `state_at`."""
        return {}

    @abstractmethod
    def next_window(self) -> Window | None:
        """The next window; None if this pass is over, and the call after that begins the next pass."""

    @abstractmethod
    def end_pass(self) -> None:
        """Skips the rest of this pass; no effect between passes."""

    @abstractmethod
    def close(self) -> None:
        """Ends worker processes. The stream may be used again after `seek`."""
