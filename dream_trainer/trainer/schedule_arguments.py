"""PyTorch's schedulers where a run goes on: the arguments they are built with now hold, and what was saved says how far
they are.

A scheduler's state contains both, such as CosineAnnealingLR's T_max beside its last_epoch, and does not tell which is
which. So the state of each is noted when it is built, and kept in checkpoints beside the state of later. Where both
were built alike, the whole state is taken back. Where not, the new one is stepped from its beginning to its place.
Loading only last_epoch would not do: most compute each rate from the last, which the former arguments have led to, so
that a LinearLR that is given more steps would rise far above its end.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, MultiplicativeLR, ReduceLROnPlateau

from dream_trainer.checkpoint import typed_json
from dream_trainer.compat.schedulers import inner_schedulers
from dream_trainer.errors import CheckpointError
from dream_trainer.trainer.registry import Scheduler

# They follow the optimizer's learning rates, which go along with the optimizer.
_RATES = ("base_lrs", "_last_lr")
_INNER = "_schedulers"  # states of the schedulers that a SequentialLR or ChainedScheduler is made of
# What OneCycleLR and CyclicLR keep in the optimizer's groups, and what they alter there beside the learning rate.
_OF_CYCLES = ("max_lr", "min_lr", "max_momentum", "base_momentum")
_CYCLED = ("momentum", "betas")


class _Built(NamedTuple):
    """A scheduler before its first step.

    Attributes:
        kind: Its class.
        state: As a checkpoint gives it back; without what no checkpoint can contain.
        rates: The rate that it gave each group.
        bases: The rate that it began from.
        cycles: Of each group, what a cycle keeps there and alters.
        has_own_rates: Whether its rates are arguments of its own, whatever the optimizer's.
    """

    kind: str
    state: dict[str, Any]
    rates: list[Any]
    bases: list[Any]
    cycles: list[dict[str, Any]]
    has_own_rates: bool


_built: WeakKeyDictionary[Scheduler, _Built] = WeakKeyDictionary()


def note_built(schedulers: Mapping[str, Scheduler]) -> None:
    """Notes schedulers that have not been stepped yet; those that are known already are left alone."""
    for scheduler in schedulers.values():
        if scheduler not in _built:
            groups = scheduler.optimizer.param_groups
            _built[scheduler] = _Built(
                type(scheduler).__name__,
                {key: value for key, value in scheduler.state_dict().items() if _is_plain(value)},
                [copied(group["lr"]) for group in groups],
                [copied(group.get("initial_lr", group["lr"])) for group in groups],
                [_cycle_of(group) for group in groups],
                any("max_lr" in group for group in groups) or _is_cyclic(scheduler.state_dict()),
            )
            _built[scheduler] = _built[scheduler]._replace(state=_round_trip(_built[scheduler].state))


def built_schedules(schedulers: Mapping[str, Scheduler]) -> dict[str, Any]:
    """What was noted of them, for a checkpoint."""
    return {
        name: {
            "kind": _built[one].kind,
            "state": _built[one].state,
            "cycles": _built[one].cycles,
            "products": _products(one, one.state_dict()),
        }
        for name, one in schedulers.items()
        if one in _built
    }


def options_of(scheduler: Scheduler) -> set[str]:
    """Options of its optimizer that are its own arguments, whatever the optimizer was configured with."""
    built = _built.get(scheduler)
    if built is None:
        return set()
    return ({"lr"} if built.has_own_rates else set()) | {key for cycle in built.cycles for key in cycle}


def outermost(schedulers: Mapping[str, Scheduler]) -> Iterator[tuple[str, Scheduler, bool]]:
    """Name and scheduler of those that are not part of another one, whose state contains theirs, and whether no other
    one drives the same optimizer."""
    inner = {id(part) for scheduler in schedulers.values() for part in inner_schedulers(scheduler)}
    outer = {name: one for name, one in schedulers.items() if id(one) not in inner}
    driven = Counter(id(one.optimizer) for one in outer.values())
    for name, one in outer.items():
        yield name, one, driven[id(one.optimizer)] == 1


def take_back(
    name: str,
    scheduler: Scheduler,
    saved: Mapping[str, Any],
    then: Mapping[str, Any] | None,
    *,
    is_alone: bool,
    own: Sequence[Mapping[str, Any]],
    is_rebased: bool = False,
) -> str | None:
    """Gives a scheduler its place. If it is not built as it was, the optimizer's learning rates follow it, too.

    Args:
        name: Its name.
        scheduler: As it is built now; its optimizer has the saved options, or where `is_rebased` its own.
        saved: Its state.
        then: What `built_schedules` gave for it when that was saved; None where that is not known, as in checkpoints of
            before it was kept: the state is taken back whole.
        is_alone: Whether no other scheduler drives its optimizer. Where several do, the learning rate is the work of
            all of them, and goes on from where it is.
        own: Options of each group before any schedule changed them.
        is_rebased: Whether its optimizer has other rates than the saved ones, so that it comes to its place by steps.

    Returns:
        What is to be said of arguments that differ; None if none does.

    Raises:
        CheckpointError: It cannot go on from there: it follows a metric and the other one does not, or it refuses so
            many steps.
    """
    now = _built.get(scheduler)
    changed = "" if then is None or now is None else _difference(then, now, _products(scheduler, saved))
    if now is not None and is_rebased and not changed:
        _step_from_the_beginning(name, scheduler, now, max(0, _steps(saved) - _steps(now.state)), own)
        return None
    if then is None or now is None or not changed:
        scheduler.load_state_dict(dict(saved))
        return None
    said = f"{name} {changed}"
    is_plateau = isinstance(scheduler, ReduceLROnPlateau)
    if then["kind"] != now.kind and "ReduceLROnPlateau" in (then["kind"], now.kind):
        raise CheckpointError(
            f"{said}, and only one of them follows a metric: it has no place to go on from. Begin a run of another "
            'name with branch=BranchParameters(schedule="new").'
        )
    if is_plateau or not is_alone or (isinstance(scheduler, LambdaLR) and then["kind"] == now.kind):
        scheduler.load_state_dict(_merged(dict(saved), then["state"], now.state, scheduler.state_dict()))
        for group, cycle in zip(scheduler.optimizer.param_groups, now.cycles, strict=True):
            group.update({key: value for key, value in cycle.items() if key in _OF_CYCLES})
        goes_on = "" if is_alone else ", and the learning rate, which several schedules drive, goes on from where it is"
        return f"{said}. This holds from here on{goes_on}."
    before = float(saved.get("_last_lr", [scheduler.optimizer.param_groups[0]["lr"]])[0])
    steps = max(0, _steps(saved) - _steps(now.state))
    _step_from_the_beginning(said, scheduler, now, steps, own)
    after = float(scheduler.optimizer.param_groups[0]["lr"])
    return (
        f"{said}. It goes on as if this had held from its beginning: at its step {steps} the learning rate is "
        f"{after:.4g}, and was {before:.4g}."
    )


def begin_again(name: str, scheduler: Scheduler, own: Sequence[Mapping[str, Any]]) -> None:
    """A scheduler that is not stepped yet begins from these options."""
    if scheduler in _built and not isinstance(scheduler, ReduceLROnPlateau):  # that follows whatever the rate is
        _step_from_the_beginning(name, scheduler, _built[scheduler], 0, own)


def forget_cycle(group: dict[str, Any], own: Mapping[str, Any]) -> None:
    """What OneCycleLR or CyclicLR keep in a group goes, and the momentum that they altered is as `own` has it."""
    is_altered = "max_momentum" in group
    for key in _OF_CYCLES:
        group.pop(key, None)
    if is_altered:
        group.update({key: own[key] for key in _CYCLED if key in own})


def base_rates_of(scheduled: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The rate of each group before any schedule changed it; a group may have been added since `own` was noted."""
    pairs = zip(scheduled, chain(own, repeat({})), strict=False)
    return [options.get("lr", group.get("initial_lr", group["lr"])) for group, options in pairs]


