"""SanityChecks: warnings about runs that train nothing, or not all, or whose schedules stand still."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import torch.nn as nn
from typing_extensions import override

from dream_trainer.checks import listed
from dream_trainer.compat.pytorch import steps_taken, write_count
from dream_trainer.errors import StepError
from dream_trainer.events.callback import Callback

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer

# accumulation steps between two checks; the first is one, and each validation and epoch ends with one
STEPS_BETWEEN_CHECKS: Final = 100
# batches after which a run that only a number of steps ends is an error, if it never stepped nor changed a weight
BATCHES_WITHOUT_STEP: Final = 10_000


class SanityChecks(Callback):
    """Warns of runs that look right and train nothing; every run has it unless its collection leaves it out.

    It warns once each about models in eval mode that an optimizer trains, parameters in no optimizer, `training_step`
    without `self.step(...)`, steps without a gradient, and schedulers that are never stepped or stepped twice. All of
    it may be intended. A run that would never end, because its only limit is a number of steps and none is counted, is
    an error.

    Raises:
        StepError: While training: only a number of steps ends the run, and none will ever be counted.
    """

    order = 1000  # after the callbacks that step schedulers or change modes
    _is_on = False  # from the beginning of training to its end; a signal ends it early

    @override
    def pre_fit(self, trainer: AbstractTrainer) -> None:
        self._n_steps = 0
        self._trains = False  # whether a step had a gradient; nothing is looked at any more then
        self._is_on, self._has_validated = True, False
        self._step_before, self._writes_before = trainer.global_step, _writes(trainer)
        schedulers = trainer.named_schedulers().values()
        self._before = {id(s): (steps_taken(s), trainer.times_stepped(s), _rates_of(s)) for s in schedulers}
        models = trainer.named_models().items()
        for name, model in models:
            # Frozen parts may be meant to be in it; a whole model is as `from_pretrained` returns it.
            is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
            if not model.training and not is_frozen and trainer.get_optimizers_by_model(model):
                trainer.warn_once(
                    f"eval mode {name}",
                    f"self.{name} is in eval mode and an optimizer trains it: its dropout does nothing, and its "
                    f"BatchNorm learns no statistics. Call self.{name}.train() in configure_models; models that "
                    "from_pretrained has loaded are in eval mode. Parts that are to stay in it can be set to it after.",
                )
        # Left-out parameters get gradients that are reduced and never cleared: each accumulation step adds to them.
        updated = {id(parameter) for parameter in _optimized(trainer)}
        named = [(name, p) for model_name, model in models for name, p in model.named_parameters(model_name)]
        if left_out := [name for name, p in named if p.requires_grad and id(p) not in updated]:
            left = listed(left_out, 2)
            trainer.warn_once(
                "no optimizer", f"trainable, but in no optimizer: {left}. Give them to one, or requires_grad_(False)."
            )

    @override
    def post_train_step(self, trainer: AbstractTrainer) -> None:
        if self._trains:
            return
        self._trains = self._n_steps > 0 and trainer.has_trained
        if self._trains:
            return
        self._n_steps += 1
        if self._n_steps == 1:
            self._warn_of_schedulers_out_of_step(trainer)
        if self._n_steps % STEPS_BETWEEN_CHECKS == 0:
            self._check_steps(trainer)
        elif self._n_steps == 1 and trainer.global_step == self._step_before and self._weights_moved(trainer):
            self._check_steps(trainer)  # by optimizer.step() alone

    @override
    def post_val_epoch(self, trainer: AbstractTrainer, metrics: dict[str, float]) -> None:
        if self._is_on and not trainer.is_evaluating:
            self._has_validated = True
            self._check_steps(trainer)
            self._warn_of_schedulers_out_of_step(trainer)

    @override
    def post_epoch(self, trainer: AbstractTrainer) -> None:
        self._check_steps(trainer)
        self._warn_of_schedulers_out_of_step(trainer)
        if self._has_validated or not trainer.val_dataloaders:  # a validation may step them
            self._warn_of_idle_schedulers(trainer)
        self._has_validated = False

    @override
    def on_interrupt(self, trainer: AbstractTrainer) -> None:
        self._is_on = False  # events of an epoch may not have happened yet

    @override
    def post_fit(self, trainer: AbstractTrainer) -> None:
        if self._is_on:
            self._is_on = False
            self._warn_of_schedulers_out_of_step(trainer)
            self._warn_of_idle_schedulers(trainer)
            self._check_steps(trainer)

    def _check_steps(self, trainer: AbstractTrainer) -> None:
        if trainer.has_trained or trainer.local_batches == 0:
            return
        if trainer.global_step > self._step_before:
            trainer.warn_once(
                "no gradient",
                "training_step calls self.step(...), but no parameter that it steps has had a gradient so far: steps "
                "are counted, and nothing is learnt. Call self.backward(loss) before it, with a loss of the model that "
                "the optimizer trains.",
            )
            return
        limits = trainer.config.training_parameters
        others = (limits.n_epochs, limits.max_samples, limits.max_tokens, limits.max_time)
        trains = self._weights_moved(trainer) or any(p.grad is not None for p in _optimized(trainer))
        is_late = trainer.local_batches >= BATCHES_WITHOUT_STEP  # a first step may be, e.g. for a full buffer
        if limits.max_steps is not None and all(limit is None for limit in others) and (trains or is_late):
            raise StepError(
                f"max_steps={limits.max_steps} never comes: of {trainer.local_batches} trained batches none has called "
                "self.step(...), and only that counts a step. Call self.backward(loss) instead of loss.backward(), and "
                "self.step(model, optimizer) instead of optimizer.step(); or set n_epochs."
            )
        trainer.warn_once(
            "no step",
            "training_step has not called self.step(...) so far: no optimizer step is counted, and a limit in steps "
            "never comes. Call self.backward(loss) there, and then self.step(model, optimizer).",
        )

    def _weights_moved(self, trainer: AbstractTrainer) -> bool:
        return _writes(trainer) != self._writes_before

    def _warn_of_schedulers_out_of_step(self, trainer: AbstractTrainer) -> None:
        for name, scheduler in trainer.named_schedulers().items():
            place, times_before, _ = self._before.get(id(scheduler), (0, 0, []))
            steps, times = steps_taken(scheduler) - place, trainer.times_stepped(scheduler) - times_before
            if steps > times > 0:
                trainer.warn_once(
                    f"stepped twice {name}",
                    f"self.{name} is passed to step() and stepped by hand as well: it has gone {steps} steps in "
                    f"{times}. step() steps schedulers that it gets: leave out self.{name}.step(), or do not pass it.",
                )

    def _warn_of_idle_schedulers(self, trainer: AbstractTrainer) -> None:
        """One active scheduler per optimizer is enough: others may be its parts, or step later."""
        for optimizer_name, optimizer in trainer.named_optimizers().items():
            schedulers = {name: s for name, s in trainer.named_schedulers().items() if s.optimizer is optimizer}
            has_moved = any(  # it stepped, or changed its rates in another way, such as by fractions of an epoch
                steps_taken(one) > 0 or (id(one) in self._before and _rates_of(one) != self._before[id(one)][2])
                for one in schedulers.values()
            )
            if schedulers and not has_moved and trainer.times_stepped(optimizer) > 0:
                which = " and ".join(f"self.{name}" for name in schedulers)
                trainer.warn_once(
                    f"never stepped {optimizer_name}",
                    f"{which} has not been stepped so far, so self.{optimizer_name} keeps its learning rate. Hand it "
                    "over in self.step(model, optimizer, scheduler), or call its step() in post_epoch or "
                    "post_val_epoch.",
                )


def _optimized(trainer: AbstractTrainer) -> Iterator[nn.Parameter]:
    groups = [group for optimizer in trainer.named_optimizers().values() for group in optimizer.param_groups]
    return (parameter for group in groups for parameter in group["params"])


def _writes(trainer: AbstractTrainer) -> int:
    return sum(write_count(parameter) for parameter in _optimized(trainer))


def _rates_of(scheduler: Any) -> list[float]:
    return [float(group["lr"]) for group in scheduler.optimizer.param_groups]
