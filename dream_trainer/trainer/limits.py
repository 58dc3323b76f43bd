"""Limits that change between two calls of `fit`: the run goes on as a restart with the new ones would."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict

from torch.optim.lr_scheduler import LambdaLR

from dream_trainer.config.trainer_config import change_training_parameters
from dream_trainer.distributed.equality import refuse_differences
from dream_trainer.errors import HookError, StepError
from dream_trainer.trainer.branched_rates import cap_rates, rate_caps
from dream_trainer.trainer.data_setup import global_batch_size, planned_steps

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer

logger = logging.getLogger("dream_trainer")


class Limits(TypedDict, total=False):
    """Where training ends, as in `TrainingParameters`: the first that is reached counts, None sets no limit.

    Attributes:
        n_epochs: Epochs of the whole run.
        max_steps: Optimizer steps of the whole run.
        max_time: Time of training, that of earlier processes included.
        max_samples: Samples of the whole run.
        max_tokens: Tokens of the whole run.
    """

    n_epochs: int | None
    max_steps: int | None
    max_time: timedelta | None
    max_samples: int | None
    max_tokens: int | None


def set_limits(trainer: AbstractTrainer, limits: Limits) -> None:
    """Changes where the next `fit` ends; a collective once the trainer is set up.

    `total_steps` is planned anew. Where it changes, schedulers are built again for it by `configure_schedulers`, and go
    on from their state: as in another process that resumes with these limits.

    Raises:
        TypeError: There is no limit of that name.
        ConfigError: A value cannot work, or another trainer uses the same config.
        StepError: `fit` runs.
        RanksDifferError: The ranks set different ones.
    """
    unknown = [name for name in limits if name not in Limits.__annotations__]
    if unknown:
        raise TypeError(f"set_limits() has no limit {unknown[0]!r}. Use {', '.join(Limits.__annotations__)}.")
    if trainer._session.is_training:
        raise StepError("set_limits() was called inside fit(). Call it between two calls; request_stop() ends one.")
    parameters = replace(trainer.config.training_parameters, **limits)
    if trainer._world is not None:
        refuse_differences(trainer._world, dict(limits), "Set the same limits on every rank.")
    change_training_parameters(trainer.config, trainer, parameters)
    trainer._schedule.follow(parameters)
    if trainer._session.is_ready:
        before = trainer.total_steps
        trainer.total_steps = planned_steps(parameters, trainer.steps_per_epoch, global_batch_size(trainer))
        if trainer.total_steps != before and trainer.named_schedulers():
            _build_schedulers_again(trainer, before)


@contextmanager
def ending_with_the_epoch(trainer: AbstractTrainer) -> Iterator[None]:
    """Inside, `fit` trains to the end of the running epoch, or one epoch, whatever the limits; plans stay as they are.

    The trainer is set up.
    """
    configured = trainer.config.training_parameters
    limits: Limits = dict.fromkeys(Limits.__annotations__)  # type: ignore[assignment]
    trainer._schedule.follow(replace(configured, **limits | {"n_epochs": trainer.current_epoch + 1}))
    try:
        yield
    finally:
        trainer._schedule.follow(configured)


def _build_schedulers_again(trainer: AbstractTrainer, before: int | None) -> None:
    """Their form follows `total_steps`; where they are in it, and the rates of this moment, are kept."""
    states = {name: scheduler.state_dict() for name, scheduler in trainer.named_schedulers().items()}
    caps = rate_caps(trainer.named_schedulers())
    groups = [group for optimizer in trainer.named_optimizers().values() for group in optimizer.param_groups]
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    for group in groups:
        group["lr"] = group.pop("initial_lr", group["lr"])
    trainer.configure_schedulers()
    schedulers = trainer.named_schedulers()
    if schedulers.keys() != states.keys():
        raise HookError(
            f"configure_schedulers was called again for total_steps={trainer.total_steps} and left the schedulers "
            f"{sorted(schedulers)}, not {sorted(states)}. Let it assign the same names each time."
        )
    for name, scheduler in schedulers.items():
        scheduler.load_state_dict(states[name])
        if name in caps and isinstance(scheduler, LambdaLR):
            cap_rates(scheduler, caps[name])
    for group, kept in zip(groups, options, strict=True):
        group.update(kept)
    if trainer.world.is_main:
        logger.warning(
            "the run now ends at step %s instead of %s: its schedules (%s) were built again for that, and go on from "
            "step %d as a restart with these limits would.",
            _spelled(trainer.total_steps),
            _spelled(before),
            ", ".join(schedulers),
            trainer.global_step,
        )


def _spelled(steps: int | None) -> Any:
    return "an unknown one" if steps is None else steps
