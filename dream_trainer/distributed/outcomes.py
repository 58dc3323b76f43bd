"""How all ranks come to one outcome: what fails on one of them is an error on all."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar, cast

from dream_trainer.distributed.ranks import Ranks
from dream_trainer.errors import CheckpointError, DamagedCheckpointError

T = TypeVar("T")


class _Failure(NamedTuple):
    message: str  # what one rank tells the others of an error
    is_damage: bool
    traceback: str  # empty where the message says it all


def on_all_ranks(world: Ranks, task: str, function: Callable[[], T]) -> T:
    """Runs `function` on every rank and returns this rank's result; a failure on any rank is one error on all."""
    result, failure, cause = _attempt(function)
    _raise_failures(world, task, world.all_gather_object(failure), cause)
    return cast(T, result)


def from_all_ranks(world: Ranks, task: str, function: Callable[[], T]) -> list[T]:
    """As `on_all_ranks`, but returns the results of all ranks, which must be picklable, in rank order."""
    result, failure, cause = _attempt(function)
    outcomes = world.all_gather_object((result, failure))
    _raise_failures(world, task, [failure for _, failure in outcomes], cause)
    return [cast(T, result) for result, _ in outcomes]


def from_main_rank(world: Ranks, task: str, function: Callable[[], T]) -> T:
    """Runs `function` on rank 0 only and returns its result, which must be picklable, on every rank."""
    return cast(T, from_all_ranks(world, task, lambda: function() if world.is_main else None)[0])


def to_main_rank(world: Ranks, task: str, function: Callable[[], T]) -> list[T] | None:
    """As `from_all_ranks`, but only rank 0 gets the results; None on the others, where they may be many and large."""
    result, failure, cause = _attempt(function)
    _raise_failures(world, task, world.all_gather_object(failure), cause)
    return world.gather_object(result)


def dealt_by_main_rank(world: Ranks, task: str, function: Callable[[], Sequence[T]]) -> T:
    """Runs `function` on rank 0 only and returns to each rank its element of the result, which must be picklable."""
    result, failure, cause = _attempt(function) if world.is_main else (None, None, None)
    _raise_failures(world, task, world.all_gather_object(failure), cause)
    return cast(T, world.scatter_object(result))


def _attempt(function: Callable[[], T]) -> tuple[T | None, _Failure | None, Exception | None]:
    try:
        return function(), None, None
    except Exception as error:
        if isinstance(error, CheckpointError):
            return None, _Failure(str(error), isinstance(error, DamagedCheckpointError), ""), error
        return None, _Failure(f"{type(error).__name__}: {error}", False, traceback.format_exc()), error


def _raise_failures(world: Ranks, task: str, told: Sequence[_Failure | None], cause: Exception | None) -> None:
    failures = {rank: failure for rank, failure in enumerate(told) if failure is not None}
    if not failures:
        return
    messages = [failure.message for failure in failures.values()]
    if len(messages) == world.world_size and len(set(messages)) == 1:
        text = messages[0]
    else:
        text = "; ".join(f"rank {rank}: {failure.message}" for rank, failure in failures.items())
    kind = DamagedCheckpointError if any(failure.is_damage for failure in failures.values()) else CheckpointError
    raised = kind(f"Could not {task}: {text}")
    if cause is None:
        # All ranks raise at once, and the traceback that a user gets to see may be that of a rank where nothing failed.
        for rank, failure in failures.items():
            if failure.traceback:
                raised.add_note(f"On rank {rank}:\n{failure.traceback}")
    raise raised from cause
