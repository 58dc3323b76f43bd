"""Documents of token ids in memory-mapped files: NAME.bin, NAME.index.npy with where each document begins, and the
header NAME.json, which is written last: without it the shard does not count. docs/mixtures.md describes the format;
NAME.npy, a one-dimensional array of token ids, may take the place of NAME.bin and NAME.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dream_trainer.errors import DataError

FORMAT = "dream-trainer tokens"
VERSION = 1
PLAN = "plan.txt"  # what `dream-trainer data tokenize` is to make in a directory: JSON, with a task for each shard
Tokens = npt.NDArray[np.integer[Any]]


class _Shard(NamedTuple):
    tokens: Path
    starts: Path
    dtype: np.dtype[Any] | None  # None of a .npy file, which says it itself
    num_documents: int
    num_tokens: int
    vocabulary_size: int | None


class TokenFile:
    """Documents of token ids: a map-style dataset whose sample `i` is document `i`, a 1-dimensional array.

    Files are mapped when a document is first read, in each process by itself; pickled, it is its path.

    Args:
        path: A shard's .bin or .npy file, or a directory: all shards in it, by name.

    Raises:
        DataError: A file is missing, of another kind, or shorter than it should be; or a directory does not have all
            shards that `dream-trainer data tokenize` was to make there.

    Attributes:
        vocabulary_size: Number of token ids; None where no file says it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._shards = _find_shards(self.path)
        self._ends = np.cumsum([shard.num_documents for shard in self._shards])
        self.vocabulary_size = max((shard.vocabulary_size or 0 for shard in self._shards), default=0) or None
        self._maps: dict[int, tuple[Tokens, npt.NDArray[np.int64]]] = {}
        self._lengths: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Tokens:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)} in {self.path}")
        shard = int(np.searchsorted(self._ends, index, side="right"))
        tokens, starts = self._mapped(shard)
        document = index - (int(self._ends[shard - 1]) if shard else 0)
        return np.array(tokens[starts[document] : starts[document + 1]])

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document."""
        if self._lengths is None:
            parts = [np.diff(self._mapped(shard)[1]) for shard in range(len(self._shards))]
            self._lengths = np.concatenate(parts)
        return self._lengths

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(shard.num_tokens for shard in self._shards)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]

    def _mapped(self, number: int) -> tuple[Tokens, npt.NDArray[np.int64]]:
        if number not in self._maps:
            shard = self._shards[number]
            starts = np.load(shard.starts, mmap_mode="r")
            if (np.diff(starts) < 0).any():
                raise DataError(f"{shard.starts} is damaged: documents begin before those that they follow.")
            if shard.dtype is None:
                tokens = np.load(shard.tokens, mmap_mode="r")
            elif shard.num_tokens == 0:
                tokens = np.empty(0, shard.dtype)  # an empty file cannot be mapped
            else:
                tokens = np.memmap(shard.tokens, shard.dtype, mode="r")
            self._maps[number] = tokens, starts
        return self._maps[number]


def planned_shard(directory: Path, number: int) -> Path:
    """The .bin file of the shard that a plan's task `number` makes."""
    return directory / f"shard-{number:05d}.bin"


def _find_shards(path: Path) -> list[_Shard]:
    if path.is_dir():
        _refuse_unfinished(path)
        files = sorted(
            [file.with_suffix(".bin") for file in path.glob("*.json") if _is_header(file)]
            + [file for file in path.glob("*.npy") if not file.name.endswith(".index.npy")]
        )
        if not files:
            below = sorted({str(file.parent.relative_to(path)) for file in path.glob("*/**/*.index.npy")})
            told = f" itself; there are some in {', '.join(below[:5])}: name one of those" if below else ""
            raise DataError(f"{path} has no token files{told}. `dream-trainer data tokenize` writes them.")
    elif path.exists():
        files = [path]
    else:
        raise DataError(f"there is no token file {path}.")
    shards = [_open_npy(file) if file.suffix == ".npy" else _open_bin(file) for file in files]
    if not any(shard.num_documents for shard in shards):
        raise DataError(f"{path} has no document.")
    return shards


def _refuse_unfinished(directory: Path) -> None:
    try:
        plan = json.loads((directory / PLAN).read_text())
    except (FileNotFoundError, ValueError):
        return  # not of `dream-trainer data tokenize`
    num_planned = len(plan["tasks"]) if isinstance(plan, dict) and "tasks" in plan else 0
    shards = [planned_shard(directory, number) for number in range(num_planned)]
    missing = [shard.stem for shard in shards if not shard.with_suffix(".json").exists()]
    if missing:
        more = f" and {len(missing) - 3} more are" if len(missing) > 3 else " is" if len(missing) == 1 else " are"
        raise DataError(
            f"{directory} has {num_planned - len(missing)} of {num_planned} shards: {', '.join(missing[:3])}{more} "
            "missing. The same `dream-trainer data tokenize` again makes what is missing, and keeps the others."
        )


def _open_bin(path: Path) -> _Shard:
    header = _read_header(path.with_suffix(".json"), path)
    dtype, num_tokens = np.dtype(header["dtype"]).newbyteorder("<"), header["tokens"]
    if not path.exists():
        raise DataError(f"there is no token file {path}, which {path.with_suffix('.json').name} describes.")
    size, expected = path.stat().st_size, num_tokens * dtype.itemsize
    if size != expected:
        raise DataError(
            f"{path} has {size} bytes, and {num_tokens} tokens of {dtype.name} take {expected}: it was cut, or belongs "
            "to another header. Write it again."
        )
    index = _check_index(path, num_tokens, header["documents"])
    return _Shard(path, index, dtype, header["documents"], num_tokens, header["vocabulary_size"])


def _open_npy(path: Path) -> _Shard:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path} is not a whole .npy file: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise DataError(f"{path} has {tokens.dtype} of shape {tokens.shape}. Token ids are integers in one dimension.")
    index = _check_index(path, len(tokens), None)
    return _Shard(path, index, None, len(np.load(index, mmap_mode="r")) - 1, len(tokens), None)


def _check_index(path: Path, num_tokens: int, num_documents: int | None) -> Path:
    index = path.with_suffix(".index.npy")
    if not index.exists():
        raise DataError(
            f"{path} has no index {index.name}: where each document begins, and where the last one ends, as int64. "
            "`dream-trainer data tokenize` or a TokenFileWriter writes both."
        )
    try:
        starts = np.load(index, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{index} is not a whole .npy file: {error}") from error
    fits = (
        starts.ndim == 1 and starts.dtype == np.int64 and len(starts) > 0 and num_documents in (None, len(starts) - 1)
    )
    if not fits or starts[0] != 0 or starts[-1] != num_tokens:
        raise DataError(f"{index} does not belong to {path.name}, which has {num_tokens} tokens. Write both again.")
    return index


def _is_header(path: Path) -> bool:
    try:
        header = json.loads(path.read_text())
    except ValueError:
        return False
    return isinstance(header, dict) and header.get("format") == FORMAT


def _read_header(path: Path, tokens: Path) -> dict[str, Any]:
    if not path.exists():
        raise DataError(
            f"{tokens} has no header {path.name} beside it, so nothing tells what is in it. `dream-trainer data "
            "tokenize` or a TokenFileWriter writes both."
        )
    if not _is_header(path):
        raise DataError(f"{path} is no header of token files: its format is not {FORMAT!r}.")
    header: dict[str, Any] = json.loads(path.read_text())
    if header["version"] != VERSION:
        raise DataError(f"{path} is of version {header['version']}, and this program reads version {VERSION}.")
    return header