def _step_from_the_beginning(
    said: str, scheduler: Scheduler, built: _Built, steps: int, own: Sequence[Mapping[str, Any]]
) -> None:
    groups = scheduler.optimizer.param_groups
    bases = built.bases if built.has_own_rates else base_rates_of(groups, own)
    for group, options, cycle, base in zip(groups, chain(own, repeat({})), built.cycles, bases, strict=False):
        forget_cycle(group, options)
        group.update(cycle)
        group["initial_lr"] = copied(base)
    for group, base, rate, before in zip(groups, bases, built.rates, built.bases, strict=True):
        # At its beginning each of PyTorch's is a multiple of the base.
        set_rate(group, rate if base == before else rate * base / before if before else 0.0)
    scheduler.load_state_dict(_with_bases(_round_trip(built.state), bases))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer did not step between
        try:
            for _ in range(steps):
                scheduler.step()  # type: ignore[call-arg]  # no ReduceLROnPlateau comes here
        except (ValueError, ZeroDivisionError) as error:
            raise CheckpointError(
                f"{said}, and that does not reach to its step {steps} ({error}). Is the run longer than its limits now?"
            ) from error


def copied(value: Any) -> Any:
    """An option of a group: a copy where it is a tensor, which steps change in place."""
    return value.clone() if isinstance(value, Tensor) else value


