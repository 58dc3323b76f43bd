"""What `dream-trainer data bench` does: it reads training data as a run would, and beside it, by turns, a plain
DataLoader of samples that were loaded before."""

from __future__ import annotations

import runpy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dream_trainer.checks import check_integer
from dream_trainer.data.loader import DistributedDataLoader, ShardReader
from dream_trainer.data.mixtures.mixture import Mixture
from dream_trainer.data.packing.packed_rows import PackedRows
from dream_trainer.data.sources.token_file import TokenFile
from dream_trainer.data.stream import train_stream
from dream_trainer.data.token_counts import count_tokens
from dream_trainer.data.window import DataPosition, TrainStream
from dream_trainer.errors import ConfigError, DataError

if TYPE_CHECKING:
    from dream_trainer.cli.data import Bench

NOT_COUNTED = 10
KEPT_SAMPLES = 256


class Kept(Dataset[Any]):
    """Samples that were loaded before, over and over."""

    def __init__(self, samples: list[Any], length: int) -> None:
        self.samples, self.length = samples, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % len(self.samples)]


@dataclass
class Reading:
    """What reading batches took and gave; times are seconds of each batch.

    Attributes:
        waits: How long the reader waited for it.
        cpu: CPU time of the reader's thread for it.
        samples: Samples read; 0 where batches do not tell.
        tokens: Tokens read; None where batches do not tell.
        places: Places for tokens, with padding.
    """

    waits: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    samples: int = 0
    tokens: int | None = None
    places: int = 0

    def take(self, batches: Iterator[Any]) -> Any:
        """Reads the next batch and measures it."""
        wall, cpu = time.perf_counter(), time.thread_time()
        batch = next(batches)
        self.cpu.append(time.thread_time() - cpu)
        self.waits.append(time.perf_counter() - wall)
        return batch

    def count(self, batch: Any, samples: int) -> None:
        """Counts what is in a batch."""
        self.samples += samples
        tokens = count_tokens(batch)
        if tokens is not None:
            self.tokens = tokens + (self.tokens or 0)
            documents = batch.get("documents") if isinstance(batch, Mapping) else None
            self.places += documents.numel() if isinstance(documents, Tensor) else 0


def bench(options: Bench) -> None:
    """Reads, and prints what was measured."""
    check_integer("batches", options.batches, minimum=1)
    loader = _loader(options)
    stream = train_stream(loader, accumulation=1, dp_rank=0, dp_size=1, seed=options.seed, keeps_state=False)
    try:
        ours, plain, drawn = _read(stream, options)
    finally:
        stream.close()
    _print(stream, ours, plain, drawn)


def _loader(options: Bench) -> Any:
    """The training loader that the target names."""
    target = options.target
    name, colon, function = target.rpartition(":")
    if not colon:
        files = TokenFile(Path(target))
        documents = Mixture({"documents": files}, {"documents": 1}, seed=options.seed)
        rows = PackedRows(documents, options.row_length)
        return DistributedDataLoader(rows, options.batch_size, num_workers=options.workers)
    try:
        members = runpy.run_path(name) if name.endswith(".py") else vars(import_module(name))
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{target!r} cannot be imported: {error}. Give a Python file, or a module that is there."
        ) from error
    if not callable(members.get(function)):
        raise ConfigError(f"{name} has no function {function!r}. Give PROGRAM:FUNCTION that returns a training loader.")
    found = members[function]()
    return found[0] if isinstance(found, tuple) and len(found) == 2 else found


def _read(stream: TrainStream, options: Bench) -> tuple[Reading, Reading | None, dict[str, float]]:
    """Reads the stream and, where its samples have numbers, a plain DataLoader of samples as these, by turns."""
    ours, windows, drawn = Reading(), _windows(stream), DataPosition(0, 0, 0)
    plain = None if stream.reader is None else Reading()
    beside = iter(()) if stream.reader is None else iter(_plain_loader(stream.reader, options))
    columns = (TextColumn("read"), BarColumn(), MofNCompleteColumn(), TextColumn("batches"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=options.batches)
        for number in range(NOT_COUNTED + options.batches):
            if number == NOT_COUNTED:
                ours, plain = Reading(), None if plain is None else Reading()
            try:
                window, batch = ours.take(windows)
            except StopIteration:
                break
            drawn = window.end
            ours.count(batch, window.samples or 0)
            if plain is not None:
                plain.take(beside)
            progress.update(bar, completed=max(0, number + 1 - NOT_COUNTED))
    if not ours.waits:
        raise DataError("the loader yielded no batch. Check its dataset and batch size.")
    return ours, plain, dict(stream.numbers_at(drawn))


def _windows(stream: TrainStream) -> Iterator[Any]:
    """Windows of one batch, pass after pass."""
    while True:
        window = stream.next_window() or stream.next_window()
        if window is None:
            return
        (batch,) = window.batches
        yield window, batch


def _plain_loader(reader: ShardReader, options: Bench) -> DataLoader[Any]:
    """A plain DataLoader of the first samples, loaded before, with the same options."""
    loader = reader.loader
    batches = reader.sampler.indices(0, 0, min(KEPT_SAMPLES, reader.sampler.length))
    dataset: Any = loader.dataset
    samples = [dataset[index] for batch in batches for index in batch]
    count = (NOT_COUNTED + options.batches) * loader.batch_size
    return DataLoader(
        Kept(samples, count),
        loader.batch_size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        prefetch_factor=loader.prefetch_factor,
        multiprocessing_context=loader.multiprocessing_context,
    )


def _print(stream: TrainStream, ours: Reading, plain: Reading | None, drawn: dict[str, float]) -> None:
    seconds = sum(ours.waits)
    columns = ("this loader",) if plain is None else ("this loader", "plain DataLoader")
    table = Table("", *columns, title="Reading without training")

    def row(name: str, show: Callable[[Reading], str]) -> None:
        table.add_row(name, *(show(reading) for reading in (ours, plain) if reading is not None))

    row("batches per second", lambda reading: f"{len(reading.waits) / sum(reading.waits):,.1f}")
    row("wait for a batch, median", lambda reading: f"{statistics.median(reading.waits) * 1e6:,.0f} us")
    row("wait for a batch, longest", lambda reading: f"{max(reading.waits) * 1e6:,.0f} us")
    row("CPU of the thread that reads, median", lambda reading: f"{statistics.median(reading.cpu) * 1e6:,.0f} us")
    if ours.samples:
        table.add_row("samples per second", f"{ours.samples / seconds:,.0f}")
    if ours.tokens is not None:
        table.add_row("tokens per second", f"{ours.tokens / seconds:,.0f}")
        if ours.places:
            table.add_row("share of real tokens", f"{ours.tokens / ours.places:.2%}")
    for name, waited in stream.seconds_by_loader.items():
        table.add_row(f"waited for {name}, in all", f"{waited:,.3f} s")
    workers = 0 if stream.reader is None else stream.reader.loader.num_workers
    for worker in range(workers if workers > 1 else 0):
        # Workers load the batches in turn.
        share = sum(ours.waits[(worker - NOT_COUNTED) % workers :: workers]) / seconds
        table.add_row(f"waited for worker {worker}", f"{share:.0%}")
    for name, value in drawn.items():
        table.add_row(f"{name.removeprefix('data/')} drawn", f"{value:,.6g}")
    Console(width=100).print(table)
