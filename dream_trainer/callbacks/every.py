"""Every: runs any callable every n steps, samples, tokens, epochs, validations or seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from dream_trainer.checks import check_integer, check_positive, refuse
from dream_trainer.config.parameter_class import check_fields
from dream_trainer.events.callback import TimedCallback
from dream_trainer.trainer.abstract import AbstractTrainer

Unit = Literal["steps", "samples", "tokens", "epochs", "validations", "seconds"]


@dataclass(eq=False, repr=False)
class Every(TimedCallback):
    """Calls `function(trainer)` every `n` of a unit, on all ranks at the same place of the run.

    | unit | counts | checked |
    | --- | --- | --- |
    | `"steps"` | optimizer steps (`global_step`) | after each accumulation window |
    | `"samples"` | `samples_seen` | after each accumulation window |
    | `"tokens"` | `tokens_seen` | after each accumulation window |
    | `"seconds"` | rank 0's clock, since training started or the last call | after each accumulation window |
    | `"epochs"` | epochs completed | after each epoch |
    | `"validations"` | validations in training; sanity validations and `evaluate` are none | after each validation |

    A window that completes several multiples of `n` calls it once. Counts continue after a resume; seconds start again.

    Args:
        n: Number of units; for seconds any positive number.
        unit: The unit.
        function: Called with the trainer, outside accumulation windows, so that it may save, evaluate or
            communicate.
        main_process_only: Whether to call it only on rank 0; it must then not communicate.
        clock: Seconds from any origin; tests pass their own.

    Example:
        ```python
        Every(500, "steps", lambda trainer: print(trainer.sample_text()))
        ```
    """

    n: float
    unit: Unit
    function: Callable[[Any], object]
    _: KW_ONLY
    main_process_only: bool = False  # type: ignore[misc]  # here each instance has its own
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        check_fields(self, Every)
        if self.unit == "seconds":
            check_positive("n", self.n)
        else:
            check_integer("n", self.n, minimum=1)
        is_callable = callable(self.function)
        refuse(not is_callable, f"function={self.function!r} cannot be called. Pass a function of the trainer.")
        self._last_call = 0.0
        self._forget()

    def _forget(self) -> None:
        self._seen: int | None = None
        self._validations = 0

    def is_due_by_the_clock(self) -> bool:
        return self.unit == "seconds" and self.clock() - self._last_call >= self.n

    def post_setup(self, trainer: AbstractTrainer) -> None:
        self._forget()

    def pre_fit(self, trainer: AbstractTrainer) -> None:
        self._last_call = self.clock()
        if self._seen is None:
            self._seen = self._count(trainer)

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        if self.unit not in ("epochs", "validations"):
            self._look(trainer)

    def post_val_epoch(self, trainer: AbstractTrainer, metrics: dict[str, float]) -> None:
        if self.unit == "validations" and not (trainer.is_evaluating or trainer.is_sanity_validation):
            self._validations += 1
            self._look(trainer)

    def post_epoch(self, trainer: AbstractTrainer) -> None:
        if self.unit == "epochs":
            self._look(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen, "validations": self._validations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen, self._validations = state["seen"], state["validations"]

    def begin_branch(self, *, new_counters: bool, new_data: bool) -> None:
        if new_counters:
            self._forget()

    def _look(self, trainer: AbstractTrainer) -> None:
        before, self._seen = self._seen or 0, self._count(trainer)
        is_due = self.is_due(trainer) if self.unit == "seconds" else self._seen // self.n > before // self.n
        if is_due:
            self._last_call = self.clock()
            self.function(trainer)

    def _count(self, trainer: AbstractTrainer) -> int:
        counts = {
            "steps": trainer.global_step,
            "samples": trainer.samples_seen,
            "tokens": trainer.tokens_seen,
            "epochs": trainer.current_epoch,
        }
        return counts.get(self.unit, self._validations)
