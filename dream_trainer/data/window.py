"""Windows of training data, and the positions between them. A position is where a window ends, not where workers have
read ahead to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dream_trainer.data.loader import ShardReader

SavedState = dict[str, Any] | None  # plain data of a checkpoint, if there is any


@dataclass(slots=True)  # not frozen: in each step that would cost 1 us
class DataPosition:
    """Where training is in the data. Made anew for each window, never changed."""

    epoch: int
    """Number of the pass over the data, from 0."""
    samples: int
    """Samples of this pass that all ranks consumed together; 0 in the windows of a loader that is not ours, where only
    the trainer counts those of all ranks."""
    batches: int
    """Batches of this pass that this rank consumed."""
    length: int | None = field(default=None, compare=False)
    """Samples that the dataset had in this pass; None for a loader that is not ours."""


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
    sizes: list[int] | None = None
    """Samples in each of this rank's micro-batches; None of a loader that is not ours if nobody counts them."""


class TrainStream(ABC):
    """The training data of one rank, window by window."""

    steps_per_epoch: int | None
    """Windows in one whole pass; None if the loader does not know its length."""
    is_even: bool
    """Whether every rank gets windows of the same number of micro-batches, and equally many, by construction."""
    resumes_from_all_ranks: bool = False
    """Whether, after a change of layout, `united` makes this rank's state from those of all ranks."""

    @property
    def length(self) -> int | None:
        """Samples of the dataset in this pass; None of a loader that is not ours."""
        return None

    @property
    def reader(self) -> ShardReader | None:
        """What loads the samples that are dealt to ranks; None of a loader that is not ours."""
        return None

    @property
    def facts(self) -> dict[str, Any]:
        """What of the data has to be the same on all ranks, beside what `reader` says."""
        return {}

    def united(self, rank_states: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
        """This rank's state for `seek` from the states of all data-parallel ranks of another layout; None where they
        cannot be put together."""
        return None

    @property
    def parts(self) -> Mapping[str, TrainStream]:
        """The streams of a group of loaders, by name; of one loader itself, named ""."""
        return {"": self}

    @property
    def global_batch_size(self) -> int | None:
        """Samples of a whole window over all ranks; None of a loader that is not ours."""
        return None

    @property
    def seconds_by_loader(self) -> Mapping[str, float]:
        """Seconds this process has spent waiting for each loader of a group, by name."""
        return {}

    @property
    def seconds_loading(self) -> Mapping[tuple[int, str], float]:
        """Seconds that each worker of this rank (-1: this process) has loaded each source of a mixture."""
        return {}

    @abstractmethod
    def seek(
        self,
        position: DataPosition,
        rank_state: SavedState,
        *,
        is_pass_over: bool = False,
        state: SavedState = None,
    ) -> None:
        """Goes on after `position`; with `is_pass_over`, with the next pass.

        Args:
            position: A window's `end`, from a run with any world size and accumulation.
            rank_state: The same window's `rank_state` on this rank; None if it had none or the world size changed.
            is_pass_over: Whether that window was the last of its pass.
            state: What `state_at` gave for that position, on any rank; None if it gave none.

        Raises:
            DataError: A loader that is not ours cannot be brought there, or the state is of other data.
        """

    def state_at(self, position: DataPosition) -> dict[str, Any] | None:
        """What `seek` needs besides the position on every rank: of a dataset that decides its order itself.

        Args:
            position: The end of the last window but one, or of the last.
        """
        return None

    def numbers_at(self, position: DataPosition) -> Mapping[str, float]:
        """What to log of the data at `position`, by name; which position, as of `state_at`."""
        return {}

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
