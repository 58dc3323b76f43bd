"""CPU time of a pipeline-parallel step beside a loop written by hand around the same schedule.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 tools/bench/pipeline_parallel.py [--steps 30] [--microbatches 4]

A GPT of 8 blocks in stages, 4 sequences of 128 positions in a micro-batch, fused AdamW, the gradients' norm. By hand:
PyTorch's `Schedule1F1B` over a module of the same layers, with shapes given, its loss broadcast and the norm reduced
over the stages. Both train by turns in each process; a figure is the median over steps of this rank's CPU time, with
its quartiles, of the rank where it is the largest.
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import dream_trainer as dt
from dream_trainer.data.loader import PerRankLoader

VOCABULARY, WIDTH, HEADS, BLOCKS, LENGTH, ROWS, WARM_UP = 256, 128, 4, 8, 128, 4, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """Of all stages, or of one."""

    def __init__(self, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        first, last = BLOCKS * stage // stages, BLOCKS * (stage + 1) // stages
        self.tokens = nn.Embedding(VOCABULARY, WIDTH) if stage == 0 else None
        self.positions = nn.Embedding(LENGTH, WIDTH) if stage == 0 else None
        self.blocks = nn.ModuleList(Block() for _ in range(first, last))
        self.head = nn.Linear(WIDTH, VOCABULARY) if stage == stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def mean_loss(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


class ByHand:
    def __init__(self, microbatches: int) -> None:
        stage, stages = dist.get_rank(), dist.get_world_size()
        self.is_first, self.is_last, self.microbatches = stage == 0, stage == stages - 1, microbatches
        self.model = Model(stage, stages)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        between = torch.empty(ROWS, LENGTH, WIDTH, requires_grad=True)
        tokens, scores = torch.zeros(ROWS, LENGTH, dtype=torch.long), torch.empty(ROWS, LENGTH, VOCABULARY)
        place = PipelineStage(
            self.model,
            stage,
            stages,
            torch.device("cpu"),
            input_args=(tokens if self.is_first else between,),
            output_args=(scores if self.is_last else between,),
        )
        self.schedule = Schedule1F1B(place, microbatches, loss_fn=mean_loss, scale_grads=False)

    def step(self, tokens: Tensor, labels: Tensor) -> Tensor:
        losses: list[Tensor] = []
        inputs = (tokens,) if self.is_first else ()
        self.schedule.step(*inputs, target=labels if self.is_last else None, losses=losses, return_outputs=False)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(loss, dist.get_world_size() - 1)
        gradients = [p.grad for p in self.model.parameters()]
        torch._foreach_mul_(gradients, 1 / self.microbatches)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))).square()
        dist.all_reduce(norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class Batches:
    def __init__(self, rows: int) -> None:
        self.text = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(0))

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield self.text


class Trainer(dt.BaseTrainer, dt.SetupMixin, dt.PipelineParallelMixin):
    microbatches = 0

    def configure_models(self) -> None:
        self.model = Model()

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def configure_dataloaders(self) -> tuple[Any, None]:
        return PerRankLoader(Batches(ROWS * self.microbatches)), None

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        loss = self.forward_backward(self.model, (batch[:, :-1],), batch[:, 1:], mean_loss)
        self.step(self.model, self.optimizer)
        return {"loss": loss}

    def pre_fit(self) -> None:
        self.by_hand = ByHand(self.microbatches)
        self.seconds: list[tuple[float, float]] = []
        self.text = Batches(ROWS * self.microbatches).text
        self.began = time.process_time()

    def post_train_step(self) -> None:
        between = time.process_time()
        self.by_hand.step(self.text[:, :-1], self.text[:, 1:])
        now = time.process_time()
        if self.global_step > WARM_UP:
            self.seconds.append((between - self.began, now - between))
        self.began = now


def main() -> None:
    parser = argparse.ArgumentParser(description="A pipeline-parallel step beside one written by hand.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--microbatches", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    Trainer.microbatches, n = options.microbatches, int(os.environ["WORLD_SIZE"])

    @dataclass
    class Config(dt.BaseTrainerConfig, dt.SetupConfigMixin, dt.PipelineParallelConfigMixin): ...

    config = Config(
        project="bench",
        group="pipeline-parallel",
        experiment="step",
        device_parameters=dt.DeviceParameters(device="cpu", pipeline_parallel=n),
        pipeline_parallel_parameters=dt.PipelineParallelParameters(microbatches=options.microbatches),
        training_parameters=dt.TrainingParameters(
            max_steps=options.steps + WARM_UP, n_epochs=None, train_batch_size=ROWS * options.microbatches
        ),
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with Trainer(config) as trainer:
            trainer.fit()
            quartiles = statistics.quantiles([ours / theirs for ours, theirs in trainer.seconds], n=4)
            hand = statistics.median(theirs for _, theirs in trainer.seconds) * 1e3
            low, middle, high, hand = max(trainer.world.all_gather_object((*quartiles, hand)), key=lambda of: of[1])
            if trainer.world.is_main:
                print(
                    f"torch {torch.__version__}, {n} stages, {options.microbatches} micro-batches: {middle:.2f} "
                    f"({low:.2f} to {high:.2f}) of {hand:.0f} ms of CPU by hand"
                )
        os.chdir("/")


if __name__ == "__main__":
    main()
