"""A mixture's batches beside a plain DataLoader of the same rows, in microseconds of CPU of the reading thread, and a
seek in a mixture of ten billion samples.

    OMP_NUM_THREADS=1 python tools/bench/mixture.py [--batches 400] [--rounds 7]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from dream_trainer.data import DistributedDataLoader, Mixture, Stage, train_stream

BATCH = 32


class Rows:
    """Virtual rows of 128 token ids."""

    def __init__(self, length: int) -> None:
        self.length, self.row = length, torch.zeros(128, dtype=torch.int64)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.row


def make_mixture() -> Mixture:
    """Ten billion samples of three sources, with a ramp and limits."""
    return Mixture(
        {"a": Rows(6 * 10**9), "b": Rows(3 * 10**9), "c": Rows(10**9)},
        {"a": 5, "b": 3, "c": 1},
        stages=[Stage(at=10**8, weights={"a": 1, "b": 1, "c": 1}, ramp=10**8)],
        max_epochs={"a": 1, "b": 1, "c": 1},
    )


def windows(dataset: Any, workers: int) -> Iterator[Any]:
    """Batches as the trainer's loop takes them."""
    loader = DistributedDataLoader(dataset, BATCH, num_workers=workers)
    stream = train_stream(loader, accumulation=1, dp_rank=0, dp_size=1, seed=0)
    while (window := stream.next_window()) is not None:
        yield from window.batches
    stream.close()


def cost(batches: Iterator[Any], count: int) -> float:
    """Microseconds of CPU of this thread for each batch, after the first few."""
    for _ in range(20):
        next(batches)
    started = time.thread_time()
    for _ in range(count):
        next(batches)
    return (time.thread_time() - started) / count * 1e6


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(f"batches of {BATCH}; us of CPU of the reading thread per batch: median (lowest, highest)")
    for workers in (0, 2):
        found: dict[str, list[float]] = {"plain DataLoader": [], "our loader, same rows": [], "mixture": []}
        rows = Rows(10**6)
        for _ in range(options.rounds):
            plain = iter(DataLoader(rows, BATCH, num_workers=workers))  # type: ignore[arg-type]
            found["plain DataLoader"].append(cost(plain, options.batches))
            del plain
            found["our loader, same rows"].append(cost(windows(rows, workers), options.batches))
            found["mixture"].append(cost(windows(make_mixture(), workers), options.batches))
        for name, costs in found.items():
            middle = statistics.median(costs)
            print(f"{workers} workers  {name:24}{middle:8.1f} ({min(costs):.1f}, {max(costs):.1f})")
    state = make_mixture().state_at(10**9)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    mixture = make_mixture()
    mixture.begin(0, state)
    mixture.set_epoch(0)
    mixture[10**9]
    seconds = time.perf_counter() - started
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"seek to sample 10^9 of 10^10: {seconds:.2f} s, {grown:.1f} MB")
    rounds: dict[int, list[float]] = {0: [], 10**9: []}
    for _ in range(options.rounds):
        for first, costs in rounds.items():
            started = time.thread_time()
            for position in range(first, first + 20 * 1024):
                mixture[position]
            costs.append((time.thread_time() - started) / (20 * 1024) * 1e6)
    for first, costs in rounds.items():
        print(
            f"samples from {first:>13,} on: {statistics.median(costs):.2f} us each ({min(costs):.2f}, {max(costs):.2f})"
        )


if __name__ == "__main__":
    main()
