"""EpochRows: one row of numbers for each epoch, kept, printed, and handed to functions `(trainer, epoch, metrics)`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dream_trainer.events.callback import Callback
from dream_trainer.loggers.buffer import MetricBuffer
from dream_trainer.loggers.formatting import format_metrics, format_number
from dream_trainer.screen import show

if TYPE_CHECKING:
    from dream_trainer.distributed.ranks import Ranks
    from dream_trainer.trainer.abstract import AbstractTrainer

# Steps after which what lies on the device is read, which waits for it; an epoch may have any number of them.
READ_EVERY = 1000
LINE_SECONDS = 10.0

Row = dict[str, float]


class EpochRows(Callback):
    """The exact means of each epoch's training, and its last validation.

    The means are over the samples of all ranks, or over the labels that count where the loss is a mean of those.

    An epoch that training stops in has a row of what was trained so far, until it is complete.

    Args:
        tell: Called with each complete epoch's number, from 0, and its metrics.
        prints: Whether rank 0 prints a line for each row, and in long epochs one every ten seconds.

    Attributes:
        prints: The same.
        rows: "epoch" (from 0), "step", "seconds" and "lr", then the metrics by name; a dict for each epoch.
    """

    order = 100  # after others that log or act at an epoch's end

    def __init__(self, tell: Sequence[Callable[[int, Row], None]], *, prints: bool) -> None:
        self.rows: list[Row] = []
        self._tell, self.prints = tell, prints
        self._begin()
        self._is_partial = False
        self._seconds = 0.0  # of this epoch, before the resume
        self._began = self._line_due = 0.0
        self._last_log: dict[str, float] = {}

    def _begin(self) -> None:
        self._training = MetricBuffer()
        self._validation: dict[str, float] = {}
        # Results of the running window, which may run again.
        self._window: dict[int, tuple[dict[str, Any], Tensor | float]] = {}

    # -- events

    def pre_fit(self, trainer: AbstractTrainer) -> None:
        """The clock starts."""
        self._began = time.monotonic()
        self._line_due = self._began + LINE_SECONDS
        if self._is_partial:
            self._is_partial = False
            self.rows.pop()

    def post_train_batch(self, trainer: AbstractTrainer, result: dict[str, Any], batch_idx: int) -> None:
        """Takes a result."""
        weight = trainer._accumulation.batch_weight
        self._window[batch_idx] = result, trainer._window.batch_samples if weight is None else weight

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        """The window counts."""
        for result, samples in self._window.values():
            self._training.add_result(result, samples, "train/")
        self._window.clear()
        if trainer.progress.epoch_steps % READ_EVERY == 0:
            self._training.state_dict(trainer.world)
        if self.prints and trainer.world.is_main and time.monotonic() >= self._line_due:
            self._line_due = time.monotonic() + LINE_SECONDS
            show(f"{_place(trainer)}  {format_metrics(self._last_log)}".rstrip())

    def on_log(self, trainer: AbstractTrainer, metrics: dict[str, float], step: int) -> None:
        """Notes what a line within an epoch shows."""
        self._last_log = {name: value for name, value in metrics.items() if name.startswith("train/")}

    def post_val_epoch(self, trainer: AbstractTrainer, metrics: dict[str, float]) -> None:
        """Takes a validation of the training."""
        if not trainer.is_evaluating and not trainer.is_sanity_validation:
            self._validation = dict(metrics)
            if trainer.config.training_parameters.val_every_n_steps is not None:
                self._line_due = time.monotonic() + LINE_SECONDS
                if self.prints and trainer.world.is_main:
                    show(f"{_place(trainer)}  {format_metrics(metrics)}")

    def post_epoch(self, trainer: AbstractTrainer) -> None:
        """The row is complete."""
        row = self._row(trainer, trainer.current_epoch - 1)
        self.rows.append(row)
        self._begin()
        self._began, self._seconds = time.monotonic(), 0.0
        self._print(trainer, row)
        metrics = {name: value for name, value in row.items() if "/" in name}
        for tell in self._tell:
            tell(int(row["epoch"]), metrics)

    def post_fit(self, trainer: AbstractTrainer) -> None:
        """An epoch that training stopped in has a row, too."""
        if trainer.progress.epoch_steps > 0:
            row = self._row(trainer, trainer.current_epoch)
            self.rows.append(row)
            self._is_partial = True
            self._print(trainer, row)

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Complete rows, and what the running epoch has so far."""
        world = self._world
        return {
            "rows": [dict(row) for row in self.rows[: len(self.rows) - self._is_partial]],
            "training": self._training.state_dict(world),
            "validation": self._validation,
            "seconds": self._seconds_of_epoch(world),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self._begin()
        self.rows[:] = [dict(row) for row in state["rows"]]
        self._is_partial = False
        self._training.load_state_dict(state["training"], self._world)
        self._validation, self._seconds = dict(state["validation"]), state["seconds"]

    def begin_branch(self, *, new_counters: bool, new_data: bool) -> None:
        """Rows go along with the counters, and the numbers of the epoch that the data are in with both."""
        if new_counters:
            self.rows.clear()
        if new_counters or new_data:
            self._begin()
            self._seconds, self._began = 0.0, time.monotonic()

    def post_setup(self, trainer: AbstractTrainer) -> None:
        """The ranks are known."""
        self._world = trainer.world
        self._began = time.monotonic()

    def _seconds_of_epoch(self, world: Ranks) -> float:
        """By rank 0's clock, since rows are the same on all ranks; a collective."""
        seconds: float = world.broadcast_object(self._seconds + time.monotonic() - self._began)
        return seconds

    def _row(self, trainer: AbstractTrainer, epoch: int) -> Row:
        optimizer = next(iter(trainer.named_optimizers().values()))
        row = {
            "epoch": epoch,
            "step": trainer.global_step,
            "seconds": self._seconds_of_epoch(trainer.world),
            "lr": float(optimizer.param_groups[0]["lr"]),
        }
        return row | _means(self._training.state_dict(trainer.world)) | self._validation

    def _print(self, trainer: AbstractTrainer, row: Row) -> None:
        self._line_due = time.monotonic() + LINE_SECONDS
        if self.prints and trainer.world.is_main:
            shown = {name: value for name, value in row.items() if "/" in name}
            numbers = "  ".join(f"{name} {format_number(value)}" for name, value in shown.items())
            show(f"{_place(trainer, int(row['epoch']))}  {numbers}  {row['seconds']:.1f} s")


def _means(state: dict[str, Any]) -> dict[str, float]:
    """The means in a buffer's state over all ranks, without emptying it."""
    sums: dict[str, tuple[float, float]] = {}
    for rank in state["ranks"]:
        for name, (_, value, weight) in rank.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + value, before[1] + weight
    return {name: value / weight for name, (value, weight) in sums.items() if weight}


def _place(trainer: AbstractTrainer, epoch: int | None = None) -> str:
    """`epoch 2/5  step 40/100`."""
    epochs, steps = trainer.config.training_parameters.epoch_limit, trainer.total_steps
    number = (trainer.current_epoch if epoch is None else epoch) + 1
    return f"epoch {_of(number, epochs)}  step {_of(trainer.global_step, steps)}"


def _of(number: int, limit: int | None) -> str:
    return f"{number}" if limit is None or number > limit else f"{number}/{limit}"
