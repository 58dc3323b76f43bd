"""Learning rates where a run goes on from a checkpoint: whose they are, and from which step of the schedule.

A LambdaLR, as `build_schedule` makes, is a base times a function of its step, so both can be chosen. Other schedulers
compute a rate from the last one, so of theirs only what needs no computing is allowed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from dream_trainer.config.branch_parameters import BranchParameters
from dream_trainer.errors import CheckpointError

logger = logging.getLogger("dream_trainer")

Options = list[dict[str, Any]]

_caps: WeakKeyDictionary[LambdaLR, list[float]] = WeakKeyDictionary()
_configured: WeakKeyDictionary[Optimizer, Options] = WeakKeyDictionary()

# What depends on the machine, or is told by "lr".
_QUIET = ("params", "param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable", "maximize")


def note_options(optimizers: Mapping[str, Optimizer]) -> None:
    """Notes the numbers that `configure_optimizers` gave each group: learning rate, decay and the like."""
    for optimizer in optimizers.values():
        _configured[optimizer] = [_options(group) for group in optimizer.param_groups]


def configured_options(optimizers: Mapping[str, Optimizer]) -> dict[str, Options]:
    """Those that are in force, for a checkpoint: what was noted, or what went along from a checkpoint over it."""
    return {name: _configured.get(optimizer, []) for name, optimizer in optimizers.items()}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {}
    for key, value in group.items():
        value = group.get("initial_lr", value) if key == "lr" else value
        value = float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
        if key not in _QUIET and isinstance(value, int | float | tuple | list):
            options[key] = value
    return options


def refuse_branch(schedulers: Mapping[str, Any], branch: BranchParameters) -> None:
    """Raises CheckpointError for a scheduler that cannot do what the words ask."""
    rebases = branch.optimizer != "keep" and branch.schedule != "new"
    for name, scheduler in schedulers.items():
        if isinstance(scheduler, LambdaLR):
            continue
        kind = type(scheduler).__name__
        advice = 'Use branch.schedule="new", or a LambdaLR, as build_schedule makes.'
        if rebases:
            raise CheckpointError(
                f"branch.optimizer={branch.optimizer!r} gives {name!r} another learning rate, and a {kind} computes "
                f"each rate from the last, so that it cannot go on at its step under it. {advice}"
            )
        if branch.schedule == "extend":
            raise CheckpointError(f'branch.schedule="extend": {name!r} is a {kind}, whose form is not known. {advice}')
        is_plateau = isinstance(scheduler, ReduceLROnPlateau)  # it has no rate of its own to begin from
        if branch.schedule == "new" and branch.optimizer == "keep" and not is_plateau:
            raise CheckpointError(
                f'branch.schedule="new" and branch.optimizer="keep": {name!r} is a {kind}, which cannot begin anew '
                'from the checkpoint\'s learning rate. Use branch.optimizer="moments" or "new", or a LambdaLR.'
            )


def branch_rates(
    schedulers: Mapping[str, Any], saved: Mapping[str, Any], caps: Mapping[str, list[float]], branch: BranchParameters
) -> None:
    """Gives schedulers their place, and optimizers the rate of it, after the optimizers' own state is restored.

    Args:
        schedulers: As this config builds them.
        saved: Their states in the checkpoint.
        caps: Factors above which they did not go there.
        branch: What goes along.
    """
    for name, scheduler in schedulers.items():
        if branch.schedule == "new":
            if isinstance(scheduler, LambdaLR) and branch.optimizer == "keep":
                _rebase(scheduler, [group.get("initial_lr", group["lr"]) for group in scheduler.optimizer.param_groups])
            continue
        bases = list(scheduler.base_lrs) if isinstance(scheduler, LambdaLR) else []
        scheduler.load_state_dict(saved[name])
        if not isinstance(scheduler, LambdaLR):
            continue
        if name in caps:
            cap_rates(scheduler, caps[name])
        if branch.schedule == "extend":
            _cap_where_it_climbs(scheduler, _factors_of(saved[name]))
        if branch.optimizer != "keep":
            _rebase(scheduler, bases)


def rate_caps(schedulers: Mapping[str, Any]) -> dict[str, list[float]]:
    """The factors above which extended schedules do not go, one a group, for a checkpoint."""
    return {name: list(_caps[one]) for name, one in schedulers.items() if isinstance(one, LambdaLR) and one in _caps}


def _factors_of(state: Mapping[str, Any]) -> list[float]:
    """What a LambdaLR multiplied each group's own rate by when it was saved."""
    return [
        float(rate) / float(base) if float(base) else 1.0
        for rate, base in zip(state["_last_lr"], state["base_lrs"], strict=True)
    ]


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
        group["initial_lr"] = _copy(base)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
        rates.append(_copy(group["lr"]))
    scheduler._last_lr = rates


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def say_what_goes_on(
    optimizers: Mapping[str, Optimizer],
    schedulers: Mapping[str, Any],
    shared: Mapping[str, Any],
    branch: BranchParameters,
) -> None:
    """Warns of options that this config sets otherwise than the checkpoint's, which go on, of a stretched schedule, and
    of one that is held at zero.

    Args:
        optimizers: As restored.
        schedulers: As restored.
        shared: What all ranks share of the checkpoint.
        branch: What goes along.
    """
    if branch.optimizer == "keep":
        for name, in_force in shared.get("configured_options", {}).items():
            _say_which_options(name, _configured.get(optimizers[name], []), in_force)
            _configured[optimizers[name]] = in_force
    if branch.schedule == "keep":
        for name, scheduler in schedulers.items():
            if isinstance(scheduler, LambdaLR):
                _say_if_stretched(name, scheduler, _factors_of(shared["schedulers"][name]))
    if branch.schedule == "extend":
        for name, scheduler in schedulers.items():
            if isinstance(scheduler, LambdaLR):
                _say_if_held_at_zero(name, scheduler)


def _say_if_held_at_zero(name: str, scheduler: LambdaLR) -> None:
    if min(_caps.get(scheduler, [math.inf])) < 1e-12:
        logger.warning(
            '%s: the learning rate was 0 at step %d, and branch.schedule="extend" keeps it there, so that nothing will '
            'be learnt. Use branch.schedule="new", or begin from an earlier checkpoint.',
            *(name, scheduler.last_epoch),
        )


def _say_which_options(name: str, ours: Options, in_force: Options) -> None:
    for index, (mine, theirs) in enumerate(zip(ours, in_force, strict=False)):
        for key in [key for key in mine if key in theirs and mine[key] != theirs[key]]:
            logger.warning(
                "%s: this config has %s=%s, and the checkpoint's %s goes on (group %d). For the new one begin a run of "
                'another name: resume=<the checkpoint>, branch=BranchParameters(optimizer="moments").',
                *(name, key, mine[key], theirs[key], index),
            )


def _say_if_stretched(name: str, scheduler: LambdaLR, saved: list[float]) -> None:
    step = scheduler.last_epoch
    for was, form in zip(saved, scheduler.lr_lambdas, strict=True):
        now = form(step)
        if not math.isclose(now, was, rel_tol=1e-6, abs_tol=1e-9):
            logger.warning(
                "%s has another form than in the checkpoint, as for another total_steps: at step %d it multiplied the "
                "learning rate by %.4g, and the new form, which holds from the next step on, by %.4g. A run of another "
                'name that begins there with branch=BranchParameters(schedule="extend") does not climb back.',
                *(name, step, was, now),
            )
            return
