"""The trainer's events, and the table of who really listens to each.

An event is a method that callbacks and the classes of the user's trainer may define: each definition is heard once, so
mixins of the user's need no `super()` and no order. The table is built once, from the methods that override the
documented no-ops, so an event that nobody listens to costs the loop one empty tuple.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dream_trainer.checkpoint.model_state import model_buffers, take_shapes
from dream_trainer.checkpoint.random_state import random_state, set_random_state
from dream_trainer.events.callback import Callback
from dream_trainer.trainer.hooks import Hooks
from dream_trainer.trainer.user_class.overrides import bound, heard

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer

Listener = Callable[..., None]

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
    """For each event the methods to call on this rank: the trainer's own first, then callbacks by order and
    position, then the run's record of itself."""
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


@contextmanager
def keeping_state(trainer: AbstractTrainer) -> Iterator[None]:
    """Inside, `pre_epoch` is called; at the end what checkpoints have of the trainer, of the callbacks that listen, of
    buffers and of random generators is as before."""
    if not anyone_listens(trainer, "pre_epoch"):
        yield
        return
    device, models, callbacks = trainer.world.device, trainer.named_models(), listening_callbacks(trainer, "pre_epoch")
    shared, of_rank = copy.deepcopy(trainer.state_dict()), copy.deepcopy(trainer.rank_state_dict())
    of_callbacks = [copy.deepcopy(callback.state_dict()) for callback in callbacks]
    tensors = [{name: t.detach().clone() for name, t in one.checkpoint_tensors().items()} for one in callbacks]
    buffers = {name: buffer.detach().clone() for name, buffer in model_buffers(models).items()}
    random = random_state(device)
    yield
    set_random_state(*random, device)
    take_shapes(models, buffers, {name: value.shape for name, value in buffers.items()})
    with torch.no_grad():
        for name, buffer in model_buffers(models).items():
            if name in buffers:
                buffer.copy_(buffers[name])
        for callback, former in zip(callbacks, tensors, strict=True):
            for name, tensor in callback.checkpoint_tensors().items():
                if name in former:
                    tensor.detach().copy_(former[name])
    for callback, state in zip(callbacks, of_callbacks, strict=True):
        if state:
            callback.load_state_dict(state)
    if shared:
        trainer.load_state_dict(shared)
    if of_rank:
        trainer.load_rank_state_dict(of_rank)
