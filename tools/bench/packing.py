"""What packed rows cost beside a plain DataLoader of the same rows, made before; and what packing itself takes.

    OMP_NUM_THREADS=1 python tools/bench/packing.py [--row-length 1024] [--batch-size 8] [--batches 300] [--repeat 5]

A mixture of three sources, whose documents have lengths as texts have them (log-normal). The loaders are read by turns,
a batch each, in one process. "training thread" is the CPU time of the thread that takes batches: with workers, all that
a step pays for them; median over batches, and without workers, where a block is packed between two of them, the mean.
Of the repetitions the median is shown, and the least and the most.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dream_trainer.data import DistributedDataLoader, Mixture, PackedRows, train_stream
from dream_trainer.data.packing.packed_rows import Row, pack_best_fit, pack_concatenated

WEIGHTS = {"web": 5, "code": 3, "books": 1}
MEDIANS = {"web": 400, "code": 800, "books": 3000}


class Documents(Dataset[NDArray[np.uint16]]):
    """`count` documents of one text of random tokens."""

    def __init__(self, count: int, median: int, seed: int) -> None:
        random = np.random.RandomState(seed)
        self.lengths = np.maximum(random.lognormal(np.log(median), 1.0, count).astype(np.int64), 1)
        self.text = random.randint(0, 50_000, int(self.lengths.max())).astype(np.uint16)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> NDArray[np.uint16]:
        return self.text[: self.lengths[index]]


class Ready(Dataset[dict[str, Tensor]]):
    """Rows that were made before, over and over."""

    def __init__(self, rows: list[dict[str, Tensor]], length: int) -> None:
        self.rows, self.length = rows, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index % len(self.rows)]


def packed_rows(row_length: int) -> PackedRows:
    sources = {name: Documents(20_000, median, seed) for seed, (name, median) in enumerate(MEDIANS.items())}
    return PackedRows(Mixture(sources, weights=WEIGHTS), row_length)


def microseconds(batches: Iterator[Any], clock: Callable[[], float]) -> float:
    begun = clock()
    next(batches)
    return (clock() - begun) * 1e6


def windows(rows: Any, batch_size: int, workers: int) -> Iterator[Any]:
    """Batches as the trainer takes them."""
    loader = DistributedDataLoader(rows, batch_size, num_workers=workers)
    stream = train_stream(loader, accumulation=1, dp_rank=0, dp_size=1, seed=0)
    while (window := stream.next_window()) is not None:
        yield from window.batches


def compare(rows: PackedRows, ready: Ready, batch_size: int, workers: int, count: int) -> tuple[float, float, float]:
    """Microseconds of the training thread for a batch: of the plain loader, of our stream over the same ready rows, of
    it over packed rows."""
    readers = (
        iter(DataLoader(ready, batch_size, num_workers=workers)),
        windows(ready, batch_size, workers),
        windows(rows, batch_size, workers),
    )
    took: tuple[list[float], ...] = ([], [], [])
    for _ in range(count):
        for reader, times in zip(readers, took, strict=True):
            times.append(microseconds(reader, time.thread_time))
    summary = statistics.median if workers else statistics.fmean  # in the process, packing comes once for many rows
    plain, streamed, packed = (summary(times[20:]) for times in took)
    return plain, streamed, packed


def spread(values: list[float], unit: str) -> str:
    return f"{statistics.median(values):8.1f} {unit} ({min(values):.1f} to {max(values):.1f})"


def show_packing(rows: PackedRows, row_length: int) -> None:
    lengths = rows.documents.lengths(0, 20_000)  # type: ignore[attr-defined]
    packers: dict[str, Callable[[Any, int], list[Row]]] = {
        "best fit": pack_best_fit,
        "concatenate": pack_concatenated,
    }
    for name, pack in packers.items():
        took = []
        for _ in range(5):
            begun = time.process_time()
            packed = pack(lengths, row_length)
            took.append((time.process_time() - begun) / len(lengths) * 1e6)
        full = lengths.sum() / (len(packed) * row_length)
        print(f"{name:12} {spread(took, 'us a document')}, rows {full:.2%} full")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row-length", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    rows = packed_rows(options.row_length)
    show_packing(rows, options.row_length)
    num_rows = options.batch_size * options.batches
    made = [rows[position] for position in range(min(num_rows, 1024))]
    full = sum(int((row["documents"] >= 0).sum()) for row in made) / (len(made) * options.row_length)
    print(f"mixture of {len(MEDIANS)} sources, {rows.documents_per_block} documents a block: rows {full:.2%} full")
    for workers in (0, 2):
        found = [
            compare(rows, Ready(made, 2 * num_rows), options.batch_size, workers, options.batches)
            for _ in range(options.repeat)
        ]
        print(f"\ntraining thread, {workers} workers, batches of {options.batch_size} rows of {options.row_length}:")
        readers = "plain DataLoader", "our stream", "our stream, packed"
        for name, values in zip(readers, zip(*found, strict=True), strict=True):
            print(f"  {name:20} {spread(list(values), 'us a batch')}")
        more = [packed - plain for plain, _, packed in found]
        print(f"  {'packed - plain':20} {spread(more, 'us a batch')}")


if __name__ == "__main__":
    main()
