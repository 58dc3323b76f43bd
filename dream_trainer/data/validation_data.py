"""The validation data of one rank: every sample once over all ranks, in the dataset's order, the same each time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from dream_trainer.compat.pytorch import end_workers
from dream_trainer.data.foreign import iterate, known_length
from dream_trainer.data.loader import DistributedDataLoader, ShardReader, foreign_iterable, loader_batch_size, rebuild
from dream_trainer.data.ordered import ENDLESS
from dream_trainer.data.sampler import VALIDATION_EPOCH, Sharding
from dream_trainer.errors import DataError


def validation_batches(loader: object, *, dp_rank: int, dp_size: int, seed: int) -> ValidationBatches:
    """The validation batches of one rank from any loader that a user may return from `configure_dataloaders`.

    Our and plain loaders are read whole and in the dataset's order, regardless of their `shuffle` and `drop_last`.
    Ranks may differ by a sample in their last batch, and some have one batch less, or none.
    """
    distributed_loader = loader if isinstance(loader, DistributedDataLoader) else rebuild(loader, "validation")
    if distributed_loader is not None:
        return ShardValidation(distributed_loader, Sharding(distributed_loader.batch_size, dp_rank, dp_size), seed)
    source = foreign_iterable(loader, dp_size)
    if isinstance(source, Iterator):
        raise DataError(
            f"The validation loader is of type {type(source).__name__}, an iterator that can be read once, and "
            "validation runs many times. Give an object whose `__iter__` begins again."
        )
    return ForeignValidation(source, dp_rank, seed)


class ShardValidation:
    """This rank's part of our loader's batches."""

    batch_size = None  # of a full batch: not needed

    def __init__(self, loader: DistributedDataLoader, sharding: Sharding, seed: int) -> None:
        self._dataset = loader.dataset
        if len(loader.dataset) == ENDLESS:
            raise DataError(
                f"The validation dataset ({type(loader.dataset).__name__}) never ends. Give it a length, such as "
                "Mixture(num_samples=...)."
            )
        self.reader = ShardReader(loader, sharding, seed=seed, shuffle=False)

    def __iter__(self) -> Iterator[Any]:
        self.reader.begin(0, None)
        length = len(self._dataset)  # data may have come since the last validation
        if length != self.reader.sampler.length:
            self.reader.dataset_changed()
        return self.reader.batches(VALIDATION_EPOCH, 0, length)

    def samples_in(self, number: int) -> int:
        """Samples in batch `number` of the running iteration."""
        return self.reader.sampler.samples_in(number)

    def __len__(self) -> int:
        return len(self.reader.sampler)

    def any_batch(self) -> Any:
        """A batch, for a rank that has none but must keep others company."""
        return self.reader.keyed_dataset.load((VALIDATION_EPOCH, [0]))

    def close(self) -> None:
        self.reader.close()


class ForeignValidation:
    """The batches of a loader that is not ours, which does not say how many samples are in each."""

    reader = None

    def __init__(self, source: Iterable[Any], dp_rank: int, seed: int) -> None:
        self._source, self._dp_rank, self._seed = source, dp_rank, seed
        self.batch_size = loader_batch_size(source)

    def __iter__(self) -> Iterator[Any]:
        return iterate(self._source, seed=self._seed, epoch=VALIDATION_EPOCH, dp_rank=self._dp_rank)

    def samples_in(self, number: int) -> None:
        return None

    def __len__(self) -> int:
        length = known_length(self._source)
        if length is None:
            raise TypeError(f"The validation loader ({type(self._source).__name__}) does not know its length.")
        return length

    def any_batch(self) -> Any | None:
        return next(iter(self), None)

    def close(self) -> None:
        end_workers(self._source)


ValidationBatches = ShardValidation | ForeignValidation  # each iteration starts from the beginning
