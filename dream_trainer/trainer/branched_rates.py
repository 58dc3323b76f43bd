"""Learning rates where a run goes on from a checkpoint: whose they are, and from which step of the schedule.

A LambdaLR, as `build_schedule` makes, is a base times a function of its step, so both can be chosen. Other schedulers
compute a rate from the last one: under another rate they are stepped from their beginning to their place, and what that
does not make exact is refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from dream_trainer.config.branch_parameters import BranchParameters
from dream_trainer.errors import CheckpointError, ConfigError
from dream_trainer.optim.learning_rates import set_token_origin
from dream_trainer.trainer.rate_warnings import (
    KeptOption,
    Options,
    factors_of,
    for_groups,
    kept_options,
    spent_before,
    what_goes_on,
)
from dream_trainer.trainer.registry import Scheduler
from dream_trainer.trainer.schedule_arguments import (
    base_rates_of,
    begin_again,
    copied,
    forget_cycle,
    note_built,
    options_of,
    outermost,
    set_rate,
    take_back,
)

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer

logger = logging.getLogger("dream_trainer")

_caps: WeakKeyDictionary[LambdaLR, list[float]] = WeakKeyDictionary()
_configured: WeakKeyDictionary[Optimizer, Options] = WeakKeyDictionary()
_kept: WeakKeyDictionary[Optimizer, Options] = WeakKeyDictionary()  # those of a checkpoint, which hold instead

# What depends on the machine, or is told by "lr".
_QUIET = ("params", "param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable", "maximize")


def note_rates(optimizers: Mapping[str, Optimizer], schedulers: Mapping[str, Scheduler]) -> None:
    """Notes how schedulers are built, and of optimizers what `note_options` does where setup did not."""
    note_built(schedulers)
    note_options(optimizers)


def note_options(optimizers: Mapping[str, Optimizer]) -> None:
    """Notes the numbers that `configure_optimizers` gave each group, learning rate, decay and the like, before any
    schedule changes them; those that are known already are left alone."""
    for optimizer in optimizers.values():
        if optimizer not in _configured:
            _configured[optimizer] = [_options(group) for group in optimizer.param_groups]


def base_rates(optimizer: Optimizer) -> list[Any]:
    """The rate of each group before any schedule changed it."""
    return base_rates_of(optimizer.param_groups, options_in_force(optimizer))


def configured_options(optimizers: Mapping[str, Optimizer]) -> dict[str, Options]:
    """Those that are in force, for a checkpoint: what was noted, or what went along from a checkpoint over it."""
    return {name: options_in_force(optimizer) for name, optimizer in optimizers.items()}


def options_in_force(optimizer: Optimizer) -> Options:
    """Those of each group that this config sets, or that a checkpoint brought along instead."""
    return _kept.get(optimizer, _configured.get(optimizer, []))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {}
    for key, value in group.items():
        value = group.get("initial_lr", value) if key == "lr" else value
        value = float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
        if key not in _QUIET and isinstance(value, int | float | tuple | list):
            options[key] = value
    return options


def refuse_branch(schedulers: Mapping[str, Any], branch: BranchParameters) -> None:
    """Raises ConfigError for a scheduler that cannot do what the words ask."""
    if branch.schedule == "new":
        return
    advice = 'Use branch.schedule="new", or a LambdaLR, as build_schedule makes.'
    for name, scheduler, is_alone in outermost(schedulers):
        if isinstance(scheduler, LambdaLR):
            continue
        kind = type(scheduler).__name__
        if branch.schedule == "extend":
            raise ConfigError(f'branch.schedule="extend": {name!r} is a {kind}, whose form is not known. {advice}')
        if branch.optimizer == "keep":
            continue
        cannot = f"branch.optimizer={branch.optimizer!r} gives {name!r} another learning rate: it is"
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigError(f"{cannot} a {kind}, which has come to its rate by a metric of before. {advice}")
        if not is_alone:
            raise ConfigError(
                f"{cannot} a {kind}, which computes each rate from the last, and several schedules drive one optimizer "
                f"here. {advice} Or join them as a ChainedScheduler."
            )


def restore_rates(trainer: AbstractTrainer, shared: Mapping[str, Any], branch: BranchParameters) -> None:
    """Gives schedulers their place, and optimizers the rate of it, after counters and the optimizers' own state.

    Args:
        trainer: With the schedulers that this config builds.
        shared: What all ranks share of the checkpoint.
        branch: What goes along.

    Raises:
        CheckpointError: It has other schedulers, or they cannot go on.
    """
    schedulers, saved = trainer.named_schedulers(), shared["schedulers"]
    if branch.schedule != "new" and set(schedulers) != set(saved):
        raise CheckpointError(
            f"it has schedulers {sorted(saved)}, and this trainer {sorted(schedulers)}. A run of another name begins "
            'with its own by branch=BranchParameters(schedule="new").'
        )
    _place_in_tokens(trainer, shared, branch)
    kept = _take_options_back(trainer, shared.get("configured_options", {}) if branch.optimizer == "keep" else {})
    said = []
    if branch.schedule == "new":
        if branch.optimizer == "keep":
            _begin_at_the_base(trainer)
        said = spent_before(trainer) if branch.counters == "keep" else []
    else:
        said = _go_on(schedulers, shared, branch)
    if trainer.world.is_main:
        for line in [*said, *what_goes_on(trainer, shared, branch, kept, _caps)]:
            logger.warning("%s", line)


def _take_options_back(trainer: AbstractTrainer, in_force: Mapping[str, Options]) -> list[KeptOption]:
    """Those that go along from a checkpoint hold from now on; where this config has others, they are noted."""
    optimizers = trainer.named_optimizers()
    of_schedules = {
        (name, option)
        for name, optimizer in optimizers.items()
        for scheduler in trainer.named_schedulers().values()
        if scheduler.optimizer is optimizer
        for option in options_of(scheduler)
    }
    kept = [
        one
        for one in kept_options(optimizers, _configured, in_force)
        if (one.optimizer, one.option) not in of_schedules
    ]
    for optimizer in optimizers.values():
        _kept.pop(optimizer, None)
    for name, options in in_force.items():
        _kept[optimizers[name]] = options
    trainer._recorder.kept_options = [one._asdict() for one in kept]
    return kept


def _place_in_tokens(trainer: AbstractTrainer, shared: Mapping[str, Any], branch: BranchParameters) -> None:
    """Schedules by tokens begin at the first token after their origin, however the run counts its tokens."""
    now, then = trainer.progress.tokens_seen, shared["progress"].get("tokens_seen", 0)
    for name, scheduler in trainer.named_schedulers().items():
        passed = 0 if branch.schedule == "new" else then - shared.get("token_origins", {}).get(name, 0)
        set_token_origin(scheduler, now - passed)


def _begin_at_the_base(trainer: AbstractTrainer) -> None:
    """The checkpoint's options as they were before any schedule changed them."""
    for optimizer in trainer.named_optimizers().values():
        own, bases = options_in_force(optimizer), base_rates(optimizer)
        for group, options, base in zip(optimizer.param_groups, chain(own, repeat({})), bases, strict=False):
            forget_cycle(group, options)
            set_rate(group, base)
        for name, scheduler, _ in outermost(trainer.named_schedulers()):
            if scheduler.optimizer is not optimizer:
                continue
            if isinstance(scheduler, LambdaLR):
                _rebase(scheduler, bases)
            else:
                begin_again(name, scheduler, own)


