"""The trainer's events, and the table of who really listens to each.

The table is built once, from the methods that override the documented no-ops, each heard once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dream_trainer.events.callback import Callback
from dream_trainer.trainer.hooks import Hooks
from dream_trainer.trainer.user_class.overrides import bound, heard

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer

Listener = Callable[..., None]


class Heard(NamedTuple):
    listeners: tuple[Listener, ...]
    is_heard_anywhere: bool  # whether some rank has a listener


_STATE = {"state_dict", "load_state_dict"}

# Where models are whole already; `post_optimizer_step` has shards.
_IN_STEPS = {"pre_train_batch", "post_train_batch", "post_train_step", "pre_val_batch", "post_val_batch"}
# Outside of steps, and with models that are real.
_BETWEEN_STEPS = {
    *("post_setup", "pre_fit", "pre_epoch", "pre_val_epoch", "post_val_epoch", "post_epoch", "post_fit"),
}

# What a callback and a trainer's class may both define, in the order in which it happens.
EVENTS: tuple[str, ...] = tuple(
    name for name in vars(Callback) if name in vars(Hooks) and name not in _STATE and not name.startswith("_")
)


def listening_callbacks(trainer: AbstractTrainer, event: str) -> list[Callback]:
    """The callbacks whose class overrides `event`, in the order they run."""
    noop = getattr(Callback, event)
    return [c for c in trainer.callbacks.in_order() if getattr(type(c), event) is not noop]


def anyone_listens(trainer: AbstractTrainer, event: str) -> bool:
    """Whether `event` has a listener on any rank; the same answer on all of them."""
    return bool(heard(type(trainer), event)) or bool(listening_callbacks(trainer, event))


def heard_of(trainer: AbstractTrainer, event: str) -> Heard:
    return Heard(trainer._events[event], anyone_listens(trainer, event))


def _with_whole_parameters(trainer: AbstractTrainer, event: str, listener: Listener) -> Listener:
    """`listener`, for whom small sharded models are whole, as they are in steps."""
    if event not in _BETWEEN_STEPS:
        return listener

    def inside(*args: Any) -> None:
        with trainer._parallel.whole():
            listener(*args)

    return inside


def _with_shards(trainer: AbstractTrainer, event: str, listener: Listener) -> Listener:
    """`listener`, which reads shards, also while small models are whole."""
    if event not in _IN_STEPS:
        return listener

    def after_writing_back(*args: Any) -> None:
        trainer._parallel.write_back()
        listener(*args)

    return after_writing_back


def _listener(trainer: AbstractTrainer, callback: Callback, event: str) -> Listener:
    method = getattr(callback, event)
    if not callback.main_process_only:
        listener = partial(method, trainer)
        with_parameters = _with_shards if callback.sees_shards else _with_whole_parameters
        return with_parameters(trainer, event, listener)

    where = f"{type(callback).__name__}.{event}, which is main_process_only"

    def on_main_process(*args: Any) -> None:
        world = trainer._world
        if world is None:  # before launch there is nobody to talk to
            method(trainer, *args)
            return
        # Not a context manager: this runs each step for a progress bar, and one costs more than the bar.
        before, world.forbidden = world.forbidden, where
        try:
            method(trainer, *args)
        finally:
            world.forbidden = before

    return on_main_process


def event_table(trainer: AbstractTrainer, *, is_main: bool) -> Mapping[str, tuple[Listener, ...]]:
    """For each event the methods to call on this rank: the trainer's own, callbacks by order, the run's record."""
    table: dict[str, tuple[Listener, ...]] = {}
    for event in EVENTS:
        listeners: list[Listener] = [
            _with_whole_parameters(trainer, event, bound(trainer, event, part)) for part in heard(type(trainer), event)
        ]
        listeners += [
            _listener(trainer, callback, event)
            for callback in listening_callbacks(trainer, event)
            if is_main or not callback.main_process_only
        ]
        table[event] = (*listeners, *trainer._recorder.listeners(event, is_main=is_main))
    return table


def describe_events(trainer: AbstractTrainer) -> str:
    """The events somebody listens to as a Markdown table: who, in which order, on which ranks."""
    rows = ["| Event | Listener | Order | Ranks |", "| --- | --- | --- | --- |"]
    for event in EVENTS:
        name = event
        for part in heard(type(trainer), event):
            rows.append(f"| {name} | {part.__name__} | first | all |")
            name = ""
        for callback in listening_callbacks(trainer, event):
            ranks = "0" if callback.main_process_only else "all"
            rows.append(f"| {name} | {type(callback).__name__} | {callback.order} | {ranks} |")
            name = ""
    if len(rows) == 2:
        rows.append("| (no event has a listener) | | | |")
    return "\n".join(rows)
