"""CPU time of a sharded training step beside that of a plain FSDP2 loop: the same model, data and optimizer.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 tools/bench/fsdp_step.py [--steps 10] [--pairs 40] [--by-blocks]

4 blocks, 100 parameters, width 64, fused AdamW and clipping at 1.0. The plain loop gathers block by block, and so does
the trainer with `--by-blocks`; else its model is whole in steps, as small ones are. The plain loop clips by
`torch.nn.utils.clip_grad_norm_`. Both train in one process group, in turns of `--steps` steps, so that drift of the
machine meets both. The trainer's time includes its loop, its agreement between ranks and its guard against NaN. It is
given for the thread that trains, and for the process: gloo's threads, too, which wait by polling and so take more the
busier the machine is.
"""

from __future__ import annotations

import argparse
import os
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from dream_trainer import (
    BaseTrainer,
    BaseTrainerConfig,
    DeviceParameters,
    FSDPConfigMixin,
    FSDPMixin,
    FSDPParameters,
    SetupConfigMixin,
    SetupMixin,
    TrainingParameters,
)
from dream_trainer.data.loader import PerRankLoader

WIDTH, CLIP = 64, 1.0


class Block(nn.Module):
    """24 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.halves = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layers in zip(self.norms, self.halves, strict=True):
            part = norm(x)
            for layer in layers:
                part = F.gelu(layer(part))
            x = x + part
        return x


class Model(nn.Module):
    """4 blocks between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Batches:
    """Batches that cost nothing to load, as often as asked for."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.ready = [torch.randn(128, WIDTH, generator=generator) for _ in range(8)]
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Tensor]:
        return (self.ready[index % 8] for index in range(self.n))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x.flip(1))


def clocks() -> Tensor:
    """Seconds of CPU that this thread and this process took."""
    return torch.tensor([time.thread_time(), time.process_time()], dtype=torch.float64)


class PlainLoop:
    """FSDP2 as its documentation shows it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        self.model = Model()
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = make_optimizer(self.model)

    def run(self, steps: int) -> Tensor:
        """Trains for some steps; what they took by `clocks`."""
        started = clocks()
        for x in Batches(steps):
            loss = loss_of(self.model, x)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return clocks() - started


@dataclass
class Config(BaseTrainerConfig, SetupConfigMixin, FSDPConfigMixin):
    turn: int = 10


class Trainer(BaseTrainer, SetupMixin, FSDPMixin):
    """The same by the framework; after each turn of its own it gives the plain loop one."""

    config: Config

    def configure_models(self) -> None:
        self.model = Model()

    def configure_optimizers(self) -> None:
        self.optimizer = make_optimizer(self.model)

    def configure_dataloaders(self) -> tuple[Any, None]:
        return PerRankLoader(Batches(self.config.training_parameters.max_steps)), None

    def pre_fit(self) -> None:
        self.plain = PlainLoop(self.world.mesh["dp_shard"])
        self.pairs: list[Tensor] = []
        self.started = clocks()

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        loss = loss_of(self.model, batch)
        self.backward(loss)
        self.step(self.model, self.optimizer)
        return {"loss": loss}

    def post_train_step(self) -> None:
        if self.global_step % self.config.turn == 0:
            ours = clocks() - self.started
            self.pairs.append(torch.stack([self.plain.run(self.config.turn), ours]))
            self.started = clocks()


def measure(steps: int, pairs: int, *, by_blocks: bool) -> Tensor:
    """Seconds per step and rank, [pairs, 2, 2]: of the plain loop and the trainer, by both clocks."""
    config = Config(
        project="bench",
        group="fsdp",
        experiment="step",
        device_parameters=DeviceParameters(device="cpu"),
        training_parameters=TrainingParameters(
            max_steps=steps * (pairs + 1), n_epochs=None, gradient_clip_norm=CLIP, train_batch_size=128
        ),
        fsdp_parameters=FSDPParameters(min_group_mib=0) if by_blocks else FSDPParameters(),
        turn=steps,
    )
    with Trainer(config) as trainer:
        trainer.fit()
        seconds = torch.stack(trainer.pairs[1:]) / steps  # the first turn of each warms it up
        dist.all_reduce(seconds)
        return seconds / dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of a sharded step beside a plain FSDP2 loop.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--by-blocks", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        found = measure(options.steps, options.pairs, by_blocks=options.by_blocks)
        os.chdir("/")
    if int(os.environ["RANK"]) == 0:
        n_parameters = len(list(Model().parameters()))
        print(
            f"torch {torch.__version__}, {os.environ['WORLD_SIZE']} ranks, {n_parameters} parameters, "
            f"{options.pairs} pairs of turns, load {os.getloadavg()[0]:.1f}; CPU per step and rank, medians"
        )
        ratios = (found[:, 1] / found[:, 0]).median(0).values
        for clock, sides, ratio in zip(("thread", "process"), found.median(0).values.T * 1e3, ratios, strict=True):
            print(f"{clock:8} plain loop {sides[0]:.2f} ms, Dream Trainer {sides[1]:.2f} ms, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
