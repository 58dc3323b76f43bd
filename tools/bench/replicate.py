"""CPU time and memory of a replicated training step beside that of a plain DistributedDataParallel loop.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 tools/bench/replicate.py [--model small] [--accumulation 4]
    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 tools/bench/replicate.py --memory ours   (or ddp)

A decoder-only transformer of 0.87 M parameters ("small": 4 blocks, width 128, 8 x 64 tokens) or 25 M ("large": 8
blocks, width 512, 1 x 32 tokens, so that communication and the optimizer weigh most), fused AdamW, clipping at 1.0.
Both train in one process group, in turns of `--steps` steps, so that drift of the machine meets both. Time is the
process's, with gloo's threads. With `--memory` one of them trains alone, and two peaks above the process before its
model are printed: of the resident set, and of the bytes that the C library has given out, right after a forward, which
its free lists do not blur (glibc only).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dream_trainer import (
    BaseTrainer,
    BaseTrainerConfig,
    DeviceParameters,
    SetupConfigMixin,
    SetupMixin,
    TrainingParameters,
)
from dream_trainer.data.loader import PerRankLoader

CLIP, VOCABULARY = 1.0, 96
watches_memory = "--memory" in sys.argv


@dataclass
class Shape:
    blocks: int
    width: int
    batch: int
    length: int


SHAPES = {"small": Shape(4, 128, 8, 64), "large": Shape(8, 512, 1, 32)}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.places = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Batches:
    """Batches that cost nothing to load, as often as asked for."""

    def __init__(self, shape: Shape, n: int) -> None:
        generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        size = (shape.batch, shape.length)
        self.ready = [torch.randint(VOCABULARY, size, generator=generator) for _ in range(8)]
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Tensor]:
        return (self.ready[index % 8] for index in range(self.n))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


used_after_forward: list[float] = []


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    if watches_memory:
        used_after_forward.append(used_mib())
    return loss


class PlainLoop:
    """DistributedDataParallel as its documentation shows it."""

    def __init__(self, shape: Shape, accumulation: int) -> None:
        torch.manual_seed(0)
        self.shape, self.accumulation = shape, accumulation
        self.model = DistributedDataParallel(GPT(shape))
        self.optimizer = make_optimizer(self.model)

    def run(self, steps: int) -> float:
        """Trains for some steps; CPU seconds that they took."""
        started = time.process_time()
        for index, tokens in enumerate(Batches(self.shape, steps * self.accumulation), start=1):
            is_last = index % self.accumulation == 0
            with nullcontext() if is_last else self.model.no_sync():
                (loss_of(self.model, tokens) / self.accumulation).backward()
            if is_last:
                nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return time.process_time() - started


@dataclass
class Config(BaseTrainerConfig, SetupConfigMixin):
    model: str = "small"
    turn: int = 10
    is_alone: bool = False


class Trainer(BaseTrainer, SetupMixin):
    """The same by the framework; after each turn of its own it gives the plain loop one."""

    config: Config

    def configure_models(self) -> None:
        self.model = GPT(SHAPES[self.config.model])

    def configure_optimizers(self) -> None:
        self.optimizer = make_optimizer(self.model)

    def configure_dataloaders(self) -> tuple[Any, None]:
        parameters = self.config.training_parameters
        n_batches = parameters.max_steps * parameters.gradient_accumulation_steps
        return PerRankLoader(Batches(SHAPES[self.config.model], n_batches)), None

    def pre_fit(self) -> None:
        self.pairs: list[tuple[float, float]] = []
        accumulation = self.config.training_parameters.gradient_accumulation_steps
        self.plain = None if self.config.is_alone else PlainLoop(SHAPES[self.config.model], accumulation)
        self.started = time.process_time()

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        loss = loss_of(self.model, batch)
        self.backward(loss)
        self.step(self.model, self.optimizer)
        return {"loss": loss}

    def post_train_step(self) -> None:
        if self.plain is not None and self.global_step % self.config.turn == 0:
            ours = time.process_time() - self.started
            self.pairs.append((self.plain.run(self.config.turn), ours))
            self.started = time.process_time()


def train(options: argparse.Namespace, steps: int, *, is_alone: bool) -> Trainer:
    config = Config(
        project="bench",
        group="replicate",
        experiment="step",
        device_parameters=DeviceParameters(device="cpu", overlap_reduce=options.overlap),
        training_parameters=TrainingParameters(
            max_steps=steps,
            n_epochs=None,
            gradient_clip_norm=CLIP,
            gradient_accumulation_steps=options.accumulation,
            train_batch_size=SHAPES[options.model].batch,
        ),
        model=options.model,
        turn=options.steps,
        is_alone=is_alone,
    )
    with Trainer(config) as trainer:
        trainer.fit()
    return trainer


def resident_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class MallocInfo(ctypes.Structure):
    """The C library's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def used_mib() -> float:
    library = ctypes.CDLL("libc.so.6")
    library.mallinfo2.restype = MallocInfo
    found = library.mallinfo2()
    return (found.uordblks + found.hblkhd) / 2**20


def measure_memory(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    before, used_before = resident_mib(), used_mib()
    if options.memory == "ours":
        train(options, options.steps, is_alone=True)
    else:
        PlainLoop(SHAPES[options.model], options.accumulation).run(options.steps)
    if dist.get_rank() == 0:
        used = max(used_after_forward[2:]) - used_before  # after the first steps made the optimizer's state
        resident = resident_mib() - before
        print(
            f"{options.model}, {options.memory}: peaks above the start: resident {resident:.0f} MiB, in use {used:.1f}"
        )
    dist.destroy_process_group()


def measure_time(options: argparse.Namespace) -> None:
    pairs = train(options, options.steps * (options.pairs + 1), is_alone=False).pairs[1:]  # the first warms both up
    if int(os.environ["RANK"]) == 0:
        ratios = sorted(ours / plain for plain, ours in pairs)
        plain, ours = (statistics.median(side) / options.steps * 1e3 for side in zip(*pairs, strict=True))
        quarter = len(ratios) // 4
        print(
            f"torch {torch.__version__}, {os.environ['WORLD_SIZE']} ranks, {options.model}, accumulation "
            f"{options.accumulation}, {len(pairs)} pairs, load {os.getloadavg()[0]:.1f}: CPU per step "
            f"DistributedDataParallel {plain:.2f} ms, Dream Trainer {ours:.2f} ms, ratio "
            f"{statistics.median(ratios):.3f} (quartiles {ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Replicas beside DistributedDataParallel.")
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--memory", choices=("ours", "ddp"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        (measure_memory if options.memory else measure_time)(options)
        os.chdir("/")


if __name__ == "__main__":
    main()
