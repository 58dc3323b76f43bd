"""The state of callbacks in a checkpoint: which one's it is, and what of it goes along into another run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from dream_trainer.config.checkpoint_parameters import BranchParameters

if TYPE_CHECKING:
    from dream_trainer.events.callback import Callback
    from dream_trainer.trainer.abstract import AbstractTrainer

logger = logging.getLogger("dream_trainer")

CALLBACK_PREFIX = "callbacks."
"""Tensors of callbacks are named `callbacks.<class>.<number within the class>.<name>`."""


def numbered(callbacks: Iterable[Callback]) -> Iterator[tuple[str, str, Callback]]:
    """Each callback with its class and the prefix of its tensors: adding or removing one shifts no other class's."""
    counts: Counter[str] = Counter()
    for callback in callbacks:
        name = type(callback).__name__
        yield name, f"{CALLBACK_PREFIX}{name}.{counts[name]}.", callback
        counts[name] += 1


def restore_callbacks(
    trainer: AbstractTrainer, saved: list[dict[str, Any]], names: Collection[str], begins: BranchParameters | None
) -> None:
    """Matches callbacks by class and by their order within it, so that adding or removing one does not shift others.

    Args:
        trainer: The trainer.
        saved: Class and state of each callback, in order.
        names: Tensors of the checkpoint.
        begins: What goes along, where a run begins from another one's checkpoint; None where it resumes its own.
    """
    left = list(saved)
    for class_name, prefix, callback in numbered(trainer.callbacks):
        match = next((entry for entry in left if entry["class"] == class_name), None)
        if match is not None:
            left.remove(match)
        lacks_tensors = any(prefix + name not in names for name in callback.checkpoint_tensors())
        if match is None or lacks_tensors:
            if (callback.state_dict() or lacks_tensors) and trainer.world.is_main:
                logger.warning("the checkpoint has no state of callback %s; it starts without any.", class_name)
            continue
        callback.load_state_dict(match["state"])
        if begins is not None:
            callback.begin_branch(new_counters=begins.counters == "new", new_data=begins.data == "new")
    lost = [entry["class"] for entry in left if entry["state"]]
    if lost and trainer.world.is_main:
        logger.warning("the checkpoint has state of callbacks that are no longer there: %s.", ", ".join(lost))
