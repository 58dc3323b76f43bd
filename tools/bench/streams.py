"""What a stream of lanes costs the training thread per batch, beside a plain `DataLoader` over the same samples.

    OMP_NUM_THREADS=1 python tools/bench/streams.py [--batches 400] [--repeat 7] [--workers 0 2]

Samples are rows of 512 tokens that a reader of JSON lines yields, 16 in a batch, of 64 shards. "number" hands over one
number of each batch, so that what is not the batch itself shows; "tokens" the whole batch. The plain loop is a
`DataLoader` over an iterable dataset that reads the same shards one after the other, without a state, split over its
workers. Both are read in turns of `--batches`, after a first turn that does not count; between two batches a little is
computed, so that caches are as in training. CPU time of the training thread alone, in microseconds per batch: median
(least - most) over the turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from dream_trainer.data import IterableShards, Map, StreamLoader, train_stream

SHARDS, ROWS, TOKENS, BATCH = 64, 100, 512, 16


class JsonRows:
    """The rows of one file."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset = path, 0

    def __iter__(self) -> Iterator[list[int]]:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while line := file.readline():
                self.offset = file.tell()
                yield json.loads(line)

    def state_dict(self) -> dict[str, int]:
        return {"offset": self.offset}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.offset = state["offset"]


class PlainRows(IterableDataset[torch.Tensor]):
    """All rows of some files, again and again, without a state."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        paths = self.paths if info is None else self.paths[info.id :: info.num_workers]
        while True:
            for path in paths:
                for row in JsonRows(path):
                    yield torch.tensor(row)


def one_number(rows: list[torch.Tensor]) -> int:
    return len(rows)


COLLATE = {"number": one_number, "tokens": default_collate}


def options(workers: int, kind: str) -> dict[str, Any]:
    return {"num_workers": workers, "collate_fn": COLLATE[kind], "prefetch_factor": 32 if workers else None}


def plain_batches(paths: list[Path], workers: int, kind: str) -> Iterator[Any]:
    return iter(DataLoader(PlainRows(paths), BATCH, **options(workers, kind)))


def lane_batches(paths: list[Path], workers: int, kind: str) -> Iterator[Any]:
    source = IterableShards(JsonRows, paths)
    loader = StreamLoader(source, BATCH, transforms=[Map(torch.tensor)], **options(workers, kind))
    stream = train_stream(loader, accumulation=1, dp_rank=0, dp_size=1, seed=0)
    while (window := stream.next_window()) is not None:
        yield from window.batches


def thread_microseconds(batches: Iterator[Any], count: int, weights: torch.Tensor) -> float:
    """CPU time of this thread in `next`, for each of `count` batches."""
    seconds = 0.0
    for _ in range(count):
        begun = time.thread_time()
        batch = next(batches)
        seconds += time.thread_time() - begun
        for _ in range(8):
            weights = torch.tanh(weights @ weights)
        del batch
    return 1e6 * seconds / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2])
    arguments = parser.parse_args()
    weights = torch.randn(96, 96)
    with tempfile.TemporaryDirectory() as name:
        paths = [Path(name) / f"{shard:03}.jsonl" for shard in range(SHARDS)]
        for shard, path in enumerate(paths):
            path.write_text("\n".join([json.dumps([shard] * TOKENS)] * ROWS))
        for workers, rows in product(arguments.workers, COLLATE):
            read = {"plain": plain_batches(paths, workers, rows), "lanes": lane_batches(paths, workers, rows)}
            found: dict[str, list[float]] = {kind: [] for kind in read}
            for turn in range(arguments.repeat + 1):
                for kind, batches in read.items():
                    took = thread_microseconds(batches, arguments.batches, weights)
                    if turn:
                        found[kind].append(took)
            medians = {kind: statistics.median(times) for kind, times in found.items()}
            spread = {kind: f"({min(times):.0f} - {max(times):.0f})" for kind, times in found.items()}
            print(
                f"workers={workers}, {rows}: plain {medians['plain']:.0f} us {spread['plain']}, "
                f"lanes {medians['lanes']:.0f} us {spread['lanes']}: "
                f"{medians['lanes'] - medians['plain']:+.0f} us, x{medians['lanes'] / medians['plain']:.2f}"
            )


if __name__ == "__main__":
    main()
