"""Documents of token ids in memory-mapped files: NAME.bin, NAME.index.npy with each document's start, and the header
NAME.json. The header is written last; a shard without it does not count. docs/mixtures.md describes the format.
Files are made from raw text in parallel, shard by shard; a shard that is there is not made again."""

from __future__ import annotations

import glob
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dream_trainer import file_locks
from dream_trainer.checks import listed, refuse
from dream_trainer.errors import DataError

FORMAT = "dream-trainer tokens"
VERSION = 1
PLAN = "plan.txt"  # the work of `dream-trainer data tokenize` in a directory: JSON, a task per shard
Tokens = npt.NDArray[np.integer[Any]]


class _Shard(NamedTuple):
    tokens: Path
    starts: Path
    dtype: np.dtype[Any]
    num_documents: int
    num_tokens: int
    vocabulary_size: int


class TokenFile:
    """Documents of token ids: a map-style dataset whose sample `i` is document `i`, a 1-dimensional array.

    Files are mapped when a document is first read, in each process by itself; pickled, it is its path.

    Args:
        path: A shard's .bin file, or a directory: all shards in it, sorted.

    Raises:
        DataError: A file is missing, of another kind, or shorter than it should be; or a directory does not have all
            shards that `dream-trainer data tokenize` should have made there.

    Attributes:
        vocabulary_size: Number of token ids.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._shards = _find_shards(self.path)
        self._ends = np.cumsum([shard.num_documents for shard in self._shards])
        self.vocabulary_size = max(shard.vocabulary_size for shard in self._shards)
        self._maps: dict[int, tuple[Tokens, npt.NDArray[np.int64]]] = {}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Tokens:
        shard, document = located(self._ends, index, f"{self.path}: document")
        tokens, starts = self._mapped(shard)
        return np.array(tokens[starts[document] : starts[document + 1]])

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document."""
        return np.concatenate([np.diff(self._mapped(shard)[1]) for shard in range(len(self._shards))])

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(shard.num_tokens for shard in self._shards)

    def __reduce__(self) -> tuple[type[Self], tuple[Path]]:
        return type(self), (self.path,)

    def _mapped(self, number: int) -> tuple[Tokens, npt.NDArray[np.int64]]:
        if number not in self._maps:
            shard = self._shards[number]
            starts = np.load(shard.starts, mmap_mode="r")
            if (np.diff(starts) < 0).any():
                raise DataError(f"{shard.starts} is damaged: documents begin before those that they follow.")
            # an empty file cannot be mapped
            is_empty = shard.num_tokens == 0
            tokens = np.empty(0, shard.dtype) if is_empty else np.memmap(shard.tokens, shard.dtype, mode="r")
            self._maps[number] = tokens, starts
        return self._maps[number]


def located(ends: npt.NDArray[np.int64], index: int, what: str) -> tuple[int, int]:
    """Which part an item is in, and its place there; `ends` says how many items there are up to the end of each."""
    if not len(ends) or not 0 <= index < ends[-1]:
        raise IndexError(f"{what} {index} of {ends[-1] if len(ends) else 0}")
    part = int(np.searchsorted(ends, index, side="right"))
    return part, index - (int(ends[part - 1]) if part else 0)


def planned_shard(directory: Path, number: int) -> Path:
    return directory / f"shard-{number:05d}.bin"


def _find_shards(path: Path) -> list[_Shard]:
    if path.is_dir():
        _refuse_unfinished(path)
        files = sorted(file.with_suffix(".bin") for file in path.glob("*.json") if _header(file))
        refuse(not files, f"{path} has no token files. `dream-trainer data tokenize` writes them.", DataError)
    else:
        files = [path]
    shards = [_open_shard(file) for file in files]
    refuse(not any(shard.num_documents for shard in shards), f"{path} has no document.", DataError)
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
        names = f"{listed(missing, 3)} {'is' if len(missing) == 1 else 'are'}"
        raise DataError(
            f"{directory} has {num_planned - len(missing)} of {num_planned} shards: {names} missing. "
            "The same `dream-trainer data tokenize` again makes what is missing, and keeps the others."
        )


