"""Samples in Parquet, JSON lines and WebDataset files by number; and lengths of samples, measured once. Where samples
begin is found once, when the files are opened."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Dataset

from dream_trainer.checks import refuse
from dream_trainer.data.sources.stream_sources import Paths, find_files, tar_samples
from dream_trainer.data.sources.token_file import located
from dream_trainer.data.transforms import Map, TransformedDataset
from dream_trainer.errors import DataError


class ShardFiles(ABC):
    """A map-style dataset over files of one kind, in the order of the files."""

    suffixes: tuple[str, ...]

    def __init__(self, paths: Paths) -> None:
        self.paths = find_files(paths, self.suffixes)
        found = [self._find_samples(path) for path in self.paths]
        self._places = [places for _, places in found]
        self._ends = np.cumsum([count for count, _ in found])
        if self._ends[-1] == 0:
            raise DataError(f"{type(self).__name__}: there is no sample in {', '.join(map(str, self.paths[:3]))}.")
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        shard, number = located(self._ends, index, "sample")
        try:
            return self._read(shard, number)
        except Exception as error:
            raise DataError(
                f"sample {number} of {self.paths[shard]} cannot be read: {type(error).__name__}: {error}"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_open": {}}

    @abstractmethod
    def _find_samples(self, path: Path) -> tuple[int, Any]:
        """The number of samples in a file, and the index that `_read` uses."""

    @abstractmethod
    def _read(self, shard: int, number: int) -> Any:
        """A sample of a file."""


class JsonLines(ShardFiles):
    """Lines of .jsonl files; a sample is a line's value, such as a dict. Blank lines do not count.

    Args:
        paths: As in ShardFiles. Compressed files cannot be read by number.
    """

    suffixes = (".jsonl",)

    def _find_samples(self, path: Path) -> tuple[int, Any]:
        starts, at = [], 0
        with path.open("rb") as lines:
            for line in lines:
                if line.strip():
                    starts.append(at)
                at += len(line)
        return len(starts), np.array(starts, dtype=np.int64)

    def _read(self, shard: int, number: int) -> Any:
        file = self._open.get(shard)
        if file is None:
            file = self._open[shard] = self.paths[shard].open("rb")
        file.seek(self._places[shard][number])
        return json.loads(file.readline())

    def __del__(self) -> None:
        for file in vars(self).get("_open", {}).values():
            file.close()


class ParquetRows(ShardFiles):
    """Rows of .parquet files; a sample is a dict by column. Needs `pyarrow`.

    A row group is read as a whole and kept until another one is asked for, in each process: a shuffled order over large
    groups reads each many times. Write small ones (`row_group_size=1000`), or keep several.

    Args:
        paths: As in ShardFiles.
        columns: Which to read; all by default.
        kept_groups: How many row groups are kept.
    """

    suffixes = (".parquet",)

    def __init__(self, paths: Paths, columns: Sequence[str] | None = None, *, kept_groups: int = 8) -> None:
        self.columns = None if columns is None else list(columns)
        self.kept_groups = kept_groups
        self._groups: dict[tuple[int, int], Any] = {}
        super().__init__(paths)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_groups": {}}

    def _find_samples(self, path: Path) -> tuple[int, Any]:
        import pyarrow.parquet as parquet

        try:
            metadata = parquet.read_metadata(path)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is not a whole Parquet file: {error}") from error
        missing = set(self.columns or ()) - set(metadata.schema.to_arrow_schema().names)
        refuse(missing, f"{path} has no columns {sorted(missing)}.", DataError)
        ends = np.cumsum(
            [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)], dtype=np.int64
        )
        return metadata.num_rows, ends

    def _read(self, shard: int, number: int) -> Any:
        group, row = located(self._places[shard], number, "row")
        table = self._groups.pop((shard, group), None)
        if table is None:
            import pyarrow.parquet as parquet

            with parquet.ParquetFile(self.paths[shard]) as file:
                table = file.read_row_group(group, columns=self.columns)
        self._groups[shard, group] = table  # the newest is the last
        if len(self._groups) > self.kept_groups:
            del self._groups[next(iter(self._groups))]
        return {name: table.column(name)[row].as_py() for name in table.column_names}


class TarSamples(ShardFiles):
    """Samples of WebDataset's .tar files, by number.

    A sample is a series of files that share their name up to the first dot: a dict of `__key__`, that name, and the
    bytes of each file under the rest of its name, in lower case; decode them by `Map`. Files without a dot, or with a
    leading dot, are no samples.

    Args:
        paths: As in ShardFiles. Compressed files cannot be read by number.
    """

    suffixes = (".tar",)

    def _find_samples(self, path: Path) -> tuple[int, Any]:
        with path.open("rb") as file:
            samples = list(tar_samples(path, file))
        return len(samples), samples

    def _read(self, shard: int, number: int) -> Any:
        sample = self._places[shard][number]
        with self.paths[shard].open("rb") as file:
            return {"__key__": sample.key} | sample.read(file)


@runtime_checkable
class Measured(Protocol):
    """A source that knows the tokens of each sample without loading it: `lengths`, shape `(len(source),)`."""

    @property
    def lengths(self) -> npt.NDArray[np.integer[Any]]: ...


class WithLengths(Dataset[Any]):
    """A dataset that says how long its samples are, for mixtures by tokens and for packing.

    Args:
        dataset: Map-style.
        lengths: Tokens of each sample, such as `measure_lengths(dataset)`; shape `(len(dataset),)`.

    Raises:
        DataError: There are more or fewer lengths than samples.
    """

    def __init__(self, dataset: Any, lengths: npt.ArrayLike) -> None:
        self.dataset = dataset
        self.lengths = np.asarray(lengths, dtype=np.int64)
        if self.lengths.shape != (len(dataset),):
            shape = self.lengths.shape
            raise DataError(f"there are lengths of shape {shape} for {len(dataset)} samples. Measure them again.")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def measure_lengths(
    dataset: Any, *, field: str = "tokens", num_workers: int = 0, length: Callable[[Any], int] | None = None
) -> npt.NDArray[np.int64]:
    """Loads every sample once, and says how long each is. Keep the result in a file: `np.save`.

    Args:
        dataset: Map-style.
        field: Name of the token ids in samples that are mappings.
        num_workers: Processes that load.
        length: Tokens of a sample, of any kind. None: the sample's `len`, or of a mapping that of its `field`.

    Returns:
        Shape `(len(dataset),)`, int64.

    Raises:
        DataError: A sample is a mapping without `field`.
    """
    lengths = TransformedDataset(dataset, [Map(length or partial(_length, field))])
    measured = DataLoader(lengths, batch_size=None, num_workers=num_workers)
    return np.fromiter((int(value) for value in measured), dtype=np.int64, count=len(dataset))


def _length(field: str, sample: Any) -> int:
    if not isinstance(sample, Mapping):
        return len(sample)
    refuse(field not in sample, f"no {field!r}, but {[*sample]}. Name the token ids in field=", DataError)
    return len(sample[field])


def lengths_of(source: Any, name: str) -> Any:
    if not isinstance(source, Measured):
        raise DataError(
            f"source {name!r} ({type(source).__name__}) has no attribute `lengths`, the tokens of each sample. Use "
            "WithLengths(source, measure_lengths(source)), or `dream-trainer data tokenize`."
        )
    return source.lengths


def mean_lengths(sources: Mapping[str, Any]) -> list[float]:
    means = []
    for name, source in sources.items():
        lengths = np.asarray(lengths_of(source, name))
        means.append(float(lengths.sum(dtype=np.int64)) / len(lengths))
        refuse(not means[-1] > 0, f"the samples of source {name!r} have no tokens.", DataError)
    return means
