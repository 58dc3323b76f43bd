"""TensorParallelParameters: what a tensor-parallel plan may ask for."""

from __future__ import annotations

from dataclasses import dataclass, field

from dream_trainer.config.parameter_class import parameters


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
