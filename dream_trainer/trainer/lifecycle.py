"""Lifecycle: the trainer's events as documented no-ops, in the order in which they happen.

The user's trainer class and callbacks (dream_trainer.callbacks.Callback) may define any of them. No mixin does, so that
a user's event needs no `super()`. Who listens is worked out once, in trainer/event_table.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.nn as nn
from torch.optim import Optimizer


class Lifecycle:
    """The events of a trainer's life."""

    def pre_launch(self) -> None:
        """Before the process group, device and mesh exist."""

    def post_launch(self) -> None:
        """`self.world` is complete."""

    def pre_configure(self) -> None:
        """Before models are built."""

    def post_configure(self) -> None:
        """Models are built, on the meta device under SetupMixin."""

    def pre_setup(self) -> None:
        """Before models are parallelised and materialised."""

    def post_setup(self) -> None:
        """Models, data, optimizers and schedulers are ready; nothing has been resumed yet."""

    def pre_fit(self) -> None:
        """Everything is ready and resumed; training starts."""

    def pre_epoch(self) -> None:
        """An epoch starts, or goes on after a resume."""

    def pre_train_batch(self, batch: Any, batch_idx: int) -> None:
        """Before `training_step`; the batch is on the device."""

    def pre_optimizer_step(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Gradients are reduced and normalised, not yet clipped."""

    def post_optimizer_step(self, model: nn.Module, optimizer: Optimizer) -> None:
        """The optimizer has stepped; its gradients are still there."""

    def post_train_batch(self, result: dict[str, Any], batch_idx: int) -> None:
        """After `training_step`, with its detached result; counters are advanced."""

    def post_train_step(self) -> None:
        """An accumulation window is complete."""

    def pre_val_epoch(self) -> None:
        """Validation starts."""

    def pre_val_batch(self, batch: Any, batch_idx: int) -> None:
        """Before `validation_step`; the batch is on the device."""

    def post_val_batch(self, result: dict[str, Any], batch_idx: int) -> None:
        """After `validation_step`, with its result."""

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        """Validation is over; `metrics` are exact over all samples and ranks, and equal on every rank."""

    def post_epoch(self) -> None:
        """An epoch is complete; `current_epoch` already counts it."""

    def post_fit(self) -> None:
        """Training is over, whether by its limits or by a stop request."""

    def on_exception(self, exc: BaseException) -> None:
        """`fit` fails on this rank. Other ranks may be anywhere: no collectives here."""

    def on_interrupt(self) -> None:
        """A signal (Ctrl-C, SIGTERM) ends the run; all ranks stand at the same step."""

    def on_save(self, path: Path) -> None:
        """A checkpoint is committed at `path`."""

    def on_load(self, path: Path) -> None:
        """The checkpoint at `path` has been loaded."""

    def on_log(self, metrics: dict[str, float], step: int) -> None:
        """Metrics were reduced over all ranks and handed to the loggers. `step` is theirs: training metrics come a step
        later."""

    def teardown(self) -> None:
        """The trainer closes; release what was opened."""
