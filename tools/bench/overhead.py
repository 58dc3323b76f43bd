"""CPU time per step of Dream Trainer beside the same plain PyTorch loop.

    OMP_NUM_THREADS=1 python tools/bench/overhead.py [--batches 3000] [--repeat 3] [--only "map bare"] [--device cuda]

The model is an MLP 32-64-64-10 with batches of 32, fused AdamW and clipping at 1.0: small enough that the trainer's own
work shows. Its data come from a `DataLoader` in the process: over ready batches, over a map-style dataset, over an
iterable one. "bare" is `BaseTrainer` beside a loop with `clip_grad_norm_`, "accumulation" the same with 4 micro-batches
in a step. "everyday" is `DreamTrainer` beside a loop that validates every 200 steps, writes a JSONL line every 10,
steps a scheduler and shows a progress bar. "full" is the same with learning rate, throughput, memory and garbage
collection watched, and TensorBoard beside JSONL, next to that loop. How they are measured: `tasks.py`; beside other
trainers: `compare.py`.
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
from tasks import TASKS, VALIDATE_EVERY, Row, Turns, make_optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from dream_trainer import (
    BaseTrainer,
    BaseTrainerConfig,
    CallbackCollection,
    CheckpointParameters,
    DeviceParameters,
    DreamTrainer,
    DreamTrainerConfig,
    LoggerParameters,
    TrainingParameters,
    callbacks as cb,
)


class Fitting:
    """The same step under either trainer."""

    def __init__(self, config: Any, row: Row, turns: Turns) -> None:
        super().__init__(config)
        self.row, self.turns, self.task = row, turns, TASKS[row.task]

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.turns.tick()
        loss = self.task.loss(self.model, batch)
        self.backward(loss)
        self.step(self.model, self.optimizer, self.scheduler)
        return {"loss": loss}


class Bare(Fitting, BaseTrainer):
    scheduler = None

    def setup(self) -> None:
        self.model = self.task.model()
        self.optimizer = make_optimizer(self.model.parameters())

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return self.task.loader(self.row.batches, self.row.device), None


@dataclass
class EverydayConfig(DreamTrainerConfig):
    pass


class Everyday(Fitting, DreamTrainer):
    def configure_models(self) -> None:
        self.model = self.task.model()

    def configure_optimizers(self) -> None:
        self.optimizer = make_optimizer(self.model.parameters())

    def configure_schedulers(self) -> None:
        self.scheduler = CosineAnnealingLR(self.optimizer, self.row.steps)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return self.task.loader(self.row.batches, self.row.device), self.task.loader(10, self.row.device)

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.task.loss(self.model, batch)}


class Replicated(Fitting, DreamTrainer):
    """Without logs, validation and saves; on as many processes as there are."""

    scheduler = None

    def configure_models(self) -> None:
        self.model = self.task.model()

    def configure_optimizers(self) -> None:
        self.optimizer = make_optimizer(self.model.parameters())

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return self.task.loader(self.row.batches), None


def run(row: Row, turns: Turns) -> None:
    """Trains `row` by Dream Trainer."""
    is_everyday = row.is_everyday
    parameters = TrainingParameters(
        max_steps=row.steps,
        n_epochs=None,
        gradient_clip_norm=1.0,
        gradient_accumulation_steps=row.accumulation,
        val_every_n_steps=VALIDATE_EVERY if is_everyday else None,
        val_every_n_epochs=None,
    )
    names = {"project": "bench", "group": "overhead", "experiment": str(time.time_ns())}
    devices = DeviceParameters(device=row.device)
    is_spread = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if not is_everyday and not is_spread:
        config = BaseTrainerConfig(**names, training_parameters=parameters, device_parameters=devices)
        with Bare(config, row, turns) as trainer:
            trainer.fit()
        return
    if is_spread:
        names["experiment"] = os.environ.get("MASTER_PORT", "0")  # the same on all ranks
        devices = DeviceParameters(device="cpu", dp_shard=1)
    watchers = [cb.Progress()] if is_everyday else []
    if row.kind == "full":
        watchers += [cb.LearningRate(), cb.Throughput(), cb.Memory(), cb.GarbageCollection()]
    loggers = ("jsonl", "tensorboard") if row.kind == "full" else ("jsonl",) if is_everyday else ()
    config = EverydayConfig(
        **names,
        training_parameters=parameters,
        device_parameters=devices,
        checkpoint_parameters=CheckpointParameters(save_every_n_epochs=None, save_at_end=False, resume=None),
        logger_parameters=LoggerParameters(loggers=loggers),
        callbacks=CallbackCollection(watchers),
    )
    with (Everyday if is_everyday else Replicated)(config, row, turns) as trainer:
        trainer.fit()


def measure(row: Row) -> dict[str, float]:
    """What `Turns.result` has after a run of Dream Trainer."""
    turns = Turns(row)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run(row, turns)
    return turns.result()


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time per step over a plain PyTorch loop.")
    parser.add_argument("--batches", type=int, default=3000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help="only rows whose name contains one of these, separated by commas")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = ("bare", "accumulation", "everyday", "full")
    rows = [Row(task, kind, options.batches, options.device) for task in ("ready", "map", "iterable") for kind in kinds]
    rows = [row for row in rows if any(part in f"{row.task} {row.kind}" for part in options.only.split(","))]
    found: dict[Row, list[dict[str, float]]] = {row: [] for row in rows}
    start = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for _ in range(options.repeat):
            for row in rows:
                found[row].append(measure(row))
        os.chdir(start)
    print(
        f"torch {torch.__version__}, {options.device}, {options.repeat} x {options.batches} batches, CPU time per batch"
    )
    for row, results in found.items():
        ratios, wall = (sorted(result[clock] for result in results) for clock in ("cpu", "wall"))
        plain, more = (statistics.median(result[key] for result in results) for key in ("plain_us", "more_us"))
        print(
            f"{row.task:9}{row.kind:13} {statistics.median(ratios):.3f}x ({ratios[0]:.3f}..{ratios[-1]:.3f})"
            f"   plain {plain:.0f} us, {more:+.0f} us; wall {statistics.median(wall):.3f}x"
        )
    if options.json is not None:
        options.json.write_text(json.dumps({f"{row.task} {row.kind}": results for row, results in found.items()}))


if __name__ == "__main__":
    main()
