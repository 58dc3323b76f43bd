"""Balance of mixtures of experts: after each window of training, tokens per expert over all ranks move the biases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer.parallel.mixture_of_experts import MoE

if TYPE_CHECKING:
    from dream_trainer.distributed.world import World


class ExpertBalance:
    def __init__(
        self, models: Mapping[str, nn.Module], world: World, log: Callable[[dict[str, Tensor]], None] | None
    ) -> None:
        named = {part: path for name, model in models.items() for path, part in model.named_modules(prefix=name)}
        self._layers = {path: part for part, path in named.items() if isinstance(part, MoE)}
        self._sizes = [layer.n_experts for layer in self._layers.values()]
        self._world, self._log = world, log
        own = list(self._layers)
        self._logged = own
        if log is not None and world.stages > 1:
            self._logged = list(dict.fromkeys(path for of_rank in world.all_gather_object(own) for path in of_rank))

    def __bool__(self) -> bool:
        return bool(self._layers or self._logged)

    @torch.no_grad()
    def update(self) -> None:
        """Moves the biases by what the window's forwards counted, and logs how even the loads were; a collective."""
        evenness: dict[str, Tensor] = {}
        if self._layers:
            loads = torch.cat([layer.loads for layer in self._layers.values()])
            if self._world.averaging_group() is not None:
                import torch.distributed as dist

                dist.all_reduce(loads, group=self._world.averaging_group())
            for (path, layer), of_layer in zip(self._layers.items(), loads.split(self._sizes), strict=True):
                layer.balance(of_layer)
                if self._log is not None:
                    evenness[path] = _evenness(of_layer)
        if self._log is not None:
            for path, (largest, smallest) in zip(self._logged, self._of_all_stages(evenness), strict=True):
                self._log({f"experts/{path}/max_load": largest, f"experts/{path}/min_load": smallest})

    def _of_all_stages(self, evenness: dict[str, Tensor]) -> list[Tensor]:
        """That of each layer that is logged; a collective where stages of a pipeline have some each, or the same."""
        stages = self._world.pipeline_group()
        if stages is None:
            return [evenness[path] for path in self._logged]
        import torch.distributed as dist

        none = torch.zeros(2, device=self._world.device)
        of_all = torch.stack([evenness.get(path, none) for path in self._logged])
        dist.all_reduce(of_all, dist.ReduceOp.MAX, group=stages)  # all have those of models that are whole
        return list(of_all)


def _evenness(loads: Tensor) -> Tensor:
    """The largest and the smallest load over the mean, 1 where all are equal; 0 where no token came."""
    mean = loads.sum().clamp(min=1) / loads.numel()
    return torch.stack((loads.amax(), loads.amin())) / mean
