"""Callback: the object called at the trainer's events."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from dream_trainer.checks import check_name
from dream_trainer.errors import CheckpointError
from dream_trainer.events.collection import BaseCallback, Timed

if TYPE_CHECKING:
    from pathlib import Path

    from dream_trainer.trainer.abstract import AbstractTrainer


class Callback(BaseCallback):
    """Code that runs at events of a trainer, without a mention in training code.

    Override any event below; only overridden ones are ever dispatched. Callbacks run after the trainer's own method of
    the same name, by `order`, then by their position in the collection.

    Attributes:
        order: Lower runs earlier among callbacks. Default 0.
        main_process_only: Only run on rank 0. Collectives of `trainer.world` raise inside such a callback, because the
            other ranks would never join them.
        needs_whole_models: It needs all layers of the models. Setup refuses it if models are cut into stages, since a
            rank then only has some layers.
        sees_shards: Outside steps it gets sharded models as shards. Default False: small models (see
            `FSDPParameters.min_group_mib`) are whole in its events, as in those of your trainer. Callbacks that keep
            tensors for each parameter set it. With `main_process_only` models stay shards in any case.
    """

    @override
    def _hears(self, event: str) -> bool:
        return getattr(type(self), event) is not getattr(Callback, event)

    def pre_launch(self, trainer: AbstractTrainer) -> None:
        """Before the process group, device and mesh exist."""

    def post_launch(self, trainer: AbstractTrainer) -> None:
        """`trainer.world` is complete."""

    def pre_configure(self, trainer: AbstractTrainer) -> None:
        """Before models are built."""

    def post_configure(self, trainer: AbstractTrainer) -> None:
        """Models are built, on the meta device under SetupMixin."""

    def pre_setup(self, trainer: AbstractTrainer) -> None:
        """Before models are parallelised and materialised."""

    def post_setup(self, trainer: AbstractTrainer) -> None:
        """Models, data, optimizers and schedulers are ready; nothing has been resumed yet."""

    def pre_fit(self, trainer: AbstractTrainer) -> None:
        """Everything is ready and resumed; training starts."""

    def pre_epoch(self, trainer: AbstractTrainer) -> None:
        """An epoch starts or resumes. In the middle of an epoch, saved state wins over what you set here."""

    def pre_train_batch(self, trainer: AbstractTrainer, batch: Any, batch_idx: int) -> None:
        """Before `training_step`; the batch is on the device."""

    def pre_optimizer_step(self, trainer: AbstractTrainer, model: nn.Module, optimizer: Optimizer) -> None:
        """Gradients are reduced and normalised, not yet clipped."""

    def post_optimizer_step(self, trainer: AbstractTrainer, model: nn.Module, optimizer: Optimizer) -> None:
        """The optimizer has stepped; its gradients are still there."""

    def post_train_batch(self, trainer: AbstractTrainer, result: dict[str, Any], batch_idx: int) -> None:
        """After `training_step`, with its detached result; counters are advanced."""

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        """An accumulation window is complete."""

    def pre_val_epoch(self, trainer: AbstractTrainer) -> None:
        """Validation starts."""

    def pre_val_batch(self, trainer: AbstractTrainer, batch: Any, batch_idx: int) -> None:
        """Before `validation_step`; the batch is on the device."""

    def post_val_batch(self, trainer: AbstractTrainer, result: dict[str, Any], batch_idx: int) -> None:
        """After `validation_step`, with its result."""

    def post_val_epoch(self, trainer: AbstractTrainer, metrics: dict[str, float]) -> None:
        """Validation is over; `metrics` are exact over all samples and ranks, and equal on every rank."""

    def post_epoch(self, trainer: AbstractTrainer) -> None:
        """An epoch is complete; `current_epoch` already counts it."""

    def post_fit(self, trainer: AbstractTrainer) -> None:
        """Training is over, whether by its limits or by a stop request.

        The last checkpoint has been saved. Changes made here are in no checkpoint, unless you call
        `trainer.save_checkpoint()` afterwards.
        """

    def on_exception(self, trainer: AbstractTrainer, exc: BaseException) -> None:
        """`fit` fails on this rank. Other ranks may be anywhere: no collectives here."""

    def on_interrupt(self, trainer: AbstractTrainer) -> None:
        """A signal (Ctrl-C, SIGTERM, SIGHUP) ends the run; all ranks stand at the same step."""

    def on_save(self, trainer: AbstractTrainer, path: Path) -> None:
        """A checkpoint is committed at `path`."""

    def on_load(self, trainer: AbstractTrainer, path: Path) -> None:
        """The checkpoint at `path` has been loaded."""

    def on_log(self, trainer: AbstractTrainer, metrics: dict[str, float], step: int) -> None:
        """Metrics were reduced over all ranks and passed to the loggers. `step` is theirs: training metrics come a step
        later."""

    def teardown(self, trainer: AbstractTrainer) -> None:
        """The trainer closes; release resources."""


class TimedCallback(Timed, Callback):
    """A callback that acts by the clock, which ranks do not share: an interface.

    Rank 0 is asked before each window and sends the answer with the pulse, so that all ranks do the same after it.

    Example:
        ```python
        class Hourly(TimedCallback):
            last = -math.inf

            def is_due_by_the_clock(self):
                return time.monotonic() - self.last >= 3600

            def post_train_step(self, trainer):
                if self.is_due(trainer):
                    self.last = time.monotonic()
                    print(f"step {trainer.global_step}")
        ```
    """

    def is_due(self, trainer: AbstractTrainer) -> bool:
        """In `post_train_step`: whether it was time before the window just completed; the same on all ranks."""
        return trainer.callback_is_due(self)


class LoggingCallback(Callback):
    """A callback that logs its own metrics: an interface. A subclass with an `__init__` calls this one.

    Args:
        name: First part of the metrics' names. No two callbacks of a run may have the same, since values under one
            name are reduced together.
    """

    name: str = ""

    def __init__(self, name: str) -> None:
        check_name("name", name, example="mine")
        self.name = name

    @override
    def _log_name(self) -> str:
        return self.name


class AveragingCallback(Callback):
    """A callback whose averages can stand in for the weights: an interface."""

    export_name: ClassVar[str] = ""
    sees_shards: ClassVar[bool] = True
    validate: bool  # whether validations measure the averages

    @abstractmethod
    def averaged(self, model_name: str) -> dict[str, Tensor]:
        """The averages of one model by parameter name."""

    @abstractmethod
    def averaged_weights(self) -> AbstractContextManager[None]:
        """Inside, the averaged models hold their averages. Called by every rank."""

    @abstractmethod
    def load_as_weights(self, checkpoint: Path) -> bool:
        """Loads a checkpoint's averages into the models too; returns whether it has any. Called by every rank."""


def averages_to_export(callbacks: Iterable[BaseCallback], weights: str, model: str) -> AbstractContextManager[None]:
    """Inside, `model` has the averages called `weights`, such as "ema", instead of its weights."""
    callback_of_name: dict[str, AveragingCallback] = {}
    averaging = [callback for callback in callbacks if isinstance(callback, AveragingCallback) and callback.export_name]
    for name in sorted({callback.export_name for callback in averaging}):
        alike = [callback for callback in averaging if callback.export_name == name]
        callback_of_name |= {name: alike[0]} | {f"{name}.{number}": one for number, one in enumerate(alike)}
    if weights not in callback_of_name:
        raise CheckpointError(
            f'weights={weights!r} is not understood: use "model", or the average of an EMA or SWA callback. The '
            f"trainer has {list(callback_of_name) or 'none'}."
        )
    callback_of_name[weights].averaged(model)  # raises where it averages others only
    return callback_of_name[weights].averaged_weights()
