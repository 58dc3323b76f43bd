"""TensorParallelMixin: several ranks share the work of each layer, and see the same data.

`device_parameters.tensor_parallel` switches it. Which layer is split how belongs to the model: override
`apply_tensor_parallel` with a plan per module, in PyTorch's own words (`parallelize_module`, `ColwiseParallel`, ...).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dream_trainer.config.parameters import parameters
from dream_trainer.trainer.abstract import AbstractTrainer


@parameters
class TensorParallelParameters:
    """What a plan may ask for beside splitting layers; `apply_tensor_parallel` reads it."""

    sequence_parallel: bool = True
    """Whether the plan shall split norms and residuals along the sequence, whose length `tensor_parallel` must then
    divide (Korthikanti et al., 2022, arXiv:2205.05198)."""
    loss_parallel: bool = False
    """Whether logits stay split over the vocabulary: `training_step` and `validation_step` then run inside PyTorch's
    `loss_parallel`, where `cross_entropy` takes them as they are."""


@dataclass(kw_only=True)
class TensorParallelConfigMixin:
    """Config of TensorParallelMixin."""

    tensor_parallel_parameters: TensorParallelParameters = field(default_factory=TensorParallelParameters)
    """What the plan may ask for."""


class TensorParallelMixin(AbstractTrainer):
    """Tensor-parallel training. Override `apply_tensor_parallel(mesh)`.

    Parameters that were tied or frozen before the plan are so after it. Whatever the plan leaves out stays whole on
    each rank.

    Example:
        ```python
        def apply_tensor_parallel(self, mesh):
            for block in self.model.layers:
                parallelize_module(block, mesh, {
                    "feed_forward.up": ColwiseParallel(), "feed_forward.down": RowwiseParallel(),
                })
        ```
    """

    _config_class: ClassVar[type] = TensorParallelConfigMixin

    config: Any

    def _wrap_step(self, step: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        step = super()._wrap_step(step)
        is_split = self.config.device_parameters.tensor_parallel > 1
        if not is_split or not self.config.tensor_parallel_parameters.loss_parallel:
            return step
        from torch.distributed.tensor.parallel import loss_parallel

        def with_split_logits(batch: Any, batch_idx: int) -> Any:
            with loss_parallel():
                return step(batch, batch_idx)

        return with_split_logits
