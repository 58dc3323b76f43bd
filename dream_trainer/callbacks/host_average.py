"""HostAverage: the averages of one model in the host's memory, so that the device has room for the model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dream_trainer.callbacks.model_average import ModelAverage, move_towards, wide
from dream_trainer.checkpoint.staging import HostCopies
from dream_trainer.compat.pytorch import local_tensor, local_tensors, with_local

_AMOUNT = "amount"  # beside the weights, whose names begin with "weight "


class HostAverage(ModelAverage):
    """The averages of one model on the CPU; each rank's shards with it.

    An update copies the weights to the host in order with the device's work, and does not wait for that: the average
    moves when the next update comes, or somebody asks for it. So the host is at most one update ahead of the device.

    Args:
        parameters: By name, on any device; DTensors where they are sharded.
    """

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
        """Waits for the copies of the last update, and moves the averages."""
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
