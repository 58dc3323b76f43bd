"""EMA: an exponential moving average of the weights (Polyak and Juditsky 1992, "Acceleration of Stochastic
Approximation by Averaging"). weight_average.py keeps, saves and uses the averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from dream_trainer.callbacks.model_average import ModelAverage, move_towards, wide
from dream_trainer.callbacks.weight_average import WeightAverage
from dream_trainer.checkpoint.staging import HostCopies
from dream_trainer.checks import check_between, check_boolean, check_choice, check_integer
from dream_trainer.compat.pytorch import local_tensor, local_tensors, with_local

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer


class EMA(WeightAverage):
    """Keeps an exponential moving average of the weights, validates with it, and saves it with the checkpoints.

    Averaged are the floating-point parameters that require gradients when setup ends. Everything else, BatchNorm's
    statistics for instance, is the model's own, also while the averages stand in. Parameters narrower than 32 bits are
    averaged in float32, where steps of `1 - decay` do not vanish.

    The average starts from the weights that training starts from. It moves at most once after an accumulation window,
    however many micro-batches, optimizers or `step` calls the window had, and only if the model has changed since it
    last moved: not after a step that was skipped. Nothing waits for the device.

    Args:
        decay: Share of the average that an update keeps; between 0 and 1.
        models: Names of the models to average; None for all that an optimizer trains.
        every_n_steps: Optimizer steps (`global_step`) between two updates. `decay` is per update.
        warm_up: Whether update n = 0, 1, ... keeps only `min(decay, (1 + n) / (10 + n))`, as TensorFlow's
            `ExponentialMovingAverage` does with `num_updates`, so that the first weights are soon forgotten.
        validate: Whether validations, `evaluate` and `predict` see the averages instead of the weights, so that
            `val/*` metrics are theirs. They need memory for the weights meanwhile.
        device: "cpu" keeps the averages in the host's memory; None beside the weights. Each update then copies the
            weights to the host, without waiting for it, and the host computes the average while the device goes on.

    Raises:
        ConfigError: A value cannot work; when setup ends, also if `models` names none that is trained, or if two
            averages would validate one model.

    Example:
        ```python
        ema = EMA(0.999)
        config = DreamTrainerConfig(..., callbacks=CallbackCollection([ema]))
        trainer.fit()
        with ema.averaged_weights():
            torch.save(trainer.model.state_dict(), "averaged.pt")
        ```
    """

    export_name: ClassVar[str] = "ema"

    def __init__(
        self,
        decay: float = 0.999,
        *,
        models: Sequence[str] | None = None,
        every_n_steps: int = 1,
        warm_up: bool = True,
        validate: bool = True,
        device: Literal["cpu"] | None = None,
    ) -> None:
        super().__init__(models, validate=validate)
        check_between("decay", decay, 0.0, 1.0, below=True)
        check_integer("every_n_steps", every_n_steps, minimum=1)
        check_boolean("warm_up", warm_up)
        if device is not None:
            check_choice("device", device, ("cpu",))
        self.decay = decay
        self.every_n_steps = every_n_steps
        self.warm_up = warm_up
        self.device = device

    def share(self, updates: Any) -> Any:
        if not self.warm_up:
            return 1.0 - self.decay
        keep = (1 + updates) / (10 + updates)
        return 1.0 - (keep.clamp(max=self.decay) if isinstance(keep, Tensor) else min(keep, self.decay))

    def _new_average(self, parameters: Mapping[str, Tensor]) -> ModelAverage:
        return HostAverage(parameters) if self.device == "cpu" else ModelAverage(parameters)

    def is_due(self, trainer: AbstractTrainer) -> bool:
        # A branch with new counters may bring steps along to its step 0 that the averages have not moved by.
        return trainer.global_step > 0 and trainer.global_step % self.every_n_steps == 0


_AMOUNT = "amount"  # beside the weights, whose names begin with "weight "


class HostAverage(ModelAverage):
    """The averages of one model's shards on the CPU; the copy of an update is applied when the next one comes."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters, {name: _on_host(p.detach()) for name, p in parameters.items()})
        self._copies: HostCopies | None = None
        self._copied: dict[str, Tensor] = {}
        self._amount: float | Tensor = 0.0

    def resume(self, updates: int, *, has_stepped: bool = False) -> None:
        """The averages have been loaded, after so many updates; what was on its way to them is dropped."""
        super().resume(updates, has_stepped=has_stepped)
        self._copied = {}

    @torch.no_grad()
    def settle(self) -> None:
        if self._copies is None or not self._copied:
            return
        self._copies.wait()
        amount = self._copied.pop(_AMOUNT, self._amount)
        weights, self._copied = local_tensors(list(self._copied.values())), {}
        move_towards(self.locals(), weights, amount)

    def _move(self, amount: float | Tensor) -> None:
        self.settle()
        if self._copies is None:
            self._copies = HostCopies(self._weights()[0].device)
        tensors = {f"weight {name}": parameter for name, parameter in self._parameters.items()}
        if isinstance(amount, Tensor):
            tensors[_AMOUNT] = amount
        self._amount = amount
        # All in order with the device's other work: the next step may change the weights right away.
        copied = self._copies.copy(tensors, at_once=tensors)
        self._copied = {name: copied[name] for name in tensors}


def _on_host(parameter: Tensor) -> Tensor:
    local = local_tensor(parameter)
    return with_local(parameter, torch.empty(local.shape, dtype=wide(local.dtype), device="cpu"))
