"""EarlyStopping: ends a run whose validation no longer improves."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Annotated, Any, Literal

from dream_trainer.best_value import is_better, mode_of, refuse_missing
from dream_trainer.checks import check_between, check_name, refuse
from dream_trainer.config.checkpoint_parameters import CheckpointConfigMixin, CheckpointParameters
from dream_trainer.config.parameter_class import PositiveInt, check_fields
from dream_trainer.events.callback import Callback
from dream_trainer.modules.metrics import higher_is_better
from dream_trainer.screen import format_number
from dream_trainer.trainer.abstract import AbstractTrainer


@dataclass(eq=False, repr=False)
class EarlyStopping(Callback):
    """Stops training after `patience` validations in a row without an improvement.

    An improvement is a value better than the best one by more than `min_delta`; NaN never is. All ranks see the same
    metrics, so they stop at the same step. Counts are saved: a resumed run keeps its patience, and a stopped run ends
    again at once, unless you raised `patience`. A run that begins from another one's checkpoint has
    full patience. Sanity validations and `evaluate` do not count.

    Args:
        metric: Name of a validation metric, as it is logged. None for `best_metric` of the config's
            checkpoint_parameters, or "val/loss" without it.
        mode: Whether lower ("min") or higher ("max") is better. None takes `best_mode` if the metric is `best_metric`.
            Otherwise it follows the metric's torchmetrics object, or its name, such as "val/loss" or "val/accuracy".
        patience: Validations without an improvement that end the run; at least 1.
        min_delta: Smallest improvement that counts; not negative, in the metric's unit.

    Attributes:
        best: Best value so far; None before the first.
        validations_without_improvement: Since then.

    Raises:
        ConfigError: A value is invalid; before training, if there is no validation, or nothing says which values of
            `metric` are better; in training, if `metric` is not among the validation's.
    """

    metric: Annotated[str, partial(check_name, example="val/loss")] | None = None
    _: KW_ONLY
    mode: Literal["min", "max"] | None = None
    patience: PositiveInt = 3
    min_delta: Annotated[float, partial(check_between, low=0.0)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, EarlyStopping)
        self.best: float | None = None
        self.validations_without_improvement = 0

    def post_setup(self, trainer: AbstractTrainer) -> None:
        config = trainer.config
        kept = config.checkpoint_parameters if isinstance(config, CheckpointConfigMixin) else CheckpointParameters()
        self._known_metric = self.metric or kept.best_metric or "val/loss"
        of_checkpoints = kept.best_mode if self._known_metric == kept.best_metric else None
        self._known_mode: Literal["min", "max"] | None = self.mode or of_checkpoints
        self.best, self.validations_without_improvement = None, 0

    def pre_fit(self, trainer: AbstractTrainer) -> None:
        limits = trainer.config.training_parameters
        intervals = (limits.epochs_between_validations, limits.val_every_n_steps, limits.val_every_minutes)
        is_due = limits.val_steps_per_epoch != 0 and any(intervals)
        refuse(
            not trainer.val_dataloaders or not (is_due or limits.fast_dev_run),
            f"EarlyStopping({self._known_metric!r}) gets no validation. Return a loader for it from "
            "configure_dataloaders, and set val_every_n_epochs, val_every_n_steps or val_every_minutes, and "
            "val_steps_per_epoch=None.",
        )
        higher = higher_is_better(trainer.named_metrics(), self._known_metric)
        self._known_mode = mode_of(
            self._known_metric, self._known_mode, higher, named_by="EarlyStopping's metric", set_by="mode"
        )
        self._stop_if_due(trainer)

    def post_val_epoch(self, trainer: AbstractTrainer, metrics: dict[str, float]) -> None:
        if trainer.is_evaluating:  # on whatever data
            return
        refuse_missing(self._known_metric, metrics, named_by="EarlyStopping's metric")
        if trainer.is_sanity_validation:
            return
        value, mode = metrics[self._known_metric], self._known_mode or "min"  # known since pre_fit
        beaten = None if self.best is None else self.best + (-self.min_delta if mode == "min" else self.min_delta)
        if is_better(value, beaten, mode):
            self.best, self.validations_without_improvement = value, 0
            return
        self.validations_without_improvement += 1
        self._stop_if_due(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "validations_without_improvement": self.validations_without_improvement}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]
        self.validations_without_improvement = state["validations_without_improvement"]

    def begin_branch(self, *, new_counters: bool, new_data: bool) -> None:
        """Resets the patience, which was the other run's, and also the best value if counters restart."""
        self.validations_without_improvement = 0
        if new_counters:
            self.best = None

    def _stop_if_due(self, trainer: AbstractTrainer) -> None:
        count = self.validations_without_improvement
        if count >= self.patience:
            if self.best is None:
                trainer.request_stop(f"{self._known_metric} was NaN in each of {count} validations")
            else:
                best = format_number(self.best)
                trainer.request_stop(f"{self._known_metric} was not better than {best} in {count} validations")