def _open_shard(path: Path) -> _Shard:
    refuse(not path.exists(), f"there is no token file {path}.", DataError)
    described = path.with_suffix(".json")
    header = _header(described)
    if header is None:
        raise DataError(
            f"{path} has no header in {described.name} next to it, so its format is unknown. `dream-trainer data "
            "tokenize` or a TokenFileWriter writes both."
        )
    if header["version"] != VERSION:
        raise DataError(f"{described} is of version {header['version']}, and this program reads version {VERSION}.")
    dtype, num_tokens = np.dtype(header["dtype"]).newbyteorder("<"), header["tokens"]
    size, expected = path.stat().st_size, num_tokens * dtype.itemsize
    if size != expected:
        raise DataError(
            f"{path} has {size} bytes, and {num_tokens} tokens of {dtype.name} take {expected}: it was cut, or belongs "
            "to another header. Write it again."
        )
    index = path.with_suffix(".index.npy")
    try:
        starts = np.load(index, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{index} is not a whole .npy file: {error}") from error
    is_index = starts.dtype == np.int64 and starts.shape == (header["documents"] + 1,)
    if not is_index or starts[0] != 0 or starts[-1] != num_tokens:
        raise DataError(f"{index} does not belong to {path.name}, which has {num_tokens} tokens. Write both again.")
    return _Shard(path, index, dtype, header["documents"], num_tokens, header["vocabulary_size"])


def _header(path: Path) -> dict[str, Any] | None:
    """Header of a token file; None if there is none."""
    try:
        header = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return header if isinstance(header, dict) and header.get("format") == FORMAT else None


class TokenFileWriter:
    """Writes one shard; use it with `with`, in one process at a time. The shard only becomes visible when that ends
    without an exception.

    Args:
        path: The shard's .bin file; its directory is created.
        vocabulary_size: Number of token ids. Up to 65,536 take two bytes each, more take four.
        facts: Other entries of the header, as plain data.

    Attributes:
        num_tokens: Tokens written so far.
        num_documents: Documents written so far.
    """

    def __init__(self, path: str | Path, vocabulary_size: int, facts: dict[str, Any] | None = None) -> None:
        if not 1 <= vocabulary_size <= 2**32:
            raise DataError(f"vocabulary_size={vocabulary_size} is not from 1 to 2**32, as four bytes hold.")
        self.path = Path(path)
        refuse(self.path.suffix != ".bin", f"token files must be called NAME.bin, not {self.path.name}.", DataError)
        self.vocabulary_size = vocabulary_size
        self.dtype = np.dtype("<u2" if vocabulary_size <= 2**16 else "<u4")
        self.num_tokens = 0
        self._facts = facts or {}
        self._starts = [0]

    @property
    def num_documents(self) -> int:
        return len(self._starts) - 1

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _part(self.path).open("ab")
        if not _locked(self._file, _part(self.path)):
            self._file.close()
            raise DataError(f"{self.path} is being written by another process. Wait for it, or end it.")
        self._file.truncate(0)  # left by a killed process
        return self

    def add(self, tokens: npt.ArrayLike) -> None:
        """Writes one document: integers from 0 to `vocabulary_size - 1` of shape `(tokens,)`, or none."""
        ids = np.asarray(tokens)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise DataError(f"document {self.num_documents} has {ids.dtype} of shape {ids.shape}, no token ids.")
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocabulary_size:
            span = f"from {ids.min()} to {ids.max()}, and vocabulary_size={self.vocabulary_size}"
            raise DataError(f"document {self.num_documents} has token ids {span}.")
        self._file.write(ids.astype(self.dtype).tobytes())
        self.num_tokens += len(ids)
        self._starts.append(self.num_tokens)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None:
            _part(self.path).unlink()
            self._file.close()
            return
        self._file.flush()
        header = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self.dtype.name,
            "tokens": self.num_tokens,
            "documents": self.num_documents,
            "vocabulary_size": self.vocabulary_size,
        }
        index, described = self.path.with_suffix(".index.npy"), self.path.with_suffix(".json")
        with _part(index).open("wb") as file:
            np.save(file, np.array(self._starts, dtype=np.int64))
        _part(described).write_text(json.dumps(header | self._facts, indent=1) + "\n")
        described.unlink(missing_ok=True)  # of a shard that was here before
        for path in (self.path, index, described):  # the header last: it says that all are there
            with _part(path).open("rb") as file:
                os.fsync(file.fileno())
            os.replace(_part(path), path)
        self._file.close()


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _locked(file: BinaryIO, path: Path) -> bool:
    """Whether this process holds the file's lock, and the file is still at its path: another may just have ended."""
    is_held = file_locks.take(file)
    if is_held is None:
        file_locks.warn_of_no_locks(path.parent)
    try:
        return is_held is not False and os.fstat(file.fileno()).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


