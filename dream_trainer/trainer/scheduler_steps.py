"""What is said of learning rate schedulers that nobody steps, that are stepped twice, or beside another optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from dream_trainer.compat.schedulers import steps_taken
from dream_trainer.trainer.registry import Scheduler

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer


class SchedulerSteps:
    """Looks between windows at how far schedulers have gone; warnings alone, since all of it may be meant.

    Args:
        trainer: Whose schedulers they are.
    """

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
