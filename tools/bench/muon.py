"""CPU time of a training step by Muon, ours and PyTorch's, beside one by AdamW, for the model of examples/gpt.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 tools/bench/muon.py [--rounds 20] [--shard]

One trainer trains three equal models in turn, a window each, so that drift of the machine meets all: by AdamW alone, by
Muon for the matrices of the blocks and AdamW for the rest, and the same with torch.optim.Muon. 16 windows of 128 bytes
per rank and step, clipping at 1.0, batches ready in memory. Given are whole steps, from one batch to the next, and what
the optimizers take of them, by the clock of the process: gloo's threads, too.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

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
from dream_trainer.optim import OptimizerParameters, build_optimizers

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))
from model import GPT, GPTConfig

VARIANTS = ("AdamW", "Muon", "torch.optim.Muon")


class Batches:
    """Bytes that cost nothing to load: `n` times 16 windows and the byte after each."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.ready = [torch.randint(0, 256, (16, 129), generator=generator) for _ in range(8)]
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Tensor]:
        return (self.ready[index % 8] for index in range(self.n))


@dataclass
class Config(BaseTrainerConfig, SetupConfigMixin, FSDPConfigMixin):
    rounds: int = 20


class Trainer(BaseTrainer, SetupMixin, FSDPMixin):
    """Three models, each trained by every third batch."""

    config: Config

    def configure_models(self) -> None:
        self.by_adamw, self.by_ours, self.by_theirs = (GPT(GPTConfig()) for _ in VARIANTS)

    def init_weights(self) -> None:
        for model in (self.by_adamw, self.by_ours, self.by_theirs):
            model.init_weights()

    def configure_optimizers(self) -> None:
        muon = OptimizerParameters(name="muon", lr=1e-3, weight_decay=0.1)
        self.adamw = build_optimizers(OptimizerParameters(lr=1e-3, weight_decay=0.1), self.by_adamw)
        self.ours = build_optimizers(muon, self.by_ours)
        self.theirs = build_optimizers(muon, self.by_theirs)
        group = {**self.theirs[0].param_groups[0]}
        options = ("lr", "weight_decay", "momentum", "nesterov", "ns_steps", "adjust_lr_fn")
        self.theirs[0] = torch.optim.Muon(group["params"], **{name: group[name] for name in options})

    def configure_dataloaders(self) -> tuple[Any, None]:
        return PerRankLoader(Batches(self.config.training_parameters.max_steps)), None

    def pre_fit(self) -> None:
        self.seconds: list[list[float]] = []
        self.in_optimizers = 0.0
        for optimizer in (*self.adamw, *self.ours, *self.theirs):
            optimizer.register_step_pre_hook(self.enter)
            optimizer.register_step_post_hook(self.leave)
        self.started = time.process_time()

    def enter(self, *_: Any) -> None:
        self.entered = time.process_time()

    def leave(self, *_: Any) -> None:
        self.in_optimizers += time.process_time() - self.entered

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        models: list[tuple[torch.nn.Module, list[Optimizer]]] = [
            (self.by_adamw, self.adamw),
            (self.by_ours, self.ours),
            (self.by_theirs, self.theirs),
        ]
        model, optimizers = models[batch_idx % 3]
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.backward(loss)
        self.step(model, optimizers)
        return {"loss": loss}

    def post_train_step(self) -> None:
        now = time.process_time()
        self.seconds.append([now - self.started, self.in_optimizers])
        self.started, self.in_optimizers = time.process_time(), 0.0


def measure(rounds: int, shard: bool) -> Tensor:
    """Seconds per rank, [rounds, variant, 2]: of whole steps, and in optimizers."""
    n_ranks = int(os.environ["WORLD_SIZE"])
    mesh = {"dp_replicate": 1, "dp_shard": n_ranks} if shard else {"dp_replicate": n_ranks, "dp_shard": 1}
    config = Config(
        project="bench",
        group="muon",
        experiment="step",
        device_parameters=DeviceParameters(device="cpu", **mesh),
        training_parameters=TrainingParameters(
            max_steps=3 * (rounds + 2), n_epochs=None, gradient_clip_norm=1.0, train_batch_size=16
        ),
        rounds=rounds,
    )
    with Trainer(config) as trainer:
        trainer.fit()
        seconds = torch.tensor(trainer.seconds, dtype=torch.float64)[6:]  # two steps of each warm it up
        dist.all_reduce(seconds)
        return seconds.view(rounds, 3, 2) / n_ranks


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of a step by Muon beside one by AdamW.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--shard", action="store_true", help="shard the models over ranks; else they are replicated")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        found = measure(options.rounds, options.shard)
        os.chdir("/")
    if int(os.environ["RANK"]) != 0:
        return
    layout = "sharded" if options.shard else "replicated"
    print(
        f"torch {torch.__version__}, {os.environ['WORLD_SIZE']} ranks, {layout}, {options.rounds} rounds, "
        f"load {os.getloadavg()[0]:.1f}; CPU per step and rank, medians (quartiles)"
    )
    for place, name in enumerate(VARIANTS):
        ratios = found[:, place, 0] / found[:, 0, 0]
        low, middle, high = ratios.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
        whole, alone = (found[:, place].median(0).values * 1e3).tolist()
        print(
            f"{name:17} step {whole:6.1f} ms, of it optimizers {alone:6.1f} ms; "
            f"{middle:.3f} ({low:.3f}-{high:.3f}) of AdamW's step"
        )


if __name__ == "__main__":
    main()
