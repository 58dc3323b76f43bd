"""The trainer's events, the table of who really listens to each, and `describe()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dream_trainer.events.collection import BaseCallback
from dream_trainer.trainer.hooks import EVENTS
from dream_trainer.trainer.runtime import Runtime
from dream_trainer.trainer.user_class import bound, heard

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
    # A listener on some rank: all ranks gather again, or none.
    if runtime.parallel.changes_in_steps and anyone_listens(runtime, event):
        runtime.parallel.forget_whole()
    for listener in runtime.events[event]:
        listener(*args)


def tell_end(runtime: Runtime, event: str, *args: Any) -> None:
    """Calls everyone who listens to the end of a validation or of an epoch; what they log is a line of its own."""
    log, state = runtime.log, runtime.state
    if log is None or not anyone_listens(runtime, event):
        notify(runtime, event, *args)
        return
    counts = not (state.is_sanity_validation or state.is_evaluating)
    if counts or runtime.progress.global_step > 0:  # before the first step, waiting values belong to that step
        log.land()
    with log.line_of_its_own(counts=counts):
        notify(runtime, event, *args)


def _with_parameters(runtime: Runtime, event: str, listener: Listener, *, sees_shards: bool = False) -> Listener:
    """`listener`, for whom small sharded models are whole, as they are in steps; or which reads shards, also there."""
    if event not in (_IN_STEPS if sees_shards else _BETWEEN_STEPS):
        return listener

    def with_shards(*args: Any) -> None:
        runtime.parallel.write_back()
        listener(*args)

    def with_whole(*args: Any) -> None:
        with runtime.parallel.whole():
            listener(*args)

    return with_shards if sees_shards else with_whole


def _listener(runtime: Runtime, callback: BaseCallback, event: str) -> Listener:
    method = getattr(callback, event)
    if not callback.main_process_only:
        return _with_parameters(runtime, event, partial(method, runtime.hooks), sees_shards=callback.sees_shards)

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
            _with_parameters(runtime, event, bound(runtime.hooks, event, part))
            for part in heard(type(runtime.hooks), event)
        ]
        listeners += [
            _listener(runtime, callback, event)
            for callback in listening_callbacks(runtime, event)
            if is_main or not callback.main_process_only
        ]
        table[event] = (*listeners, *runtime.recorder.listeners(event, is_main=is_main))
    return table


def describe(runtime: Runtime) -> str:
    """The setup order with its reasons, the listeners of each event, and the mesh."""
    cls = type(runtime.hooks).__name__
    stages = runtime.hooks._setup_stages() or [("setup", f"{cls} sets itself up")]
    lines = [f"# {cls}", "", "## Setup order", "", "| # | Stage | Why here |", "| --- | --- | --- |"]
    lines += [f"| {number} | {stage} | {reason} |" for number, (stage, reason) in enumerate(stages, start=1)]
    rows = ["| Event | Listener | Order | Ranks |", "| --- | --- | --- | --- |"]
    for event in EVENTS:
        listeners = [f"{part.__name__} | first | all" for part in heard(type(runtime.hooks), event)]
        for callback in listening_callbacks(runtime, event):
            ranks = "0" if callback.main_process_only else "all"
            listeners.append(f"{type(callback).__name__} | {callback.order} | {ranks}")
        rows += [f"| {'' if number else event} | {listener} |" for number, listener in enumerate(listeners)]
    if len(rows) == 2:
        rows.append("| (no event has a listener) | | | |")
    lines += ["", "## Events", "", *rows]
    mesh = mesh_lines(runtime)
    if mesh:
        lines += ["", "## Mesh", "", *mesh]
    return "\n".join(lines)


def mesh_lines(runtime: Runtime) -> list[str]:
    """Markdown: a row for each dimension of more than one rank, and each stage."""
    world = runtime.launched
    if world is None or world.mesh is None:
        return []
    rows = ["| Dimension | Ranks | With this rank | Links |", "| --- | --- | --- | --- |"]
    for name, size in world.mesh_shape._asdict().items():
        if size > 1:
            ranks = world.mesh[name].mesh.tolist()
            rows.append(f"| {name} | {size} | {_spelled(ranks)} | {world.links(ranks)} |")
    for axis in runtime.parallel.active_axes(runtime.config):
        if axis.is_among_data:
            n_ranks, (place, of_layers) = axis.value(runtime.config), divmod(world.rank, world.data_copies)
            ranks = [(place // n_ranks * n_ranks + other) * world.data_copies + of_layers for other in range(n_ranks)]
            rows.append(f"| {axis.dimension}, of these | {n_ranks} | {_spelled(ranks)} | {world.links(ranks)} |")
    if runtime.parallel.stages:
        rows += ["", "| Model | Stage | Stage rank | Holds |", "| --- | --- | --- | --- |"]
        for model_name, model in runtime.registry.models().items():
            if model not in runtime.parallel.stages:
                rows.append(f"| {model_name} | - | each | all |")
                continue
            stages = runtime.parallel.stages[model]
            for number, (names, rank) in enumerate(zip(stages.names, stages.ranks, strict=True)):
                held = ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:3])}, ... {', '.join(names[-2:])}"
                rows.append(f"| {model_name} | {number} | {rank} | {held} |")
    return [f"This is rank {world.rank} of {world.world_size}.", "", *rows]


def _spelled(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f", ... {ranks[-1]}" if len(ranks) > 8 else "")
