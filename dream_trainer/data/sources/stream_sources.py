"""Sources that a `StreamLoader` reads in sequence, shard by shard. Some readers return a `state_dict` that they keep
changing, so it is copied before anything else is read."""

from __future__ import annotations

import re
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dream_trainer.checks import refuse
from dream_trainer.errors import DataError

Paths = str | Path | Sequence[str | Path]


class ShardedSource(ABC):
    """A sequential source in shards that can be read independently. It is sent to worker processes, so it holds paths
    and no open files."""

    @property
    @abstractmethod
    def num_shards(self) -> int:
        """Number of shards; the same on all ranks."""

    @abstractmethod
    def open(self, shard: int) -> Any:
        """A new iterable over one shard, from its beginning, with `state_dict` and `load_state_dict`, which is called
        before the iterator that continues there begins. Its `set_epoch`, if any, is called."""

    def name(self, shard: int) -> str:
        """Name of a shard in messages and checkpoints; must stay the same."""
        return f"shard {shard}"


class IterableShards(ShardedSource):
    """Shards that your own class reads.

    Args:
        reader: Makes the reader of one shard from its item: an object with `__iter__`, `state_dict` and
            `load_state_dict`. Called in workers.
        items: One item for each shard, e.g. a path.
    """

    def __init__(self, reader: Callable[[Any], Any], items: Iterable[Any]) -> None:
        self._reader = reader
        self._items = list(items)

    @property
    def num_shards(self) -> int:
        return len(self._items)

    def open(self, shard: int) -> Any:
        return self._reader(self._items[shard])

    def name(self, shard: int) -> str:
        item = self._items[shard]
        if isinstance(item, Path):
            return str(item)
        # Of other objects the text may hold an address, which is another one in each process.
        return f"shard {item!r}" if isinstance(item, str | int | tuple) else super().name(shard)


class HuggingFaceShards(IterableShards):
    """The shards of a streaming dataset of Hugging Face's `datasets`.

    Args:
        dataset: Result of `load_dataset(..., streaming=True)`, possibly with `map`, `filter` and others applied, except
            `shuffle`, whose buffer is not in its state.
    """

    def __init__(self, dataset: Any) -> None:
        count = int(dataset.num_shards)
        super().__init__(partial(dataset.shard, count, contiguous=False), range(count))

    def name(self, shard: int) -> str:
        return f"shard {shard} of {self.num_shards} of the Hugging Face dataset"


class WebDatasetShards(IterableShards):
    """Tar files in the WebDataset format, read in sequence.

    Consecutive files that share their name up to its first dot are one sample: a dict of `__key__` (that name) and the
    content of each file as bytes. The key of a file is the rest of its name, in lower case. Decode it with `Map`.

    Args:
        files: A directory, whose `*.tar` are read in the order of their names, or a list of files.

    Raises:
        DataError: There is no file, or one is missing.
    """

    def __init__(self, files: Paths) -> None:
        super().__init__(TarReader, find_files(files, (".tar",)))


class TarReader:
    """The samples of one plain tar file, from any sample on: the state is a place in the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def state_dict(self) -> dict[str, Any]:
        return {"offset": self._offset}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._offset = state_dict["offset"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self._path.open("rb") as file:
            for sample in tar_samples(self._path, file, self._offset):
                self._offset = sample.end
                yield {"__key__": sample.key} | sample.read(file)


class TarSample(NamedTuple):
    key: str
    files: dict[str, tuple[int, int]]  # by extension: where the content begins, and its bytes
    end: int  # where the next sample begins

    def read(self, file: BinaryIO) -> dict[str, bytes]:
        contents = {}
        for extension, (start, size) in self.files.items():
            file.seek(start)
            contents[extension] = file.read(size)
        return contents


# WebDataset's split of a sample's file name: up to the first dot after the last slash, and the rest.
_TAR_NAME = re.compile(r"^(?!__[^/]*__$)((?:.*/)?[^./][^./]*)\.([^/]+)$")


def tar_samples(path: Path, file: BinaryIO, offset: int = 0) -> Iterator[TarSample]:
    """The samples of a plain tar file from one that begins at `offset` on; `file` may be read in between."""
    key, files = "", dict[str, tuple[int, int]]()
    file.seek(offset)
    try:
        archive = tarfile.TarFile(fileobj=file)
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # which it keeps all of
            name = _TAR_NAME.match(member.name)
            if name is None or not member.isfile():
                continue
            if files and key != name[1]:
                yield TarSample(key, files, member.offset)
                files = {}
            key, extension = name[1], name[2].lower()
            if extension in files:
                raise DataError(f"{path} has two files {member.name!r} in one sample. Write it again.")
            files[extension] = member.offset_data, member.size
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{path} is damaged: {error}. Only plain tar files can be read.") from error
    end = archive.offset
    file.seek(end)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile takes a damaged header for the end
        raise DataError(f"{path} is damaged or cut off at byte {end}. Copy it again, or leave it out.")
    if files:
        yield TarSample(key, files, end)


def find_files(paths: Paths, suffixes: tuple[str, ...]) -> list[Path]:
    found: list[Path] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        inside = [Path(path)]
        if inside[0].is_dir():
            inside = sorted(file for file in inside[0].iterdir() if file.name.endswith(suffixes))
        elif not inside[0].exists():
            raise DataError(f"there is no file {path}.")
        refuse(not inside, f"{path} has no files of {' or '.join(suffixes)}.", DataError)
        found += inside
    refuse(not found, "no files are given.", DataError)
    return found