# -- From raw text.


TEXTS_PER_SHARD = 1000
ROWS_PER_SHARD = 50_000
Encode = Callable[[str], npt.ArrayLike]


@dataclass(frozen=True)
class Task:
    kind: str
    inputs: tuple[str, ...]
    field: str
    split: str = ""
    rows: tuple[int, int] = (0, 0)


def plan_tasks(inputs: Sequence[str], field: str, split: str) -> list[Task]:
    """The shards to make of files, patterns of files, and Hugging Face datasets; the same each time."""
    tasks: list[Task] = []
    for given in inputs:
        if given.startswith("hf:"):
            length = len(_dataset(given, split))
            bounds = [(first, min(first + ROWS_PER_SHARD, length)) for first in range(0, length, ROWS_PER_SHARD)]
            tasks += [Task("dataset", (given,), field, split, rows) for rows in bounds]
            continue
        paths = sorted(path for path in glob.glob(given, recursive=True) if Path(path).is_file())
        if not paths:
            if Path(given).is_dir():
                raise DataError(f"{given} is a directory. Give a pattern of its files, such as '{given}/**/*.txt'.")
            raise DataError(f"there is no file {given}. Give files, patterns of files, or hf:NAME of a dataset.")
        rows_of = {".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".parquet": "parquet"}
        texts = []
        for path in paths:
            kind = next((kind for suffix, kind in rows_of.items() if path.endswith(suffix)), None)
            if kind is None:
                texts.append(path)
            else:
                tasks.append(Task(kind, (path,), field))
        tasks += [
            Task("text", tuple(texts[first : first + TEXTS_PER_SHARD]), field)
            for first in range(0, len(texts), TEXTS_PER_SHARD)
        ]
    return tasks


def open_tokenizer(name: str, end: str | None) -> tuple[Encode, int]:
    """A tokenizer by name, "bytes" (256 ends a document), a tokenizer.json or transformers'; and its number of ids."""
    if name == "bytes":
        if end is not None:
            raise DataError(f"the tokenizer 'bytes' ends a document with 256, not {end!r}. Leave --end out.")
        return lambda text: [*text.encode(), 256], 257
    if name.endswith(".json"):
        from tokenizers import Tokenizer as FastTokenizer

        try:
            fast = FastTokenizer.from_file(name)
        except Exception as error:  # which has no specific class
            raise DataError(f"{name} is no tokenizer.json: {error}") from error
        size, end_id = fast.get_vocab_size(), None if end is None else fast.token_to_id(end)
        encode: Callable[[str], list[int]] = lambda text: fast.encode(text, add_special_tokens=False).ids  # noqa: E731
    else:
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(name)
        size, end_id = len(slow), slow.eos_token_id if end is None else slow.get_vocab().get(end)
        encode = lambda text: slow(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    refuse(end is not None and end_id is None, f"{name} has no token {end!r}.", DataError)
    last = [] if end_id is None else [end_id]
    return lambda text: [*encode(text), *last], size


def tokenize(
    tasks: Sequence[Task],
    output: Path,
    tokenizer: str,
    *,
    end: str | None = None,
    workers: int = 1,
    done: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Makes a shard of each task in `output`; those that exist from an earlier call are kept."""
    open_tokenizer(tokenizer, end)  # so that one that cannot be used is refused before anything is written
    _keep_plan(output, {"tokenizer": tokenizer, "end": end, "tasks": [asdict(task) for task in tasks]})
    paths = [planned_shard(output, number) for number in range(len(tasks))]
    headers = [path.with_suffix(".json") for path in paths]
    left = []
    for task, path, header in zip(tasks, paths, headers, strict=True):
        if header.exists():
            done(json.loads(header.read_text())["tokens"])
        else:
            left.append((task, path, tokenizer, end))
    if workers <= 1 or len(left) <= 1:
        for arguments in left:
            done(make_shard(*arguments))
    else:
        with ProcessPoolExecutor(min(workers, len(left)), mp_context=get_context("spawn")) as pool:
            futures = [pool.submit(make_shard, *arguments) for arguments in left]
            try:
                for future in futures:
                    done(future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    if not any(json.loads(header.read_text())["documents"] for header in headers):
        for header in headers:
            header.unlink()
        raise DataError(f"there is no document in {', '.join(name for task in tasks[:3] for name in task.inputs[:3])}.")


def make_shard(task: Task, path: Path, tokenizer: str, end: str | None) -> int:
    encode, vocabulary_size = open_tokenizer(tokenizer, end)
    with TokenFileWriter(path, vocabulary_size, {"tokenizer": tokenizer, "inputs": list(task.inputs)}) as writer:
        for place, text in _texts(task):
            if not isinstance(text, str):
                raise DataError(f"{place} has {text!r:.60} as its {task.field!r}, which is no text.")
            try:
                tokens = encode(text)
            except UnicodeEncodeError as error:
                raise DataError(f"{place} cannot be encoded: {error}") from error
            writer.add(np.asarray(tokens, dtype=np.int64))
    return writer.num_tokens


def _keep_plan(output: Path, plan: dict[str, Any]) -> None:
    path, told = output / PLAN, json.dumps(plan, indent=1)
    # A plan that made nothing yet, e.g. of a mistaken command, may be replaced.
    if path.exists() and path.read_text() != told and any(output.glob("shard-*.json")):
        raise DataError(
            f"{output} has shards of other inputs, or by another tokenizer ({path} says which). Give another directory "
            "as output, or remove it."
        )
    output.mkdir(parents=True, exist_ok=True)
    _part(path).write_text(told)
    _part(path).replace(path)


def _texts(task: Task) -> Iterator[tuple[str, Any]]:
    """Values to tokenize, in order, each with its place: text, unless a row has something else in its field."""
    name, field = task.inputs[0], task.field
    if task.kind == "text":
        for name in task.inputs:
            try:
                yield name, Path(name).read_text(encoding="utf-8-sig")
            except UnicodeDecodeError as error:
                raise DataError(f"{name} is no text in UTF-8: {error}") from error
    elif task.kind == "jsonl":
        try:
            with gzip.open(name, "rb") if name.endswith(".gz") else Path(name).open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    place = f"line {number} of {name}"
                    try:
                        text = json.loads(line)[field]
                    except (ValueError, KeyError, TypeError) as error:
                        raise DataError(f"{place} is no JSON object with a {field!r}: {error!r}") from error
                    yield place, text
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{name} is no whole .gz file: {error}") from error
    elif task.kind == "parquet":
        import pyarrow.parquet as parquet

        try:
            with parquet.ParquetFile(name) as file:
                values = (
                    value for batch in file.iter_batches(columns=[field]) for value in batch.column(0).to_pylist()
                )
                yield from ((f"row {row} of {name}", value) for row, value in enumerate(values))
        except (OSError, ValueError, IndexError) as error:
            raise DataError(f"{name} has no whole column {field!r}: {error}") from error
    else:
        rows = _dataset(name, task.split)
        if field not in rows.column_names:
            raise DataError(f"{name} has no column {field!r}, but {', '.join(rows.column_names)}.")
        for number, row in enumerate(rows.select(range(*task.rows)), task.rows[0]):
            yield f"row {number} of {name}", row[field]


def _dataset(name: str, split: str) -> Any:
    import datasets

    place = name.removeprefix("hf:")
    if (Path(place) / "state.json").exists():  # written by save_to_disk
        return datasets.load_from_disk(place)
    return datasets.load_dataset(place, split=split)
