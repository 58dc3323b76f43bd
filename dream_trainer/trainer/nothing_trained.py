"""Runs that train nothing, not all or some twice: without steps, gradients, an end, or one optimizer; in eval mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch.nn as nn
from torch.optim import Optimizer

from dream_trainer.compat.pytorch import write_count
from dream_trainer.compat.schedulers import steps_taken
from dream_trainer.errors import StepError
from dream_trainer.trainer.registry import Scheduler

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer
    from dream_trainer.trainer.counters import Owed

WINDOWS_WITHOUT_STEP = 100
"""Windows of an epoch after which it is said that none has stepped yet, or none with a gradient; the end of the epoch
says it sooner."""

BATCHES_WITHOUT_STEP = 10_000
"""Batches after which a run that only a number of steps ends is an error, if it never stepped nor changed a weight."""


class NothingTrained:
    """Looks at the windows of this process until one of them has stepped with a gradient.

    Attributes:
        is_looking: Whether no window has stepped with a gradient so far.
    """

    def __init__(self, trainer: AbstractTrainer) -> None:
        self._trainer = trainer
        self._schedulers = SchedulerSteps(trainer)
        self._has_stepped = False
        self._writes_before = self._states_before = 0
        self.is_looking = True

    def begin(self) -> None:
        """Training begins with the weights and modes as they are now."""
        self._writes_before, self._states_before = self._writes(), self._states()
        self._say_what_is_in_eval_mode()
        self._say_what_no_optimizer_has()
        self._say_what_two_optimizers_have()
        self._schedulers.begin()

    def note_window(self, *, stepped: bool, had_gradients: bool) -> None:
        """A window is complete; `had_gradients` if some step so far had one."""
        self._has_stepped = self._has_stepped or stepped
        self.is_looking = not had_gradients
        is_first = self._trainer.local_batches <= self._trainer.accumulation_steps
        is_passed_by = is_first and not stepped and self._states() > self._states_before  # optimizer.step() by hand
        if is_passed_by or self._trainer.progress.epoch_steps % WINDOWS_WITHOUT_STEP == 0:
            self.say()
        self._schedulers.say_what_is_stepped_twice()

    def conclude(self, owed: Owed, *, is_last: bool) -> None:
        """A validation, an epoch or the run is over, and their events, in which schedulers are stepped by hand."""
        self.say()
        self._schedulers.say_what_is_stepped_twice()
        if is_last or (owed.epoch_ended and (owed.validates or not self._trainer._data.validation)):
            self._schedulers.say_what_is_not_stepped()

    def say(self) -> None:
        """Warns and raises nothing: training without gradients, or a late first step, may be meant.

        Raises:
            StepError: Only a number of steps ends the run, and none will ever be counted.
        """
        trainer = self._trainer
        if not self.is_looking or trainer.local_batches == 0:
            return
        if self._has_stepped:
            trainer.warn_once(
                "no gradient",
                "training_step calls self.step(...), but no parameter that it steps has had a gradient so far: steps "
                "are counted, and nothing is learnt. Call self.backward(loss) before it, with a loss of the model that "
                "the optimizer trains.",
            )
            return
        if trainer._schedule.ends_by_steps_alone:
            self._refuse_to_go_on_for_ever()
        trainer.warn_once(
            "no step",
            "training_step has not called self.step(...) so far: no optimizer step is counted, and a limit in steps "
            "never comes. Call self.backward(loss) there, and self.step(model, optimizer) when "
            "`not self.is_accumulating_gradients`.",
        )

    def _refuse_to_go_on_for_ever(self) -> None:
        """A first step may come late, when a replay buffer is full, so a run that leaves its weights alone has time."""
        trainer = self._trainer
        trains = self._writes() != self._writes_before or any(p.grad is not None for p in self._parameters())
        if trains or trainer.local_batches >= BATCHES_WITHOUT_STEP:
            count = "1 batch was" if trainer.local_batches == 1 else f"{trainer.local_batches} batches were"
            raise StepError(
                f"max_steps={trainer._schedule.max_steps} never comes: {count} trained, and training_step has not "
                "called self.step(...), which alone counts a step. Call self.backward(loss) instead of "
                "loss.backward(), and self.step(model, optimizer) instead of optimizer.step(), "
                "when `not self.is_accumulating_gradients`; or set n_epochs."
            )

    def _say_what_is_in_eval_mode(self) -> None:
        """Frozen parts may be meant to be; a whole model is as `from_pretrained` returns it."""
        for name, model in self._trainer.named_models().items():
            is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
            if not model.training and not is_frozen and self._trainer.get_optimizers_by_model(model):
                self._trainer.warn_once(
                    f"eval mode {name}",
                    f"self.{name} is in eval mode and an optimizer trains it: its dropout does nothing, and its "
                    f"BatchNorm learns no statistics. Call self.{name}.train() in configure_models; models that "
                    "from_pretrained has loaded are in eval mode. Parts that are to stay in it can be set to it after.",
                )

    def _say_what_no_optimizer_has(self) -> None:
        """Its gradient is computed, reduced and never cleared: each window adds to it."""
        optimizers = self._trainer.named_optimizers().values()
        updated = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        left_out = [
            f"{model_name}.{name}"
            for model_name, model in self._trainer.named_models().items()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and id(parameter) not in updated
        ]
        if left_out:
            more = f" and {len(left_out) - 2} more" if len(left_out) > 2 else ""
            self._trainer.warn_once(
                "no optimizer",
                f"trainable, but in no optimizer: {', '.join(left_out[:2])}{more}. Give them to one, or "
                "requires_grad_(False).",
            )

    def _say_what_two_optimizers_have(self) -> None:
        """It may be meant, as for an encoder that two losses train in turns, each with a learning rate of its own."""
        names = {
            id(parameter): f"{model_name}.{name}"
            for model_name, model in self._trainer.named_models().items()
            for name, parameter in model.named_parameters()
        }
        owners: dict[int, str] = {}
        for owner, optimizer in self._trainer.named_optimizers().items():
            updated = [id(p) for group in optimizer.param_groups for p in group["params"]]
            shared = next((p for p in updated if p in owners), None)
            if shared is not None:
                self._trainer.warn_once(
                    f"shared {owner}",
                    f"{names.get(shared, 'a parameter')} is in self.{owners[shared]} and in self.{owner}: each that is "
                    "stepped changes it. Leave it out of one, unless they are to take turns at it.",
                )
            owners |= dict.fromkeys(updated, owner)

    def _states(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._trainer.named_optimizers().values())

    def _writes(self) -> int:
        return sum(write_count(parameter) for parameter in self._parameters())

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (p for model in self._trainer.named_models().values() for p in model.parameters())


class SchedulerSteps:
    """Looks between windows at how far schedulers have gone; warnings alone, since all of it may be meant."""

    def __init__(self, trainer: AbstractTrainer) -> None:
        self._trainer = trainer
        self._places: dict[int, int] = {}  # by `id`
        self._rates: dict[int, list[float]] = {}

    def begin(self) -> None:
        """Training begins, or goes on, with the schedulers as they are now."""
        schedulers = self._trainer.named_schedulers().values()
        self._trainer._optimizer_step.handed_over.clear()
        self._places = {id(scheduler): steps_taken(scheduler) for scheduler in schedulers}
        self._rates = {id(scheduler): _rates_of(scheduler) for scheduler in schedulers}

    def say_what_is_stepped_twice(self) -> None:
        """Those that were handed to `step`, and have gone further than that."""
        handed_over = self._trainer._optimizer_step.handed_over
        for name, scheduler in self._trainer.named_schedulers().items():
            times = handed_over[id(scheduler)]
            steps = steps_taken(scheduler) - self._places.get(id(scheduler), steps_taken(scheduler))
            if steps > times > 0:
                self._trainer.warn_once(
                    f"stepped twice {name}",
                    f"self.{name} is handed to step() and stepped by hand as well: it has gone {steps} steps in "
                    f"{times}. step() steps what it is handed; leave out self.{name}.step(), or do not hand it over.",
                )

    def say_what_is_not_stepped(self) -> None:
        """Of one optimizer's schedulers one is enough: others may be its parts, or have their turn later."""
        of_optimizers: dict[Optimizer, list[str]] = {}
        idle = set()
        schedulers = self._trainer.named_schedulers()
        for name, scheduler in schedulers.items():
            of_optimizers.setdefault(scheduler.optimizer, []).append(name)
            if not self._has_moved(scheduler):
                idle.add(name)
        for optimizer_name, optimizer in self._trainer.named_optimizers().items():
            names = of_optimizers.get(optimizer, [])
            if names and idle.issuperset(names) and self._trainer._optimizer_step.has_stepped(optimizer):
                which = " and ".join(f"self.{name}" for name in names)
                self._trainer.warn_once(
                    f"never stepped {optimizer_name}",
                    f"{which} has not been stepped so far, so self.{optimizer_name} keeps its learning rate. Hand it "
                    "over in self.step(model, optimizer, scheduler), or call its step() in post_epoch or "
                    "post_val_epoch.",
                )

    def _has_moved(self, scheduler: Scheduler) -> bool:
        """Or went on a way of its own, as by fractions of an epoch."""
        return steps_taken(scheduler) > 0 or _rates_of(scheduler) != self._rates.get(id(scheduler))


def _rates_of(scheduler: Scheduler) -> list[float]:
    return [float(group["lr"]) for group in scheduler.optimizer.param_groups]


def say_what_is_beside_its_optimizer(
    trainer: AbstractTrainer, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
) -> None:
    """Of the schedulers handed to a step of `optimizers`, those that drive the rate of none of their parameters."""
    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    names = {id(optimizer): f"self.{name}" for name, optimizer in trainer.named_optimizers().items()}
    for name, scheduler in trainer.named_schedulers().items():
        if not any(scheduler is one for one in schedulers):
            continue
        driven = scheduler.optimizer
        is_stepped = any(driven is optimizer for optimizer in optimizers)  # also one without parameters
        if not is_stepped and not any(id(p) in stepped for group in driven.param_groups for p in group["params"]):
            beside = " and ".join(names.get(id(optimizer), type(optimizer).__name__) for optimizer in optimizers)
            of = names.get(id(driven), type(driven).__name__)
            trainer.warn_once(
                f"beside {name}",
                f"self.{name} was handed to the step of {beside}, and drives the rate of {of}. Hand it over with the "
                "optimizer that it was built on.",
            )
