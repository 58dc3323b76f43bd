"""Reading tensors from an object store: each rank fetches the parts that it needs, and no byte twice."""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from xxhash import xxh3_128

from dream_trainer.checkpoint.files import compare_content
from dream_trainer.checkpoint.manifest import Manifest
from dream_trainer.checkpoint.safe_dcp import SafeReader, read_tensors

_PART = 32 << 20


def read_from_store(
    manifest: Manifest, metadata: Metadata, tensors: Mapping[str, Tensor], shards: Sequence[str]
) -> None:
    """As `read_and_verify`. Of a shard that this rank verifies all is fetched, once; of another what it needs."""
    files = _HashedFiles(manifest, shards)
    try:
        read_tensors(manifest, metadata, tensors, _StoreReader(manifest, metadata, files))
    finally:  # what PyTorch says of damaged bytes is not said if the checksum finds them
        for name in files.unread():
            manifest.verify(name)


class _StoreReader(SafeReader):
    """Reads each file from its beginning to its end."""

    def __init__(self, manifest: Manifest, metadata: Metadata, files: _HashedFiles) -> None:
        super().__init__(manifest, metadata)
        self.fs = files

    def _read_file(self, name: str, plan: LoadPlan, planner: LoadPlanner) -> None:
        ordered = sorted(plan.items, key=lambda item: int(self._location(item.storage_index).offset))
        super()._read_file(name, replace(plan, items=ordered), planner)

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        return io.BytesIO(cast(_Forward, file).part(sinfo.offset, sinfo.length))


class _Forward:
    """A file read in order; what is passed over is fetched only where the whole is hashed."""

    def __init__(self, stream: io.RawIOBase, *, hashes: bool) -> None:
        self._stream = stream
        self._digest = xxh3_128() if hashes else None
        self._position = 0
        self._last = (-1, b"")

    def part(self, offset: int, length: int) -> bytes:
        """Bytes from `offset`, which is that of the last part, or behind it."""
        if self._last[0] != offset:
            self._skip_to(offset)
            self._last = offset, self._read(length)
        return self._last[1]

    def finish(self) -> tuple[int, str] | None:
        """Size and checksum of the whole, where it is hashed."""
        if self._digest is None:
            return None
        self._skip_to(None)
        return self._position, self._digest.hexdigest()

    def _skip_to(self, offset: int | None) -> None:
        if self._digest is None:
            self._stream.seek(offset or 0)
            return
        while offset is None or self._position < offset:
            if not self._read(_PART if offset is None else min(_PART, offset - self._position)):
                return

    def _read(self, length: int) -> bytes:
        content = self._stream.read(length) or b""
        self._position += len(content)
        if self._digest is not None:
            self._digest.update(content)
        return content


class _HashedFiles(FileSystem):
    """The files of a checkpoint; those in `shards` are compared with their checksums once they were read."""

    def __init__(self, manifest: Manifest, shards: Sequence[str]) -> None:
        super().__init__()
        self._manifest = manifest
        self._to_verify = dict.fromkeys(shards)

    def unread(self) -> list[str]:
        """The shards to verify of which nobody read anything, or not to the end."""
        return list(self._to_verify)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        path = cast(Path, path)
        with path.open("rb") as stream:
            file = _Forward(cast(io.RawIOBase, stream), hashes=path.name in self._to_verify)
            yield file
            found = file.finish()
        if found is not None:
            entry = self._manifest.entry(path.name)
            del self._to_verify[path.name]
            compare_content(path, found, (entry.size, entry.xxh3))
