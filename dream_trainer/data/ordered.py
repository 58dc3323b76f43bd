"""Datasets that decide their order themselves: mixtures, and rows packed from documents. All ranks together consume
sample `p` as the `p`-th, so a step's samples follow from its position, and only numbers go to workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset

from dream_trainer.errors import DataError

ENDLESS = 2**62  # the length of a dataset that never ends


class OrderedDataset(Dataset[Any], ABC):
    """A map-style dataset whose samples are numbered in the order of consumption.

    Give it to a `DistributedDataLoader` with `shuffle=False`. Within a pass (all positions of one length) a sample must
    be a pure function of its position and the arguments of `begin` and `set_epoch`. Any process may request any
    position, in any order. Rising positions should be cheap.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Samples in a pass; ENDLESS if it never ends."""

    @abstractmethod
    def __getitem__(self, position: int) -> Any:
        """The sample at a position of the pass."""

    @abstractmethod
    def begin(self, seed: int, state: dict[str, Any] | None) -> None:
        """Called before anything is read, at the start of each pass (`state` None) and before a resume in its middle.

        `state` is the result of `state_at` for the position to resume at; raises DataError if it belongs to other data.
        Without `state`, a change made by the running program (a mixture's weights) stays.
        """

    @abstractmethod
    def state_at(self, position: int, mark: Any = None) -> dict[str, Any]:
        """Plain data that `begin` needs to resume at `position` of this pass, and the counts of drawn samples.

        Called when a checkpoint is written, on any rank. `mark` is the newest that this rank had loaded before.
        """

    def set_epoch(self, epoch: int) -> None:  # most have nothing to do
        """Receives the number of the pass, from 0, after `begin`. A dataset that reads another one passes it on."""

    def mark(self) -> Any:
        """A small plain value about the last loaded sample; workers send it with their batch. None if unused."""
        return None

    @property
    def first_position(self) -> int:
        """The earliest available position of this pass: above 0 if a run resumed with other data."""
        return 0

    @property
    def may_change(self) -> bool:
        """Whether to call `changes_at` before a window; this check must be cheap."""
        return True

    def changes_at(self, position: int, mark: Any = None) -> bool:
        """Whether the order from `position` on has changed. Asked between two windows; all ranks return the same. After
        a change, prefetched samples are dropped and `begin` is called with the state at `position`."""
        return False

    def stages_within(self, first: int, last: int) -> list[int]:
        """Rising positions between `first` and `last`, both excluded, where the weights of samples change."""
        return []

    def lengths(self, first: int, last: int, /) -> Any:
        """Tokens of the samples at positions `first` to `last` (exclusive): integers, shape `(last - first,)`. Packed
        and padded rows need them; raises DataError by default."""
        raise DataError(
            f"{type(self).__name__} has no `lengths(first, last)`, by which rows are planned. Write the documents into "
            "token files (`dream-trainer data tokenize`), or give each source its lengths."
        )

    def numbers_at(self, position: int, mark: Any = None) -> Mapping[str, float]:
        """Named numbers to log at `position`; arguments as in `state_at`."""
        return {}

    @property
    def source(self) -> OrderedDataset | None:
        """The ordered dataset that this one reads, if it reads one."""
        return None


def innermost(dataset: OrderedDataset) -> OrderedDataset:
    """The dataset that decides the order in the end: of rows, their documents."""
    while (source := dataset.source) is not None:
        dataset = source
    return dataset
