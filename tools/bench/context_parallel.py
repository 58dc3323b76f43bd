"""CPU time of a context-parallel step beside a loop written by hand around the same collectives.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 tools/bench/context_parallel.py [--steps 30] [--length 512]

A GPT of 4 blocks, replicated, one sequence shared by all ranks, fused AdamW. By hand: keys and values are gathered in
the model's own attention, each of the two pieces attends under a causal bias, gradients are summed in one flat tensor.
Both train by turns in each process; a figure is the median over steps of rank 0's CPU time, with its quartiles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

import dream_trainer as dt
from dream_trainer.compat.pytorch import all_gather_flat, sum_scatter_flat
from dream_trainer.data.loader import PerRankLoader

VOCABULARY, WIDTH, HEADS, KV_HEADS, BLOCKS, WARM_UP = 256, 256, 8, 4, 4, 5


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        whole = part.new_empty((dist.get_world_size(), *part.shape))
        all_gather_flat(whole.flatten(), part.contiguous().flatten(), dist.group.WORLD)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        own = gradient.new_empty(gradient.shape[1:])
        sum_scatter_flat(own.flatten(), gradient.contiguous().flatten(), dist.group.WORLD)
        return own


def attend_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n, rank, size = dist.get_world_size(), dist.get_rank(), q.shape[2] // 2
    both = Gathered.apply(torch.stack((k, v)))
    both = torch.cat((both[..., :size, :], both[..., size:, :].flip(0))).movedim(0, 3).flatten(3, 4)
    out = []
    for chunk, queries in zip((rank, 2 * n - 1 - rank), q.split(size, 2), strict=True):
        end = (chunk + 1) * size
        key, value = both[0, :, :, :end], both[1, :, :, :end]
        bias = causal_lower_right(size, end)
        out.append(F.scaled_dot_product_attention(queries, key, value, bias, enable_gqa=True))
    return torch.cat(out, 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Block(nn.Module):
    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention, head = attention, WIDTH // HEADS
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.sizes = [WIDTH, KV_HEADS * head, KV_HEADS * head]
        self.qkv, self.out = nn.Linear(WIDTH, sum(self.sizes)), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).split(self.sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self, length: int, attention: Any) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    tokens, labels, positions = batch
    return F.cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten())


class ByHand:
    def __init__(self, length: int) -> None:
        self.model = Model(length, attend_by_hand)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def step(self, batch: tuple[Tensor, Tensor, Tensor]) -> float:
        n, rank = dist.get_world_size(), dist.get_rank()
        chunks = [tensor.chunk(2 * n, 1) for tensor in batch]
        tokens, labels, positions = (torch.cat((of[rank], of[2 * n - 1 - rank]), 1) for of in chunks)
        loss = loss_of(self.model, (tokens, labels, positions)) * labels.numel()
        loss.backward()
        parameters = list(self.model.parameters())
        flat = torch.cat([p.grad.flatten() for p in parameters] + [torch.tensor([float(labels.numel())])])
        dist.all_reduce(flat)
        flat /= flat[-1].clone()
        for p, gradient in zip(parameters, flat.split([p.numel() for p in parameters] + [1])[:-1], strict=True):
            p.grad = gradient.view_as(p)
        torch.linalg.vector_norm(flat[:-1])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class Batches:
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        text = torch.randint(VOCABULARY, (1, self.length + 1), generator=torch.Generator().manual_seed(0))
        while True:
            yield text


class Trainer(dt.BaseTrainer, dt.SetupMixin, dt.ContextParallelMixin):
    length = 0

    def configure_models(self) -> None:
        self.model = Model(self.length, attend)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def configure_dataloaders(self) -> tuple[Any, None]:
        return PerRankLoader(Batches(self.length)), None

    def cut_batch(self, batch: Any, cut: Any) -> Any:
        positions = torch.arange(self.length)[None]
        return cut(batch[:, :-1]), cut(batch[:, 1:]), cut(positions)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        self.backward(loss_of(self.model, batch), weight=batch[1].numel())
        self.step(self.model, self.optimizer)
        return {}

    def pre_fit(self) -> None:
        self.by_hand = ByHand(self.length)
        self.seconds: list[tuple[float, float]] = []
        self.batch = next(iter(Batches(self.length)))
        self.began = time.process_time()

    def post_train_step(self) -> None:
        between = time.process_time()
        self.by_hand.step((self.batch[:, :-1], self.batch[:, 1:], torch.arange(self.length)[None]))
        now = time.process_time()
        if self.global_step > WARM_UP:
            self.seconds.append((between - self.began, now - between))
        self.began = now


def main() -> None:
    parser = argparse.ArgumentParser(description="A context-parallel step beside one written by hand.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    Trainer.length, n = options.length, int(os.environ["WORLD_SIZE"])

    @dataclass
    class Config(dt.BaseTrainerConfig, dt.SetupConfigMixin, dt.ContextParallelConfigMixin): ...

    config = Config(
        project="bench",
        group="context-parallel",
        experiment="step",
        device_parameters=dt.DeviceParameters(device="cpu", context_parallel=n),
        training_parameters=dt.TrainingParameters(max_steps=options.steps + WARM_UP, n_epochs=None, train_batch_size=1),
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with Trainer(config) as trainer:
            trainer.fit()
            ratios = [ours / theirs for ours, theirs in trainer.seconds]
            low, middle, high = statistics.quantiles(ratios, n=4)
            if trainer.world.is_main:
                hand = statistics.median(theirs for _, theirs in trainer.seconds) * 1e3
                print(
                    f"torch {torch.__version__}, {n} ranks, {options.length} positions: {middle:.2f} ({low:.2f} to "
                    f"{high:.2f}) of {hand:.0f} ms of CPU by hand"
                )
        os.chdir("/")


if __name__ == "__main__":
    main()
