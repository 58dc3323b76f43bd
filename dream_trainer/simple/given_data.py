"""What `train=` and `val=` may be, as loaders that DreamTrainer reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset

from dream_trainer.data.loader import DistributedDataLoader
from dream_trainer.errors import DataError


@runtime_checkable
class MapStyle(Protocol):
    """A dataset by number: torch's, Hugging Face's, any sequence of samples."""

    def __getitem__(self, index: int, /) -> Any: ...

    def __len__(self) -> int: ...


class LoaderOptions(NamedTuple):
    """How datasets become loaders.

    Attributes:
        batch_size: Samples in one rank's batch.
        shuffle: Whether each epoch has a random order of its own.
        workers: Processes that load.
        collate: Makes a batch of a list of samples; None is torch's.
    """

    batch_size: int
    shuffle: bool
    workers: int
    collate: Callable[[list[Any]], Any] | None


def as_loader(data: Any, options: LoaderOptions, name: str) -> Any:
    """A loader over `data`: a dataset is batched, a loader or a list of batches stays as it is.

    Args:
        data: A loader, a dataset, an iterable of batches, or a function that makes one; a dict of them by name.
        options: For datasets.
        name: Of the argument, for messages.
    """
    if isinstance(data, Mapping):
        return {key: as_loader(value, options, f"{name}[{key!r}]") for key, value in data.items()}
    if isinstance(data, IterableDataset):
        return DataLoader(data, options.batch_size, num_workers=options.workers, collate_fn=options.collate)
    if isinstance(data, list | tuple):  # of batches
        return data
    if isinstance(data, Iterator):
        return _Once(data, name)
    if isinstance(data, MapStyle):
        return DistributedDataLoader(
            data,
            options.batch_size,
            shuffle=options.shuffle,
            drop_last=False,
            num_workers=options.workers,
            collate_fn=options.collate,
        )
    return _Made(data) if callable(data) and not isinstance(data, Iterable) else data


class _Made:
    """The batches that a function makes, anew in each pass."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


class _Once:
    """The batches of a generator, which cannot be begun again."""

    def __init__(self, batches: Iterator[Any], name: str) -> None:
        self._batches, self._name = batches, name
        self._was_begun = False

    def __iter__(self) -> Iterator[Any]:
        if self._was_begun:
            raise DataError(
                f"{self._name}= is a generator, which is used up after one pass, and another one is to begin. Give the "
                f"function that makes it: {self._name}=batches, not {self._name}=batches()."
            )
        self._was_begun = True
        return self._batches
