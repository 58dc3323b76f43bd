"""What a trainer's models are on several ranks: which gradients cross ranks, when, and what forwards count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch.nn as nn

from dream_trainer.compat.local_gradients import LocalGradients
from dream_trainer.modules.norm_statistics import average_statistics, norms_with_statistics
from dream_trainer.modules.sharding import fsdp_modules

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from dream_trainer.distributed.world import World
    from dream_trainer.modules.expert_balance import ExpertBalance


class ParallelModels:
    """The sharded and replicated parts of the models. Until `watch`, and in one process, there are none.

    Attributes:
        gradients: What this rank's backwards gave to them.
        experts: The mixtures of experts whose loads are balanced; None without.
    """

    def __init__(self) -> None:
        self.gradients = LocalGradients()
        self.experts: ExpertBalance | None = None
        self._policy = ""
        self._wrapped: list[FSDPModule] = []
        self._shared: list[FSDPModule] = []  # those of which each rank keeps a share
        self._norms: list[nn.Module] = []  # whose running statistics differ between ranks
        self._world: World | None = None

    def watch(self, models: Iterable[nn.Module], world: World, sync_policy: str) -> None:
        """From now on knows of the gradients of `models`, some of them wrapped by `fully_shard`.

        Args:
            models: The models, real.
            world: The ranks.
            sync_policy: When gradients of sharded models cross ranks: `TrainingParameters.sync_policy`.
        """
        from dream_trainer.compat.fully_shard import is_shared, watch_gradients

        self._world, self._policy = world, sync_policy
        models = list(models)
        self._wrapped = [module for model in models for module in fsdp_modules(model)]
        for module in self._wrapped:
            watch_gradients(module, self.gradients)
        self._shared = [module for module in self._wrapped if is_shared(module)]
        self._norms = norms_with_statistics(models) if world.averaging_group() is not None else []

    @property
    def forward_communicates(self) -> bool:
        """Whether a forward runs collectives, so that all ranks must run as many."""
        is_sharded = self._world is not None and self._world.parameter_shape.dp_shard > 1
        return is_sharded or self.gradients.shares_experts

    def sync_gradients(self, enabled: bool) -> None:
        """Whether the next backward reduces gradients over the data-parallel ranks."""
        for module in self._shared:
            if self._policy == "no_sync":
                module.set_requires_gradient_sync(enabled, recurse=False)
            elif self._policy == "defer_all_reduce":
                module.set_requires_all_reduce(enabled, recurse=False)

    def average_statistics(self) -> None:
        """Makes what forwards counted equal on all ranks of a step, after a window's last micro-batch; a collective:
        running statistics, and loads of experts."""
        if self._norms and self._world is not None:
            average_statistics(self._norms, self._world.averaging_group())
        if self.experts is not None:
            self.experts.update()

    def reduce_what_waits(self, parameters: Sequence[nn.Parameter]) -> None:
        """Reduces gradients of `parameters` that no backward of the window has reduced; a collective."""
        from dream_trainer.compat.fully_shard import reduce_what_waits

        reduce_what_waits(self._wrapped, parameters, self.gradients)

    def reshard(self) -> None:
        """Puts back to shards what a forward left gathered."""
        for module in self._wrapped:
            module.reshard()
