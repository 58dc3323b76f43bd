"""SWA: stochastic weight averaging, the equal-weight mean of weights along the end of a run (Izmailov et al. 2018,
"Averaging Weights Leads to Wider Optima and Better Generalization", arXiv:1803.05407)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dream_trainer.callbacks.model_average import ModelAverage
from dream_trainer.callbacks.weight_average import WeightAverage
from dream_trainer.checks import check_choice, check_integer

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer


class SWA(WeightAverage):
    """Keeps the mean of the weights after `start` steps or epochs and every `every` from there on.

    Until `start` the averages are the current weights, also for validations, checkpoints and exports. What is averaged,
    and the rest, is as for `EMA`: sharded as the weights are, saved, resumed at any world size, swapped in for
    validations. A time to take weights at which the model has not changed since the last one is passed over.

    BatchNorm's statistics belong to the weights that trained: compute them again by `update_batch_norm`. The paper's
    constant or cyclic learning rate is the scheduler's business; `torch.optim.swa_utils.SWALR` is one.

    Args:
        start: Steps or epochs completed when the first weights are taken; at least 1.
        every: Steps or epochs between two; at least 1.
        unit: "epochs", or "steps" for optimizer steps (`global_step`).
        models: Names of the models to average; None for all that an optimizer trains.
        validate: Whether validations, `evaluate` and `predict` see the averages instead of the weights. They need
            memory for the weights meanwhile.

    Raises:
        ConfigError: A value cannot work; when setup ends, also if `models` names none that is trained, or if two
            averages would validate one model.

    Example:
        ```python
        swa = SWA(start=8, models=["model"])  # of 10 epochs, the mean of those after 8, 9 and 10
        trainer.fit()
        with swa.averaged_weights():
            swa.update_batch_norm(loader)
            trainer.export("averaged")
        ```
    """

    export_name: ClassVar[str] = "swa"

    def __init__(
        self,
        start: int,
        *,
        every: int = 1,
        unit: Literal["epochs", "steps"] = "epochs",
        models: Sequence[str] | None = None,
        validate: bool = True,
    ) -> None:
        super().__init__(models, validate=validate)
        check_integer("start", start, minimum=1)
        check_integer("every", every, minimum=1)
        check_choice("unit", unit, ("epochs", "steps"))
        self.start = start
        self.every = every
        self.unit = unit

    def share(self, updates: Any) -> Any:
        return 1.0 / (updates + 1)

    def is_due(self, trainer: AbstractTrainer) -> bool:
        done = trainer.global_step
        if self.unit == "epochs":
            owed = trainer.progress.owed
            if owed is None or not owed.epoch_ended:
                return False
            done = trainer.current_epoch + 1  # counted when its validation is over
        return done >= self.start and (done - self.start) % self.every == 0

    def _is_waiting(self, average: ModelAverage) -> bool:
        return not average.has_moved