def _go_on(schedulers: Mapping[str, Scheduler], shared: Mapping[str, Any], branch: BranchParameters) -> list[str]:
    said = []
    bases = {name: list(one.base_lrs) for name, one in schedulers.items() if isinstance(one, LambdaLR)}
    for name, one, is_alone in outermost(schedulers):
        saved, n_groups = shared["schedulers"][name], len(one.optimizer.param_groups)
        if isinstance(one, LambdaLR) and len(saved.get("base_lrs", one.base_lrs)) != n_groups:
            one.last_epoch = saved["last_epoch"]  # all that a new optimizer's groups have of the former ones
        else:
            line = take_back(
                name,
                one,
                saved,
                shared.get("built_schedules", {}).get(name),
                is_alone=is_alone,
                own=options_in_force(one.optimizer),
                is_rebased=branch.optimizer != "keep" and not isinstance(one, LambdaLR),
            )
            said += [] if line is None else [line]
        if not isinstance(one, LambdaLR):
            continue
        if name in shared.get("rate_caps", {}):
            cap_rates(one, for_groups(shared["rate_caps"][name], n_groups))
        if branch.schedule == "extend":
            _cap_where_it_climbs(one, for_groups(factors_of(saved), n_groups))
        if branch.optimizer != "keep":
            _rebase(one, bases[name])
    return said


def rate_caps(schedulers: Mapping[str, Any]) -> dict[str, list[float]]:
    """The factors above which extended schedules do not go, one a group, for a checkpoint."""
    return {name: list(_caps[one]) for name, one in schedulers.items() if isinstance(one, LambdaLR) and one in _caps}


def cap_rates(scheduler: LambdaLR, caps: Sequence[float]) -> None:
    """From now on no group's factor is above its cap, nor above one that it has already."""
    kept = [min(pair) for pair in zip(caps, _caps.get(scheduler, caps), strict=True)]
    _caps[scheduler] = kept
    scheduler.lr_lambdas = [_at_most(form, cap) for form, cap in zip(scheduler.lr_lambdas, kept, strict=True)]


def _cap_where_it_climbs(scheduler: LambdaLR, caps: Sequence[float]) -> None:
    """Caps the groups whose form is above now: that of others rises by itself."""
    step = scheduler.last_epoch
    now = [form(step) for form in scheduler.lr_lambdas]
    climbs = [found > cap and not math.isclose(found, cap, rel_tol=1e-9) for found, cap in zip(now, caps, strict=True)]
    if any(climbs):
        cap_rates(scheduler, [cap if climb else math.inf for cap, climb in zip(caps, climbs, strict=True)])


def _at_most(form: Callable[[int], float], cap: float) -> Callable[[int], float]:
    return lambda step: min(cap, form(step))


def _rebase(scheduler: LambdaLR, bases: Sequence[Any]) -> None:
    """The scheduler goes on at its step, from these rates."""
    scheduler.base_lrs = list(bases)
    rates = []
    for group, base, form in zip(scheduler.optimizer.param_groups, bases, scheduler.lr_lambdas, strict=True):
        rate = base * form(scheduler.last_epoch)
        group["initial_lr"] = copied(base)
        set_rate(group, rate)
        rates.append(copied(group["lr"]))
    scheduler._last_lr = rates
