"""ModelAverage: the average of one model's weights, moved in place, shard by shard, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer.checkpoint.model_state import parameter_fqns
from dream_trainer.checkpoint.snapshot_writer import HostCopies
from dream_trainer.compat.pytorch import foreach_copy_, foreach_lerp_, local_tensor, local_tensors, with_local

# by how much an average moves towards the weights, after so many moves: a number, or a 0-dim tensor for one
Share = Callable[[Any], Any]


class ModelAverage:
    """The averages of one model, under the same names and layouts, and what happened to them."""

    def __init__(self, parameters: Mapping[str, Tensor], averages: Mapping[str, Tensor] | None = None) -> None:
        self._parameters = parameters
        if averages is None:
            averages = {name: torch.empty_like(p.detach(), dtype=wide(p.dtype)) for name, p in parameters.items()}
        self.averages = dict(averages)
        self.has_stepped = False
        self._updates = 0
        # Where only the device knows whether a step was left out: the flag of the step, and how many there were.
        self._skipped: Tensor | None = None
        self._n_skipped: Tensor | None = None

    @property
    def has_moved(self) -> bool:
        """Whether there was an update, or would have been had the device not left it out."""
        return self._updates > 0

    def count(self) -> int:
        """Updates so far. Waits for the device if it may have left some out."""
        return self._updates - (0 if self._n_skipped is None else int(self._n_skipped))

    def will_move(self) -> bool:
        """Whether the model has changed since the averages last moved. Waits for the device if only it knows."""
        return self.has_stepped and (self._skipped is None or not bool(self._skipped))

    @torch.no_grad()
    def start(self) -> None:
        self.resume(updates=0)
        self.copy()

    @torch.no_grad()
    def copy(self) -> None:
        foreach_copy_(self.locals(), self._weights())

    def resume(self, updates: int, *, has_stepped: bool = False) -> None:
        self._updates, self._n_skipped = updates, None
        self.has_stepped, self._skipped = has_stepped, None

    def note_step(self, skipped: Tensor | None) -> None:
        """The model has stepped, unless `skipped` is nonzero; it counts if any step since the last update was taken."""
        if not self.has_stepped:
            self.has_stepped = True
            self._skipped = None if skipped is None else skipped.clone()
        elif self._skipped is not None:
            self._skipped = None if skipped is None else self._skipped * skipped

    @torch.no_grad()
    def update(self, share: Share) -> None:
        """Moves the averages towards the weights, if the model has changed, by `share` of the updates so far."""
        self.has_stepped = False
        if self._skipped is None and self._n_skipped is None:
            amount = share(self._updates)
        else:
            amount = self._share_on_device(share)
        self._updates += 1
        self._move(amount)

    def settle(self) -> None:
        """Brings the averages to where the last update left them, if that is still under way."""

    def _move(self, amount: float | Tensor) -> None:
        move_towards(self.locals(), self._weights(), amount)

    def _share_on_device(self, share: Share) -> Tensor:
        """What `update` moves by, or 0 if the device left the step out; never read on the host."""
        device = self._weights()[0].device
        dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        if self._n_skipped is None:
            self._n_skipped = torch.zeros((), dtype=dtype, device=device)
        amount: Tensor = torch.zeros_like(self._n_skipped) + share(self._updates - self._n_skipped)
        if self._skipped is None:
            return amount
        was_skipped = (self._skipped != 0).to(dtype)
        self._n_skipped += was_skipped
        return amount * (1.0 - was_skipped)

    def clone_weights(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self._weights()]

    @torch.no_grad()
    def set_weights(self, values: list[Tensor]) -> None:
        foreach_copy_(self._weights(), values)

    def locals(self) -> list[Tensor]:
        return local_tensors(list(self.averages.values()))

    def _weights(self) -> list[Tensor]:
        # Asked for each time: FSDP2 may give a parameter another local tensor at the first forward.
        return local_tensors(list(self._parameters.values()))


def trained_parameters(name: str, model: nn.Module) -> dict[str, Tensor]:
    """The floating-point parameters of a model that require gradients, by name; of tied ones the first."""
    return {
        fqn.removeprefix(f"{name}."): parameter
        for parameter, fqn in parameter_fqns({name: model}).items()
        if parameter.requires_grad and parameter.is_floating_point()
    }


def move_towards(averages: list[Tensor], weights: list[Tensor], share: float | Tensor) -> None:
    """`average += share * (weight - average)`, in place."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for average, weight in zip(averages, weights, strict=True):
        if average.dtype == weight.dtype:
            same_averages, same_weights = by_dtype.setdefault(average.dtype, ([], []))
            same_averages.append(average)
            same_weights.append(weight)
        else:  # one at a time, so that only one is ever held in both widths
            average.lerp_(weight.to(average.dtype), share.to(average.dtype) if isinstance(share, Tensor) else share)
    for dtype, (same_averages, same_weights) in by_dtype.items():
        if isinstance(share, Tensor):
            foreach_lerp_(same_averages, same_weights, [share.to(dtype)] * len(same_averages))
        else:
            foreach_lerp_(same_averages, same_weights, share)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that weights of this type are averaged in."""
    return torch.float32 if dtype.itemsize < 4 else dtype


_AMOUNT = "amount"  # beside the weights, whose names begin with "weight "


class HostAverage(ModelAverage):
    """The averages of one model's shards on the CPU; the copy of an update is applied when the next one comes."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        on_host = {}
        for name, parameter in parameters.items():
            local = local_tensor(parameter.detach())
            empty = torch.empty(local.shape, dtype=wide(local.dtype), device="cpu")
            on_host[name] = with_local(parameter.detach(), empty)
        super().__init__(parameters, on_host)
        self._copies: HostCopies | None = None
        self._copied: dict[str, Tensor] = {}
        self._amount: float | Tensor = 0.0

    def resume(self, updates: int, *, has_stepped: bool = False) -> None:
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
