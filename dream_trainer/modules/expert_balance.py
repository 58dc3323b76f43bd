"""Balance of mixtures of experts: after each window of training, tokens per expert over all ranks move the biases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer.modules.mixture_of_experts import MoE

if TYPE_CHECKING:
    from dream_trainer.distributed.world import World


class ExpertBalance:
    """The mixtures of a trainer's models.

    Args:
        models: By name.
        world: The ranks.
        log: Takes numbers by name; None where nothing is logged.
    """

    def __init__(
        self, models: Mapping[str, nn.Module], world: World, log: Callable[[dict[str, Tensor]], None] | None
    ) -> None:
        named = {part: path for name, model in models.items() for path, part in model.named_modules(prefix=name)}
        self._layers = {path: part for part, path in named.items() if isinstance(part, MoE)}
        self._sizes = [layer.n_experts for layer in self._layers.values()]
        self._world, self._log = world, log

    def __bool__(self) -> bool:
        return bool(self._layers)

    @torch.no_grad()
    def update(self) -> None:
        """Moves the biases by what the window's forwards counted, and logs how even the loads were; a collective."""
        loads = torch.cat([layer.loads for layer in self._layers.values()])
        if self._world.step_size > 1:
            import torch.distributed as dist

            dist.all_reduce(loads, group=self._world.averaging_group())
        for (path, layer), of_layer in zip(self._layers.items(), loads.split(self._sizes), strict=True):
            layer.balance(of_layer)
            if self._log is not None:
                self._log(_evenness(path, of_layer))


def _evenness(path: str, loads: Tensor) -> dict[str, Tensor]:
    """The largest and the smallest load over the mean, 1 where all are equal; 0 where no token came."""
    mean = loads.sum().clamp(min=1) / loads.numel()
    return {f"experts/{path}/max_load": loads.amax() / mean, f"experts/{path}/min_load": loads.amin() / mean}
