"""CPU time per training step of Dream Trainer beside the same plain PyTorch loop.

    OMP_NUM_THREADS=1 python tools/bench/overhead.py [--steps 2000] [--pairs 9]

The model is an MLP 32-64-64-10 with batch 32, fused AdamW and clipping at 1.0: small enough that the trainer's own work
shows. Both sides run in one process and one thread, in interleaved pairs; the figures are medians over the pairs.
"bare" is `BaseTrainer` beside a loop with `clip_grad_norm_`. "everyday" is `DreamTrainer` beside a loop that
validates every 200 steps, writes a JSONL line every 10, steps a scheduler and shows a progress bar. "full" is the same
with learning rate, throughput, memory and garbage collection watched, and TensorBoard beside JSONL, next to that loop.
The clock starts with step 100 on both sides: what happens once (imports, opening files, the first collection of
garbage) is no cost of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

from dream_trainer import (
    BaseTrainer,
    BaseTrainerConfig,
    Callback,
    CallbackCollection,
    CheckpointParameters,
    DeviceParameters,
    DreamTrainer,
    DreamTrainerConfig,
    LoggerParameters,
    TrainingParameters,
)
from dream_trainer import callbacks as cb

VALIDATE_EVERY, LOG_EVERY, WARM_UP = 200, 10, 100
# Measured on the same model by others, bare and everyday, as CPU microseconds per step over the plain loop.
PEERS = {"Fabric": (73, 72), "Accelerate": (146, 187), "HF Trainer": (229, 310), "Lightning": (241, 699)}


class Batches:
    """Batches that cost nothing to load, as often as asked for."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ready = [
            (torch.randn(32, 32, generator=generator), torch.randint(10, (32,), generator=generator)) for _ in range(50)
        ]
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Any:
        return (self.ready[index % 50] for index in range(self.n))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def plain_bare(steps: int) -> float:
    model = make_model()
    optimizer = make_optimizer(model)
    started = 0.0
    for step, (x, y) in enumerate(Batches(steps)):
        if step == WARM_UP:
            started = time.process_time()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return time.process_time() - started


def plain_everyday(steps: int) -> float:
    from rich.progress import Progress

    model = make_model()
    optimizer = make_optimizer(model)
    scheduler = CosineAnnealingLR(optimizer, steps)
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log.jsonl", "w") as log, Progress() as bar:
        task = bar.add_task("train", total=steps)
        started = 0.0
        losses = []
        for step, (x, y) in enumerate(Batches(steps), start=1):
            if step == WARM_UP + 1:
                started = time.process_time()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.detach())
            if step % LOG_EVERY == 0:
                value = torch.stack(losses).mean().item()
                losses.clear()
                log.write(json.dumps({"step": step, "train/loss": value, "time": time.time()}) + "\n")
                bar.update(task, completed=step, description=f"loss {value:.4f}")
            if step % VALIDATE_EVERY == 0:
                model.eval()
                with torch.no_grad():
                    found = [F.cross_entropy(model(x), y) for x, y in Batches(10)]
                log.write(json.dumps({"step": step, "val/loss": torch.stack(found).mean().item()}) + "\n")
                model.train()
        return time.process_time() - started


class Timed:
    """Measures from step 100 to the end of training."""

    started = 0.0

    def post_fit(self) -> None:
        self.seconds = time.process_time() - self.started

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        if batch_idx == WARM_UP:
            self.started = time.process_time()
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.backward(loss)
        if not self.is_accumulating_gradients:
            self.step(self.model, self.optimizer, self.scheduler)
        return {"loss": loss}


class Bare(Timed, BaseTrainer):
    scheduler = None

    def setup(self) -> None:
        self.model = make_model()
        self.optimizer = make_optimizer(self.model)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return Batches(self.config.training_parameters.max_steps), None


@dataclass
class EverydayConfig(DreamTrainerConfig):
    pass


class Everyday(Timed, DreamTrainer):
    def configure_models(self) -> None:
        self.model = make_model()

    def configure_optimizers(self) -> None:
        self.optimizer = make_optimizer(self.model)

    def configure_schedulers(self) -> None:
        self.scheduler = CosineAnnealingLR(self.optimizer, self.total_steps)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return Batches(self.config.training_parameters.max_steps), Batches(10)

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        return {"loss": F.cross_entropy(self.model(x), y)}


def names() -> dict[str, str]:
    return {"project": "bench", "group": "overhead", "experiment": str(time.time_ns())}


def ours_bare(steps: int) -> float:
    parameters = TrainingParameters(max_steps=steps, n_epochs=None, gradient_clip_val=1.0)
    config = BaseTrainerConfig(
        **names(), training_parameters=parameters, device_parameters=DeviceParameters(device="cpu")
    )
    with Bare(config) as trainer:
        trainer.fit()
        return trainer.seconds


def ours_everyday(steps: int) -> float:
    return run_everyday(steps, LoggerParameters(), [cb.Progress()])


def ours_full(steps: int) -> float:
    watchers = [cb.Progress(), cb.LearningRate(), cb.Throughput(), cb.Memory(), cb.GarbageCollection()]
    return run_everyday(steps, LoggerParameters(loggers=("jsonl", "tensorboard")), watchers)


def run_everyday(steps: int, loggers: LoggerParameters, callbacks: list[Callback]) -> float:
    parameters = TrainingParameters(
        max_steps=steps, n_epochs=None, gradient_clip_val=1.0, val_every_n_steps=VALIDATE_EVERY, val_every_n_epochs=None
    )
    config = EverydayConfig(
        **names(),
        training_parameters=parameters,
        device_parameters=DeviceParameters(device="cpu"),
        checkpoint_parameters=CheckpointParameters(save_every_n_epochs=None, save_at_end=False, resume=None),
        logger_parameters=loggers,
        callbacks=CallbackCollection(callbacks),
    )
    with Everyday(config) as trainer:
        trainer.fit()
        return trainer.seconds


def measure(plain: Any, ours: Any, steps: int, pairs: int) -> tuple[float, float]:
    """Median microseconds per step of the plain loop, and median difference of ours to it."""
    rows = []
    for _ in range(pairs + 1):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            per_step = 1e6 / (steps - WARM_UP)
            rows.append((plain(steps) * per_step, ours(steps) * per_step))
    rows = rows[1:]  # the first pair warms both sides up
    return statistics.median(a for a, _ in rows), statistics.median(b - a for a, b in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time per step over a plain PyTorch loop.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        bare = measure(plain_bare, ours_bare, options.steps, options.pairs)
        everyday = measure(plain_everyday, ours_everyday, options.steps, options.pairs)
        full = measure(plain_everyday, ours_full, options.steps, options.pairs)
        os.chdir("/")
    print(
        f"torch {torch.__version__}, {options.steps} steps, median of {options.pairs} pairs, CPU microseconds per step"
    )
    print(f"{'':14}{'bare':>10}{'everyday':>10}{'full':>10}")
    print(f"{'plain loop':14}{bare[0]:10.0f}{everyday[0]:10.0f}{full[0]:10.0f}")
    print(f"{'Dream Trainer':14}{bare[1]:+10.1f}{everyday[1]:+10.1f}{full[1]:+10.1f}")
    for name, (first, second) in PEERS.items():
        print(f"{name:14}{first:+10}{second:+10}   (measured elsewhere, same model)")


if __name__ == "__main__":
    main()
