"""Limits that change between two calls of `fit`: the run continues like a restart with the new limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypedDict

from dream_trainer.config.checkpoint_parameters import ALL_KEPT
from dream_trainer.config.trainer_config import change_training_parameters
from dream_trainer.distributed.ranks import refuse_differences
from dream_trainer.errors import StepError
from dream_trainer.optim.learning_rates import set_token_origin
from dream_trainer.screen import logger
from dream_trainer.trainer.data_setup import planned_steps
from dream_trainer.trainer.resumed_rates import copied, set_rate
from dream_trainer.trainer.runtime import Runtime


class Limits(TypedDict, total=False):
    """Where training ends, as in `TrainingParameters`: the first that is reached counts, None sets no limit."""

    n_epochs: int | None  # epochs of the whole run
    max_steps: int | None  # optimizer steps of the whole run
    max_time: timedelta | None  # time of training, that of earlier processes included
    max_samples: int | None  # samples of the whole run
    max_tokens: int | None  # tokens of the whole run


def set_limits(runtime: Runtime, limits: Limits) -> None:
    """Changes where the next `fit` ends; a collective once the trainer is set up."""
    unknown = [name for name in limits if name not in Limits.__annotations__]
    if unknown:
        raise TypeError(f"set_limits() has no limit {unknown[0]!r}. Use {', '.join(Limits.__annotations__)}.")
    if runtime.session.is_training:
        raise StepError("set_limits() was called inside fit(). Call it between two calls; request_stop() ends one.")
    before = runtime.config.training_parameters
    parameters = replace(before, **limits)
    if runtime.launched is not None:
        refuse_differences(runtime.launched, dict(limits), "Set the same limits on every rank.")
    change_training_parameters(runtime.config, runtime, parameters)
    runtime.schedule.follow(parameters)
    if not runtime.session.is_ready:
        return
    steps = runtime.state.total_steps
    runtime.state.total_steps = planned_steps(runtime)
    is_changed = runtime.state.total_steps != steps or before.max_tokens != parameters.max_tokens
    if is_changed and runtime.registry.schedulers():
        _build_schedulers_again(runtime, before=f"total_steps={steps} and max_tokens={before.max_tokens}")


@contextmanager
def ending_with_the_epoch(runtime: Runtime) -> Iterator[None]:
    """Inside, `fit` trains to the end of the running epoch, or one epoch, whatever the limits."""
    configured = runtime.config.training_parameters
    limits: Limits = dict.fromkeys(Limits.__annotations__)  # type: ignore[assignment]
    runtime.schedule.follow(replace(configured, **limits | {"n_epochs": runtime.progress.current_epoch + 1}))
    try:
        yield
    finally:
        runtime.schedule.follow(configured)


def _build_schedulers_again(runtime: Runtime, *, before: str) -> None:
    """Their form follows `total_steps`; where they are in it is kept."""
    rates = runtime.rates
    states = {name: scheduler.state_dict() for name, scheduler in runtime.registry.schedulers().items()}
    shared: dict[str, Any] = {**rates.state(), "schedulers": states}
    groups = [group for optimizer in runtime.registry.optimizers().values() for group in optimizer.param_groups]
    options = [{key: copied(value) for key, value in group.items() if key != "params"} for group in groups]
    rates.build_again()
    schedulers = runtime.registry.schedulers()
    if runtime.world.is_main:
        logger.warning(
            "the run has total_steps=%s and max_tokens=%s instead of %s: its schedules (%s) were rebuilt for that, and "
            "continue from step %d like a restart with these limits.",
            runtime.state.total_steps,
            runtime.config.training_parameters.max_tokens,
            before,
            ", ".join(schedulers),
            runtime.progress.global_step,
        )
    for group, kept in zip(groups, options, strict=True):
        rate = kept.pop("lr")
        group.update(kept)
        set_rate(group, rate)  # in place: a captured step has the tensor
    for name, scheduler in schedulers.items():
        set_token_origin(scheduler, shared["token_origins"].get(name, 0))
    for line in rates.go_on(shared, ALL_KEPT):
        if runtime.world.is_main:
            logger.warning("%s", line)
