"""CPU time of an expert-parallel step beside a loop written by hand around the same collectives.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 tools/bench/expert_parallel.py [--steps 30] [--rows 512]

A network of 4 blocks with 8 experts each, 2 for a token, shared by all ranks; everything else replicated; fused AdamW.
By hand: rows are sorted and exchanged in the layer itself, gradients of what is replicated are summed in one flat
tensor, those of experts divided. Both train by turns in each process; a figure is the median over steps of rank 0's CPU
time, with its quartiles.
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

import dream_trainer as dt
from dream_trainer.data.loader import PerRankLoader
from dream_trainer.modules import MoE

WIDTH, HIDDEN, EXPERTS, CHOSEN, BLOCKS, RATE, WARM_UP = 256, 512, 8, 2, 4, 1e-3, 5


class Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, coming: list[int], leaving: list[int]) -> Tensor:
        ctx.sizes = leaving, coming
        out = rows.new_empty(sum(coming), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), coming, leaving)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return Exchanged.apply(gradient, *ctx.sizes), None, None


class MixtureByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        own = EXPERTS // dist.get_world_size()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.gate, self.up = (nn.Parameter(torch.randn(own, HIDDEN, WIDTH) / 16) for _ in range(2))
        self.down = nn.Parameter(torch.randn(own, WIDTH, HIDDEN) / 16)
        self.bias, self.loads = torch.zeros(EXPERTS), torch.zeros(EXPERTS, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        n = dist.get_world_size()
        scores = self.router(x).sigmoid()
        chosen = (scores.detach() + self.bias).topk(CHOSEN).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        self.loads += counts
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        leaving, parts = counts.view(n, -1).sum(1).tolist(), theirs.view(n, -1)
        coming = parts.sum(1).tolist()
        rows = Exchanged.apply(x[order // CHOSEN], coming, leaving)
        places = torch.arange(EXPERTS // n).repeat(n).repeat_interleave(theirs).argsort(stable=True)
        out = []
        for part, gate, up, down in zip(
            rows[places].split(parts.sum(0).tolist()), self.gate, self.up, self.down, strict=True
        ):
            out.append(F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down))
        back = Exchanged.apply(torch.empty_like(rows).index_copy(0, places, torch.cat(out)), leaving, coming)
        by_token = torch.empty_like(back).index_copy(0, order, back).view(-1, CHOSEN, WIDTH)
        return (by_token * weights.unsqueeze(-1)).sum(1)


class Block(nn.Module):
    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.norm, self.mix, self.mixture = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), mixture

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixture(self.norm(x + self.mix(x)))


class ByHand:
    def __init__(self) -> None:
        self.model = nn.Sequential(*(Block(MixtureByHand()) for _ in range(BLOCKS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.mixtures = [block.mixture for block in self.model]

    def step(self, x: Tensor) -> float:
        n = dist.get_world_size()
        loss = self.model(x).square().mean()
        loss.backward()
        shared = [p for p in self.model.parameters() if p.ndim < 3]
        flat = torch.cat([p.grad.flatten() for p in shared])
        dist.all_reduce(flat)
        flat /= n
        for p, gradient in zip(shared, flat.split([p.numel() for p in shared]), strict=True):
            p.grad = gradient.view_as(p)
        experts = [p.grad for p in self.model.parameters() if p.ndim == 3]
        torch._foreach_div_(experts, float(n))
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(experts))).square()
        dist.all_reduce(norm)
        (norm + flat.square().sum()).sqrt()
        self.optimizer.step()
        self.optimizer.zero_grad()
        loads = torch.stack([mixture.loads for mixture in self.mixtures])
        dist.all_reduce(loads)
        for mixture, of_mixture in zip(self.mixtures, loads.double(), strict=True):
            mixture.bias += RATE * torch.sign(of_mixture.mean() - of_mixture)
            mixture.loads.zero_()
        return loss.item()


class Batches:
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        batch = torch.randn(self.rows, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
        while True:
            yield batch


class Trainer(dt.BaseTrainer, dt.SetupMixin, dt.ExpertParallelMixin):
    rows = 0

    def configure_models(self) -> None:
        mixtures = [MoE(WIDTH, HIDDEN, EXPERTS, CHOSEN, balance_rate=RATE) for _ in range(BLOCKS)]
        self.model = nn.Sequential(*(Block(mixture) for mixture in mixtures))

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def configure_dataloaders(self) -> tuple[Any, None]:
        return PerRankLoader(Batches(self.rows)), None

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        self.backward(self.model(batch).square().mean())
        self.step(self.model, self.optimizer)
        return {}

    def pre_fit(self) -> None:
        self.by_hand = ByHand()
        self.seconds: list[tuple[float, float]] = []
        self.batch = next(iter(Batches(self.rows)))
        self.began = time.process_time()

    def post_train_step(self) -> None:
        between = time.process_time()
        self.by_hand.step(self.batch)
        now = time.process_time()
        if self.global_step > WARM_UP:
            self.seconds.append((between - self.began, now - between))
        self.began = now


def main() -> None:
    parser = argparse.ArgumentParser(description="An expert-parallel step beside one written by hand.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    Trainer.rows, n = options.rows, int(os.environ["WORLD_SIZE"])

    @dataclass
    class Config(dt.BaseTrainerConfig, dt.SetupConfigMixin): ...

    config = Config(
        project="bench",
        group="expert-parallel",
        experiment="step",
        device_parameters=dt.DeviceParameters(device="cpu", expert_parallel=n),
        training_parameters=dt.TrainingParameters(max_steps=options.steps + WARM_UP, n_epochs=None, train_batch_size=1),
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with Trainer(config) as trainer:
            trainer.fit()
            low, middle, high = statistics.quantiles([ours / theirs for ours, theirs in trainer.seconds], n=4)
            if trainer.world.is_main:
                hand = statistics.median(theirs for _, theirs in trainer.seconds) * 1e3
                print(
                    f"torch {torch.__version__}, {n} ranks, {options.rows} rows: {middle:.2f} ({low:.2f} to "
                    f"{high:.2f}) of {hand:.0f} ms of CPU by hand"
                )
        os.chdir("/")


if __name__ == "__main__":
    main()
