"""Memory and time of the gradient sync policies: whole gradients for a window, or shards and more traffic.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 tools/bench/sync_policy.py [--steps 5] [--rounds 3]

16 blocks, 32 MiB of float32 parameters, AdamW, windows of 4 micro-batches; on 4 ranks also as two replicas of two
shards. Times are the best round's median step, since other work on the machine only ever adds to them: the clock's, and
the processor's of all threads of rank 0, which on the CPU carry what crosses ranks. Memory is of a round of its own, in
which tensors are mapped, so that what is freed leaves the process: the highest resident set of rank 0 over its steady
steps, which Linux keeps and lets a process reset, less what it held before the model was built.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer import (
    BaseTrainer,
    BaseTrainerConfig,
    DeviceParameters,
    FSDPConfigMixin,
    FSDPMixin,
    SetupConfigMixin,
    SetupMixin,
    TrainingParameters,
)
from dream_trainer.data.loader import PerRankLoader

WIDTH, BLOCKS, ACCUMULATION, WARM_UP = 512, 16, 4, 2
POLICIES = ("no_sync", "reduce_scatter_each", "defer_all_reduce")
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of mallopt, in glibc's malloc.h


def resident(mark: str) -> float:
    """MiB that the process holds ("VmRSS") or held at most ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(mark)) / 1024


def reset_highest() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def map_blocks_above(size: int) -> None:
    """Lets malloc map larger blocks one by one, which shows what is held and costs time, and keep smaller ones."""
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, size)
    libc.mallopt(TRIM_THRESHOLD, 1 << 30)


class Batches:
    """Batches that cost nothing to load; endless."""

    def __iter__(self) -> Iterator[Tensor]:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
        while True:
            yield x


@dataclass
class Config(BaseTrainerConfig, SetupConfigMixin, FSDPConfigMixin):
    pass


class Trainer(BaseTrainer, SetupMixin, FSDPMixin):
    def post_launch(self) -> None:
        gc.collect()
        self.before = resident("VmRSS")
        self.seconds: list[tuple[float, float]] = []

    def configure_models(self) -> None:
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS))
        self.model = nn.Sequential(*blocks)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def configure_dataloaders(self) -> tuple[Any, None]:
        return PerRankLoader(Batches()), None

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        self.backward((self.model(batch) - batch).square().mean())
        self.step(self.model, self.optimizer)
        return {}

    def post_train_step(self) -> None:
        now = time.perf_counter(), time.process_time()
        if self.global_step > WARM_UP:
            self.seconds.append((now[0] - self.last[0], now[1] - self.last[1]))
        else:
            reset_highest()
        self.last = now


def measure(dp_replicate: int, policy: str, steps: int) -> tuple[float, float, float]:
    """Highest memory in MiB, and median seconds per step by the clock and of the processor, of a run on this rank."""
    config = Config(
        project="bench",
        group="sync",
        experiment=policy,
        device_parameters=DeviceParameters(device="cpu", dp_replicate=dp_replicate),
        training_parameters=TrainingParameters(
            max_steps=steps + WARM_UP,
            n_epochs=None,
            train_batch_size=4,
            gradient_accumulation_steps=ACCUMULATION,
            sync_policy=policy,
        ),
    )
    with Trainer(config) as trainer:
        trainer.fit()
        elapsed, used = (statistics.median(column) for column in zip(*trainer.seconds, strict=True))
        return resident("VmHWM") - trainer.before, elapsed, used


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and time of the gradient sync policies.")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    world_size, is_main = int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0"
    layouts = [1, *([2] if world_size == 4 else [])]
    if is_main:
        print(f"torch {torch.__version__}, {world_size} ranks, load {os.getloadavg()[0]:.1f}")
    runs = [(dp_replicate, policy) for dp_replicate in layouts for policy in POLICIES]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        map_blocks_above(1 << 16)
        measure(*runs[0], 1)  # what the first run imports and opens is not a tensor
        memory = {run: measure(*run, 2)[0] for run in runs}
        map_blocks_above(1 << 25)
        seconds = [{run: measure(*run, options.steps)[1:] for run in runs} for _ in range(options.rounds)]
        os.chdir("/")
    for run in runs if is_main else ():
        elapsed, used = (min(column) * 1e3 for column in zip(*(found[run] for found in seconds), strict=True))
        shape = f"{run[0]} x {world_size // run[0]}"
        print(f"{shape}  {run[1]:22}{memory[run]:6.0f} MiB {elapsed:8.0f} ms, {used:.0f} ms of CPU")


if __name__ == "__main__":
    main()
