"""CPU time per training step of Dream Trainer beside the same plain PyTorch loop.

    OMP_NUM_THREADS=1 python tools/bench/overhead.py [--steps 4000] [--repeat 3]

The model is an MLP 32-64-64-10 with batch 32, fused AdamW and clipping at 1.0: small enough that the trainer's own work
shows. Both sides run in one process and one thread, by turns of 50 steps: the plain loop does its turn where the
trainer asks for its next batch, so that whatever slows the machine slows both. A figure is the median over blocks of
200 steps, with one validation each where there are any, of one side's CPU time or of the difference of the two; the
table has the median over runs, and the least and the most of them.
"bare" is `BaseTrainer` beside a loop with `clip_grad_norm_`. "everyday" is `DreamTrainer` beside a loop that
validates every 200 steps, writes a JSONL line every 10, steps a scheduler and shows a progress bar. "full" is the same
with learning rate, throughput, memory and garbage collection watched, and TensorBoard beside JSONL, next to that loop.
The first 200 steps are not counted: what happens once (imports, opening files, the first collection of garbage) is no
cost of a step.
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
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
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

Loop = Generator[None, None, None]
VALIDATE_EVERY, LOG_EVERY, TURN = 200, 10, 50
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

    def __iter__(self) -> Iterator[Any]:
        return (self.ready[index % 50] for index in range(self.n))


class Turns(Batches):
    """The trainer's batches; after every 50 of them another loop has its turn.

    Attributes:
        ours: CPU seconds from each turn to the next.
        plain: CPU seconds of each turn.
    """

    def __init__(self, n: int, plain: Iterator[None]) -> None:
        super().__init__(n)
        self._plain = plain
        self.ours: list[float] = []
        self.plain: list[float] = []

    def __iter__(self) -> Iterator[Any]:
        left = 0.0
        for index in range(self.n):
            if index % TURN == 0:
                arrived = time.process_time()
                if index > 0:
                    self.ours.append(arrived - left)
                for _ in range(TURN):
                    next(self._plain)
                left = time.process_time()
                self.plain.append(left - arrived)
            yield self.ready[index % 50]

    def blocks(self) -> list[tuple[float, float]]:
        """CPU microseconds per step of the plain loop and of the trainer, for each block but the first."""
        turns = VALIDATE_EVERY // TURN
        starts = range(turns, len(self.ours) - turns + 1, turns)
        per_step = 1e6 / VALIDATE_EVERY
        return [(sum(self.plain[i : i + turns]) * per_step, sum(self.ours[i : i + turns]) * per_step) for i in starts]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def plain_bare(steps: int) -> Loop:
    model = make_model()
    optimizer = make_optimizer(model)
    for x, y in Batches(steps):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def plain_everyday(steps: int) -> Loop:
    from rich.progress import Progress

    model = make_model()
    optimizer = make_optimizer(model)
    scheduler = CosineAnnealingLR(optimizer, steps)
    with open("plain.jsonl", "w") as log, Progress(auto_refresh=False) as bar:
        task = bar.add_task("train", total=steps)
        losses = []
        for step, (x, y) in enumerate(Batches(steps), start=1):
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
            yield


class Fitting:
    """The same step under either trainer."""

    def __init__(self, config: Any, turns: Turns) -> None:
        super().__init__(config)
        self.turns = turns

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.backward(loss)
        if not self.is_accumulating_gradients:
            self.step(self.model, self.optimizer, self.scheduler)
        return {"loss": loss}

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return self.turns, Batches(10)


class Bare(Fitting, BaseTrainer):
    scheduler = None

    def setup(self) -> None:
        self.model = make_model()
        self.optimizer = make_optimizer(self.model)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return self.turns, None


@dataclass
class EverydayConfig(DreamTrainerConfig):
    pass


class Everyday(Fitting, DreamTrainer):
    def configure_models(self) -> None:
        self.model = make_model()

    def configure_optimizers(self) -> None:
        self.optimizer = make_optimizer(self.model)

    def configure_schedulers(self) -> None:
        self.scheduler = CosineAnnealingLR(self.optimizer, self.total_steps)

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        return {"loss": F.cross_entropy(self.model(x), y)}


def names() -> dict[str, str]:
    return {"project": "bench", "group": "overhead", "experiment": str(time.time_ns())}


def fit_bare(turns: Turns) -> None:
    parameters = TrainingParameters(max_steps=turns.n, n_epochs=None, gradient_clip_val=1.0)
    config = BaseTrainerConfig(
        **names(), training_parameters=parameters, device_parameters=DeviceParameters(device="cpu")
    )
    with Bare(config, turns) as trainer:
        trainer.fit()


def fit_everyday(turns: Turns) -> None:
    run_everyday(turns, LoggerParameters(), [cb.Progress()])


def fit_full(turns: Turns) -> None:
    watchers = [cb.Progress(), cb.LearningRate(), cb.Throughput(), cb.Memory(), cb.GarbageCollection()]
    run_everyday(turns, LoggerParameters(loggers=("jsonl", "tensorboard")), watchers)


def run_everyday(turns: Turns, loggers: LoggerParameters, callbacks: list[Callback]) -> None:
    parameters = TrainingParameters(
        max_steps=turns.n,
        n_epochs=None,
        gradient_clip_val=1.0,
        val_every_n_steps=VALIDATE_EVERY,
        val_every_n_epochs=None,
    )
    config = EverydayConfig(
        **names(),
        training_parameters=parameters,
        device_parameters=DeviceParameters(device="cpu"),
        checkpoint_parameters=CheckpointParameters(save_every_n_epochs=None, save_at_end=False, resume=None),
        logger_parameters=loggers,
        callbacks=CallbackCollection(callbacks),
    )
    with Everyday(config, turns) as trainer:
        trainer.fit()


def measure(plain: Callable[[int], Loop], fit: Callable[[Turns], None], steps: int) -> tuple[float, float]:
    """Median microseconds per step of the plain loop, and median difference of ours to it."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.closing(plain(steps)) as loop,
    ):
        turns = Turns(steps, loop)
        fit(turns)
    blocks = turns.blocks()
    return statistics.median(a for a, _ in blocks), statistics.median(b - a for a, b in blocks)


CASES = {"bare": (plain_bare, fit_bare), "everyday": (plain_everyday, fit_everyday), "full": (plain_everyday, fit_full)}


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time per step over a plain PyTorch loop.")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for _ in range(options.repeat):
            for name, (plain, fit) in CASES.items():
                found[name].append(measure(plain, fit, options.steps))
        os.chdir("/")
    print(f"torch {torch.__version__}, {options.repeat} x {options.steps} steps, CPU microseconds per step")
    print(f"{'':14}" + "".join(f"{name:>18}" for name in CASES))
    plain_loop = [statistics.median(plain for plain, _ in rows) for rows in found.values()]
    print(f"{'plain loop':14}" + "".join(f"{value:18.0f}" for value in plain_loop))
    ours = [sorted(more for _, more in rows) for rows in found.values()]
    texts = [f"{statistics.median(own):+.0f} ({own[0]:+.0f}..{own[-1]:+.0f})" for own in ours]
    print(f"{'Dream Trainer':14}" + "".join(f"{text:>18}" for text in texts))
    for name, (first, second) in PEERS.items():
        print(f"{name:14}{first:+18}{second:+18}   (measured elsewhere, same model, in pairs of runs)")


if __name__ == "__main__":
    main()
