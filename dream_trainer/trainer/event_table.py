"""The trainer's events, and the table of who really listens to each.

The table is built once, from the methods that override the documented no-ops, each heard once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dream_trainer.events.collection import BaseCallback
from dream_trainer.trainer.hooks import EVENTS
from dream_trainer.trainer.runtime import Runtime
from dream_trainer.trainer.user_class.overrides import bound, heard

Listener = Callable[..., None]

# Where models are whole already; `post_optimizer_step` has shards.
_IN_STEPS = {"pre_train_batch", "post_train_batch", "post_train_step", "pre_val_batch", "post_val_batch"}
# Outside steps, and with models that are real.
_BETWEEN_STEPS = {"post_setup", "pre_fit", "pre_epoch", "pre_val_epoch", "post_val_epoch", "post_epoch", "post_fit"}


def listening_callbacks(runtime: Runtime, event: str) -> list[BaseCallback]:
    """The callbacks whose class overrides `event`, in the order they run."""
    return [callback for callback in runtime.config.callbacks.in_order() if callback._hears(event)]


def anyone_listens(runtime: Runtime, event: str) -> bool:
    """Whether `event` has a listener on any rank; the same answer on all of them."""
    return bool(heard(type(runtime.hooks), event)) or bool(listening_callbacks(runtime, event))


def notify(runtime: Runtime, event: str, *args: Any) -> None:
    """Calls everyone who listens to `event`."""
    if anyone_listens(runtime, event):  # on some rank; all ranks gather again, or none
        runtime.parallel.forget_whole()
    for listener in runtime.events[event]:
        listener(*args)


def _with_whole_parameters(runtime: Runtime, event: str, listener: Listener) -> Listener:
    """`listener`, for whom small sharded models are whole, as they are in steps."""
    if event not in _BETWEEN_STEPS:
        return listener

    def inside(*args: Any) -> None:
        with runtime.parallel.whole():
            listener(*args)

    return inside


def _with_shards(runtime: Runtime, event: str, listener: Listener) -> Listener:
    """`listener`, which reads shards, also while small models are whole."""
    if event not in _IN_STEPS:
        return listener

    def after_writing_back(*args: Any) -> None:
        runtime.parallel.write_back()
        listener(*args)

    return after_writing_back


def _listener(runtime: Runtime, callback: BaseCallback, event: str) -> Listener:
    method = getattr(callback, event)
    if not callback.main_process_only:
        listener = partial(method, runtime.hooks)
        with_parameters = _with_shards if callback.sees_shards else _with_whole_parameters
        return with_parameters(runtime, event, listener)

    where = f"{type(callback).__name__}.{event}, which is main_process_only"

    def on_main_process(*args: Any) -> None:
        world = runtime.launched
        if world is None:  # before launch there are no other ranks
            method(runtime.hooks, *args)
            return
        # Not a context manager: this runs each step for a progress bar, and one costs more than the bar.
        before, world.forbidden = world.forbidden, where
        try:
            method(runtime.hooks, *args)
        finally:
            world.forbidden = before

    return on_main_process


def event_table(runtime: Runtime, *, is_main: bool) -> Mapping[str, tuple[Listener, ...]]:
    """For each event the methods to call on this rank: the trainer's own, callbacks by order, the run's record."""
    table: dict[str, tuple[Listener, ...]] = {}
    for event in EVENTS:
        listeners: list[Listener] = [
            _with_whole_parameters(runtime, event, bound(runtime.hooks, event, part))
            for part in heard(type(runtime.hooks), event)
        ]
        listeners += [
            _listener(runtime, callback, event)
            for callback in listening_callbacks(runtime, event)
            if is_main or not callback.main_process_only
        ]
        table[event] = (*listeners, *runtime.recorder.listeners(event, is_main=is_main))
    return table


def describe_events(runtime: Runtime) -> str:
    """A Markdown table of the events with listeners: each listener, the order, and the ranks."""
    rows = ["| Event | Listener | Order | Ranks |", "| --- | --- | --- | --- |"]
    for event in EVENTS:
        name = event
        for part in heard(type(runtime.hooks), event):
            rows.append(f"| {name} | {part.__name__} | first | all |")
            name = ""
        for callback in listening_callbacks(runtime, event):
            ranks = "0" if callback.main_process_only else "all"
            rows.append(f"| {name} | {type(callback).__name__} | {callback.order} | {ranks} |")
            name = ""
    if len(rows) == 2:
        rows.append("| (no event has a listener) | | | |")
    return "\n".join(rows)
