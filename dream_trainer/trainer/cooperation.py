"""Cooperation: the hooks through which mixins take part in the loop, each declared once as a documented no-op.

`BaseTrainer` calls them at named phases. A mixin overrides those it needs and calls `super()`, so that any number of
mixins take part in any order; none knows of another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from dream_trainer.checkpoint.saving import Saving
from dream_trainer.config.checkpoint_parameters import Mode
from dream_trainer.errors import HookError
from dream_trainer.trainer.user_class.overrides import bound, definers

if TYPE_CHECKING:
    from dream_trainer.modules.attention_takeover import AttentionTakeover
    from dream_trainer.trainer.abstract import AbstractTrainer
    from dream_trainer.trainer.validation_metrics import ValidationMetrics


class NoRounds:
    """What is asked where ranks might have weights of their own.

    Attributes:
        steps: Optimizer steps of a round.
    """

    steps = 1

    def as_one_model(self) -> AbstractContextManager[None]:
        """Wraps what speaks of the run's model, such as an export: inside, all ranks have its weights; a collective."""
        return nullcontext()

    def tensors_to_save(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a checkpoint has of `tensors`, those of models and optimizers by name, and beside them; a collective."""
        return tensors

    def tensors_to_load(self, tensors: dict[str, Tensor], saved: Collection[str], *, is_own: bool) -> dict[str, Tensor]:
        """Where a checkpoint with the names `saved` is loaded to; it `is_own` unless this run begins from another's."""
        return tensors


class Cooperation:
    """What mixins override."""

    _notify: Callable[..., None]
    training: bool
    backward: Callable[..., None]
    # CheckpointMixin puts one here that saves.
    _saver: Saving = Saving()
    # LocalSGDMixin says how many groups of ranks step on their own, and puts one here that averages over them.
    _workers: int | Literal["hosts"] = 1
    _rounds: NoRounds = NoRounds()
    # On while a step runs whose sequences ranks share; ContextParallelMixin puts it here.
    _takeover: AttentionTakeover | None = None
    # What `step` runs inside: ContextParallelMixin leaves its mode there, where nobody calls attention.
    _outside_forward: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)

    def _setup_stages(self) -> list[tuple[str, str]]:
        """The setup order as (stage, reason) pairs, for `describe`."""
        return []

    def _finish_setup(self) -> None:
        """Models, data and optimizers are ready; loggers and checkpoints open here."""

    def _resume(self) -> None:
        """Loads the newest checkpoint, if the config says so."""

    def _wrap_step(self, step: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        """What is called with each batch and its index instead of `step`, a training or validation step."""
        return step

    def _log_step(self, result: dict[str, Any], weight: Any) -> None:
        """Takes the result of a training micro-batch."""

    def _window_started(self) -> None:
        """Before each window's first micro-batch; not again when it runs again."""

    def _window_dropped(self) -> None:
        """A window's gradients were not finite, and it runs again: drop what it logged."""

    def _window_finished(self, *, is_last: bool) -> None:
        """Loggers flush when due: after each window and its events, after a resume, and with `is_last` where the run
        ends, which may be found out only after the window's validation."""

    def _land(self, *, is_last: bool) -> None:
        """Loggers write what is on its way to them."""

    def _validation_context(self) -> AbstractContextManager[None]:
        """Wraps a complete validation."""
        return nullcontext()

    def _validated(self, metrics: dict[str, float]) -> None:
        """Takes the exact metrics of a validation, before `post_val_epoch`."""

    def _tell_end(self, event: str, *args: Any) -> None:
        """Calls everyone who listens to the end of a validation, `post_val_epoch`, or of an epoch, `post_epoch`."""
        self._notify(event, *args)

    def _start_loader_metrics(self) -> list[ValidationMetrics]:
        """A validation loader starts: what its further metrics will come to, each asked for at its end."""
        return []

    def _metrics_of_training(self) -> dict[str, Any]:
        """The metrics that training has updated on this rank, by name; a checkpoint keeps their state."""
        return {}

    def _best_modes(self) -> dict[str, Mode]:
        """The validation metrics whose best values are kept, each with whether "min" or "max" is best."""
        return {}

    def _save_was_lost(self) -> None:
        """The save begun last did not get to the disk, and nobody has its state."""

    def _mixin_state(self) -> dict[str, Any]:
        """State of the mixins for checkpoints, by mixin; plain values that are equal on all ranks."""
        return MixinStates()

    def _load_mixin_state(self, state: dict[str, Any]) -> None:
        """Takes back what `_mixin_state` gave."""

    def _close(self) -> None:
        """Releases what the mixins opened."""

    # -- what training code calls, and PipelineParallelMixin does in another way

    def forward_backward(
        self,
        model: nn.Module,
        inputs: tuple[Any, ...],
        targets: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        weight: Callable[[Any], Tensor | float] | Tensor | float | None = None,
    ) -> Tensor:
        """The loss of a batch, and its gradients: `loss = loss_fn(model(*inputs), targets)`, then `backward(loss)`.

        With a pipeline (PipelineParallelMixin) a batch's micro-batches go through its stages there and back, and the
        same `training_step` serves both. In a validation, or under `torch.no_grad()`, it is the loss alone.

        Args:
            model: Called with `inputs`.
            inputs: Positional arguments; with a pipeline every tensor in them is cut along its first dimension.
            targets: What else the loss needs; cut alike.
            loss_fn: Gives the mean loss, a scalar, of outputs and targets.
            weight: Over how many tokens or samples that is the mean, as `backward` takes it: a number, or a function of
                targets, which a pipeline asks for each micro-batch and needs.

        Returns:
            The loss of the whole batch.

        Raises:
            StepError: As `backward` does; or a pipeline cannot do what is asked for.
        """
        loss = loss_fn(model(*inputs), targets)
        if self.training and torch.is_grad_enabled():
            self.backward(loss, weight=weight(targets) if callable(weight) else weight, model=model)
        return loss


class _TakenKeyError(HookError):
    """Two mixins keep their state under the key that is its argument."""


class MixinStates(dict[str, Any]):
    """A dict to which `|` adds only keys that are not there yet."""

    def __or__(self, other: Mapping[str, Any]) -> MixinStates:  # type: ignore[override]
        for key in self.keys() & other.keys():
            raise _TakenKeyError(key)
        return MixinStates({**self, **other})


def mixin_states(trainer: AbstractTrainer) -> dict[str, Any]:
    """What `_mixin_state` gives; a collective, since loggers communicate there.

    Raises:
        HookError: Two mixins have one key, so that one's state would replace the other's; the message names both.
    """
    try:
        return dict(trainer._mixin_state())
    except _TakenKeyError as error:
        key = error.args[0]
    owner = ""
    # From the last one on, each with those behind it.
    for part in reversed(definers(type(trainer), "_mixin_state")):
        try:
            if key in bound(trainer, "_mixin_state", part)():
                owner = owner or part.__name__
        except _TakenKeyError:
            raise HookError(
                f"{part.__name__} and {owner} both keep their state under the key {key!r} of _mixin_state: one would "
                "replace the other. Give one of them another key."
            ) from None
    return {}
