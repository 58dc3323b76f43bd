"""What is said of learning rates where a run goes on from a checkpoint, on rank 0."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from dream_trainer.config.branch_parameters import BranchParameters
from dream_trainer.optim.learning_rates import tokens_left
from dream_trainer.trainer.other_run import ANOTHER_RUN

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer

Options = list[dict[str, Any]]


class KeptOption(NamedTuple):
    """An option of an optimizer's group that went along from a checkpoint, and that this config sets otherwise.

    Attributes:
        optimizer: Its name.
        group: Number of the group.
        option: Such as `lr`.
        config: What this config sets.
        trained: The checkpoint's, which goes on.
    """

    optimizer: str
    group: int
    option: str
    config: Any
    trained: Any


def kept_options(
    optimizers: Mapping[str, Optimizer], configured: Mapping[Optimizer, Options], in_force: Mapping[str, Options]
) -> Iterator[KeptOption]:
    """Where what this config sets, and what goes on, are not the same."""
    for name, of_groups in in_force.items():
        ours = configured.get(optimizers[name], [])
        for group, (mine, theirs) in enumerate(zip(ours, of_groups, strict=False)):
            for option in mine:
                if option in theirs and mine[option] != theirs[option]:
                    yield KeptOption(name, group, option, mine[option], theirs[option])


def what_goes_on(
    trainer: AbstractTrainer,
    shared: Mapping[str, Any],
    branch: BranchParameters,
    kept: Sequence[KeptOption],
    caps: Mapping[LambdaLR, list[float]],
) -> list[str]:
    """Lines on options that this config sets otherwise than the checkpoint's, which go on, on a stretched schedule, and
    on one that is held at zero.

    Args:
        trainer: As restored.
        shared: What all ranks share of the checkpoint.
        branch: What goes along.
        kept: The options that go on.
        caps: Factors above which schedules do not go.
    """
    anew = ANOTHER_RUN.format(words='optimizer="moments"')
    alike: dict[tuple[str, str], list[int]] = {}
    for one in kept:
        options = f"{one.option}={one.config}, and the checkpoint's {one.trained} goes on"
        alike.setdefault((one.optimizer, options), []).append(one.group)
    said = [
        f"{optimizer}: this config has {options} ({'group' if len(groups) == 1 else 'groups'} "
        f"{', '.join(map(str, groups))}). To train on with this config's, {anew}."
        for (optimizer, options), groups in alike.items()
    ]
    for name, scheduler in trainer.named_schedulers().items():
        was_of_the_kind = shared.get("built_schedules", {}).get(name, {}).get("kind", "LambdaLR") == "LambdaLR"
        if isinstance(scheduler, LambdaLR) and branch.schedule == "keep" and was_of_the_kind:
            factors = factors_of(shared["schedulers"][name])
            said += _is_stretched(name, scheduler, for_groups(factors, len(scheduler.lr_lambdas)))
        if isinstance(scheduler, LambdaLR) and branch.schedule == "extend":
            said += _is_held_at_zero(name, scheduler, caps.get(scheduler, [math.inf]))
    return said


def spent_before(trainer: AbstractTrainer) -> list[str]:
    """Lines on schedules that begin anew in a run whose counters go on, and so end before they are through."""
    total, done = trainer.total_steps, trainer.global_step
    said = []
    for name, scheduler in trainer.named_schedulers().items():
        takes, length, unit = 0, 0, "steps"
        if (left := tokens_left(scheduler)) is not None:
            takes, length, unit = *left, "tokens"
        elif total is not None and not isinstance(scheduler, ReduceLROnPlateau):
            takes, length = max(0, total - done), total
        if takes < length:
            said.append(
                f'{name} begins anew (branch.schedule="new") and is built for {length} {unit}, of which this run takes '
                f'only {takes}, since its counters go on (branch.counters="keep"). With counters="new" the limits '
                "count from here, too."
            )
    return said


def factors_of(state: Mapping[str, Any]) -> list[float]:
    """What a LambdaLR multiplied each group's own rate by when it was saved."""
    return [
        float(rate) / float(base) if float(base) else 1.0
        for rate, base in zip(state["_last_lr"], state["base_lrs"], strict=True)
    ]


def for_groups(factors: Sequence[float], n_groups: int) -> list[float]:
    """One for each group; the highest for all where other groups had them."""
    return [*factors] if len(factors) == n_groups else [max(factors)] * n_groups


def _is_stretched(name: str, scheduler: LambdaLR, saved: Sequence[float]) -> list[str]:
    step = scheduler.last_epoch
    for was, form in zip(saved, scheduler.lr_lambdas, strict=True):
        now = form(step)
        if not math.isclose(now, was, rel_tol=1e-6, abs_tol=1e-9):
            line = (
                f"{name} has another form than in the checkpoint, as for another total_steps: at step {step} it "
                f"multiplied the learning rate by {was:.4g}, and the new form, which holds from the next step on, by "
                f"{now:.4g}. A run of another name that begins there with "
                'branch=BranchParameters(schedule="extend") does not climb back.'
            )
            return [line]
    return []


def _is_held_at_zero(name: str, scheduler: LambdaLR, caps: Sequence[float]) -> list[str]:
    if min(caps) >= 1e-12:
        return []
    line = (
        f"{name}: the learning rate was 0 at step {scheduler.last_epoch}, and "
        'branch.schedule="extend" keeps it there, so that nothing will be learnt. Use branch.schedule="new", or begin '
        "from an earlier checkpoint."
    )
    return [line]
