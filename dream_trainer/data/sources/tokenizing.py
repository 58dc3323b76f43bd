"""From raw text to token files, in parallel, shard by shard; a shard that is there is not made again."""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dream_trainer.checks import refuse
from dream_trainer.data.sources.token_file import PLAN, TokenFileWriter, planned_shard
from dream_trainer.errors import DataError

TEXTS_PER_SHARD = 1000
ROWS_PER_SHARD = 50_000
Encode = Callable[[str], npt.ArrayLike]
Tokenizer = tuple[Encode, int]  # and how many token ids there are


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


def open_tokenizer(name: str, end: str | None) -> Tokenizer:
    """The tokenizer of a name: "bytes" (256 ends a document), a tokenizer.json, or a name for transformers."""
    if name == "bytes":
        if end is not None:
            raise DataError(f"the tokenizer 'bytes' ends a document with 256, not {end!r}. Leave --end out.")
        return lambda text: [*text.encode(), 256], 257
    if name.endswith(".json"):
        from tokenizers import Tokenizer as FastTokenizer

        refuse(not Path(name).exists(), f"there is no tokenizer {name}.", DataError)
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
    if end is not None and end_id is None:
        raise DataError(f"{name} has no token {end!r}.")
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
    left = []
    for number, task in enumerate(tasks):
        path = planned_shard(output, number)
        header = path.with_suffix(".json")
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
    headers = [planned_shard(output, number).with_suffix(".json") for number in range(len(tasks))]
    if not any(json.loads(header.read_text())["documents"] for header in headers):
        for header in headers:
            header.unlink()
        raise DataError(f"there is no document in {', '.join(name for task in tasks[:3] for name in task.inputs[:3])}.")


def make_shard(task: Task, path: Path, tokenizer: str, end: str | None) -> int:
    encode, vocabulary_size = open_tokenizer(tokenizer, end)
    facts = {"tokenizer": tokenizer, "inputs": list(task.inputs)}
    with TokenFileWriter(path, vocabulary_size, facts) as writer:
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
    part = path.with_name(path.name + ".part")
    part.write_text(told)
    part.replace(path)


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
