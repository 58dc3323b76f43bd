"""ExpertParallelMixin: ranks share the experts of each mixture, and send tokens to the ranks that have theirs."""

from __future__ import annotations

from typing import ClassVar

from torch.distributed.device_mesh import DeviceMesh

from dream_trainer.parallel.axis import EXPERT, Parallelism
from dream_trainer.parallel.mixture_of_experts import MoE, split_experts
from dream_trainer.trainer.abstract import AbstractTrainer


class ExpertParallelMixin(AbstractTrainer):
    """Expert-parallel training of every `dream_trainer.modules.MoE`, without code of yours. Override
    `apply_expert_parallel(mesh)` for other MoE layers.
    """

    _parallelism: ClassVar[Parallelism | None] = EXPERT

    def apply_expert_parallel(self, mesh: DeviceMesh) -> None:
        """Splits the experts of every `MoE` of the models over `mesh` (one dimension, ep)."""
        for model in self.named_models().values():
            for part in model.modules():
                if isinstance(part, MoE):
                    split_experts(part.experts, mesh)