def set_rate(group: dict[str, Any], rate: Any) -> None:
    """Sets a group's learning rate, in place where it is a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _steps(state: Mapping[str, Any]) -> int:
    """A ChainedScheduler keeps no count of its own."""
    return int(state["last_epoch"]) if "last_epoch" in state else _steps(state[_INNER][0])


def _with_bases(state: dict[str, Any], bases: Sequence[Any]) -> dict[str, Any]:
    if _is_cyclic(state):
        return state  # they are arguments of its own
    inner = {_INNER: [_with_bases(one, bases) for one in state[_INNER]]} if _INNER in state else {}
    return state | inner | ({"base_lrs": [copied(base) for base in bases]} if "base_lrs" in state else {})


def _merged(
    saved: dict[str, Any], then: Mapping[str, Any], now: Mapping[str, Any], live: Mapping[str, Any]
) -> dict[str, Any]:
    """The saved state with the arguments of now."""
    merged = dict(saved)
    for key in saved.keys() & then.keys() & now.keys() - set(_RATES):
        if key == _INNER and len(then[key]) == len(now[key]):
            merged[key] = [_merged(*states) for states in zip(saved[key], then[key], now[key], live[key], strict=True)]
        elif not _is_same(then[key], now[key]):
            merged[key] = live[key]
    return merged


def _cycle_of(group: Mapping[str, Any]) -> dict[str, Any]:
    names = _OF_CYCLES + (_CYCLED if "max_momentum" in group else ())
    return {key: copied(group[key]) for key in names if key in group}


def _is_cyclic(state: Mapping[str, Any]) -> bool:
    """CyclicLR: alone among PyTorch's it is given its base rates."""
    return "max_lrs" in state or any(map(_is_cyclic, state.get(_INNER, ())))


def _products(scheduler: Scheduler, state: Mapping[str, Any]) -> list[list[float]]:
    """What each MultiplicativeLR in it has multiplied each group's rate by: its functions are not in its state."""
    parts = zip((scheduler, *inner_schedulers(scheduler)), _states(state), strict=False)
    return [
        [math.prod(form(step) for step in range(1, of_part["last_epoch"] + 1)) for form in part.lr_lambdas]
        for part, of_part in parts
        if isinstance(part, MultiplicativeLR)
    ]


def _states(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield state
    for inner in state.get(_INNER, ()):
        yield from _states(inner)


def _difference(then: Mapping[str, Any], now: _Built, products: list[list[float]]) -> str:
    """In words; what begins with an underscore is worked out from other arguments, and is told only if nothing else
    is."""
    kind = then["kind"]
    if kind != now.kind:
        return f"is now {now.kind} instead of {kind}"
    differences = _changed(then["state"], now.state, "")
    for before, after in zip(then.get("cycles", ()), now.cycles, strict=False):
        told = [key for key in _OF_CYCLES if key in before and key in after]
        differences += _changed({key: before[key] for key in told}, {key: after[key] for key in told}, "")
    for was, is_now in zip(then.get("products", ()), products, strict=False):
        if not all(math.isclose(one, other, rel_tol=1e-9) for one, other in zip(was, is_now, strict=False)):
            differences.append(f"factors whose product so far is {is_now[0]:.4g} instead of {was[0]:.4g}")
    names = [one.partition("=")[0].rpartition(".")[2] for one in differences]
    arguments = [one for one, name in zip(differences, names, strict=True) if name[0] != "_"] or differences
    return f"({kind}) is now built with {', '.join(arguments)}" if arguments else ""


def _changed(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str) -> list[str]:
    found = []
    rates = ("_last_lr",) if "max_lrs" in now else _RATES
    for key in [key for key in now if key in then and key not in rates]:
        if key == _INNER:
            found += _changed_inside(then[key], now[key], prefix)
        elif not _is_same(then[key], now[key]):
            shown = key.removeprefix("_") if key == "_milestones" else key
            found.append(f"{prefix}{shown}={_spelled(now[key])} instead of {_spelled(then[key])}")
    return found


def _changed_inside(then: Sequence[Any], now: Sequence[Any], prefix: str) -> list[str]:
    arguments = [[{key for key in state if key[0] != "_"} for state in states] for states in (then, now)]
    if arguments[0] != arguments[1]:
        return [f"{prefix}schedulers={len(now)} others instead of {len(then)}"]
    pairs = enumerate(zip(then, now, strict=True))
    return [line for number, (old, new) in pairs for line in _changed(old, new, f"{prefix}schedulers[{number}].")]


def _spelled(value: Any) -> str:
    return str(sorted(value.elements()) if isinstance(value, Counter) else value)


def _is_same(one: Any, other: Any) -> bool:
    return typed_json.dumps(one) == typed_json.dumps(other)


def _is_plain(value: Any) -> bool:
    try:
        typed_json.dumps(value)
    except TypeError:
        return False
    return True


def _round_trip(state: dict[str, Any]) -> dict[str, Any]:
    """A copy, and of the types that a checkpoint gives back."""
    copied: dict[str, Any] = typed_json.loads(typed_json.dumps(state))
    return copied
