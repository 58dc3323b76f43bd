"""EarlyStopping: ends a run whose validation no longer improves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from dream_trainer.callbacks.base import Callback
from dream_trainer.config.checks import check_choice, check_integer
from dream_trainer.errors import ConfigError
from dream_trainer.loggers.formatting import format_number

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer


class EarlyStopping(Callback):
    """Stops training after `patience` validations in a row without an improvement.

    An improvement is a value better than the best one by more than `min_delta`; NaN never is. All ranks see the same
    metrics and so stop at the same step. What was counted is saved: a resumed run goes on with its patience, and one
    that was stopped ends again at once, unless `patience` was raised. Sanity validations and `evaluate` do not count.

    Args:
        metric: Name of a validation metric, as it is logged.
        mode: Whether lower ("min") or higher ("max") is better.
        patience: Validations without an improvement that end the run; at least 1.
        min_delta: What a value must be better by; not negative, in the metric's unit.

    Attributes:
        best: Best value so far; None before the first.
        validations_without_improvement: Since then.

    Raises:
        ConfigError: A value cannot work; in training, if there is no validation, or `metric` is not among its metrics.
    """

    def __init__(
        self,
        metric: str = "val/loss",
        *,
        mode: Literal["min", "max"] = "min",
        patience: int = 3,
        min_delta: float = 0.0,
    ) -> None:
        check_choice("mode", mode, ("min", "max"))
        check_integer("patience", patience, minimum=1)
        if not min_delta >= 0.0:
            raise ConfigError(f"min_delta={min_delta} is not a number from zero up. Use 0.0 for any improvement.")
        self.metric = metric
        self.mode = mode
        self.patience = patience
        self.min_delta = min_delta
        self.best: float | None = None
        self.validations_without_improvement = 0

    def pre_fit(self, trainer: AbstractTrainer) -> None:
        """Stops at once where an earlier process already ran out of patience."""
        if not trainer.val_dataloaders:
            raise ConfigError(
                f"EarlyStopping({self.metric!r}) has no validation to go by. Return a validation loader from "
                "configure_dataloaders and override validation_step."
            )
        self._stop_if_due(trainer)

    def post_val_epoch(self, trainer: AbstractTrainer, metrics: dict[str, float]) -> None:
        """Counts."""
        if trainer.is_evaluating:  # on whatever data
            return
        if self.metric not in metrics:
            raise ConfigError(
                f"EarlyStopping goes by {self.metric!r}, which is not among the validation's metrics. "
                f"Use one of {sorted(metrics)}."
            )
        if trainer.is_sanity_validation:
            return
        value = metrics[self.metric]
        if self._is_improvement(value):
            self.best, self.validations_without_improvement = value, 0
            return
        self.validations_without_improvement += 1
        self._stop_if_due(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The best value and the count."""
        return {"best": self.best, "validations_without_improvement": self.validations_without_improvement}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self.best = state["best"]
        self.validations_without_improvement = state["validations_without_improvement"]

    def _is_improvement(self, value: float) -> bool:
        if math.isnan(value) or self.best is None:
            return not math.isnan(value)
        return value < self.best - self.min_delta if self.mode == "min" else value > self.best + self.min_delta

    def _stop_if_due(self, trainer: AbstractTrainer) -> None:
        if self.validations_without_improvement >= self.patience:
            best = "a number" if self.best is None else format_number(self.best)
            trainer.request_stop(
                f"{self.metric} was not better than {best} in {self.validations_without_improvement} validations"
            )
