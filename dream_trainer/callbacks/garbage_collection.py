"""GarbageCollection: Python's collector on a schedule, so that ranks do not wait for one another's pauses."""

from __future__ import annotations

import gc
from dataclasses import dataclass

from dream_trainer.config.parameter_class import PositiveInt, check_fields
from dream_trainer.events.callback import Callback
from dream_trainer.trainer.abstract import AbstractTrainer


@dataclass(eq=False, repr=False)
class GarbageCollection(Callback):
    """Turns automatic garbage collection off while training and collects at chosen steps, the same on all ranks.

    Python collects when a process has made enough objects, so each rank pauses at a different step, and all the others
    wait for it. On a schedule they pause together. Objects that exist when training starts, or that survive the first
    collection (modules imported in the first steps, caches), are left out from then on (`gc.freeze`), so a collection
    only checks objects made in training. When training ends, in any way, the collector's settings are restored.

    Args:
        every_n_steps: Optimizer steps between collections of the two young generations, which are quick; the first
            one of each `fit` is of everything.
        full_every_n_steps: Optimizer steps between collections of everything: only these free cycles that have lived
            long.

    Raises:
        ConfigError: A number of steps is not positive.
    """

    every_n_steps: PositiveInt = 50
    full_every_n_steps: PositiveInt = 1000

    def __post_init__(self) -> None:
        check_fields(self, GarbageCollection)
        self._turned_off = self._has_frozen = False

    def pre_fit(self, trainer: AbstractTrainer) -> None:
        gc.collect()
        self._turned_off |= gc.isenabled()
        self._has_frozen |= gc.get_freeze_count() == 0
        gc.disable()
        gc.freeze()
        self._is_first = True

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        step = trainer.global_step
        if step % self.full_every_n_steps == 0:
            gc.collect()
        elif step % self.every_n_steps == 0 and self._is_first:
            gc.collect()
            gc.freeze()
            self._is_first = False
        elif step % self.every_n_steps == 0:
            gc.collect(1)

    def post_fit(self, trainer: AbstractTrainer) -> None:
        self._restore()

    def on_exception(self, trainer: AbstractTrainer, exc: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._has_frozen:
            gc.unfreeze()
        if self._turned_off:
            gc.enable()
        self._turned_off = self._has_frozen = False
