"""Norm layers of a model that gathers its parameters in half precision.

Batch norm's running statistics stay float32 beside parameters in half precision, which no kernel takes; nor do those of
the CPU for a layer norm whose input an fp32 buffer or table made float32, which autocast mends on other devices. Such
layers compute in float32, as autocast has norms do on GPUs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer.compat.pytorch import with_parameters
from dream_trainer.modules.class_change import Changed, change_class

_KEEP_STATISTICS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
_ONE_TYPE_ON_CPU = (nn.LayerNorm, nn.GroupNorm)


class Float32Norm(Changed):
    """Computes in float32 and returns its input's type."""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The norm's own forward on float32."""
        raised = {name: parameter.float() for name, parameter in self.named_parameters(recurse=False)}
        with with_parameters(self, raised):
            result: Tensor = super().forward(input.float(), *args, **kwargs)
        return result.to(input.dtype)


def norms_in_float32(model: nn.Module, device: torch.device) -> None:
    """Makes the norms of `model` that would fail on `device` compute in float32."""
    kinds = _KEEP_STATISTICS + (_ONE_TYPE_ON_CPU if device.type == "cpu" else ())
    for module in model.modules():
        if isinstance(module, kinds):
            change_class(module, Float32Norm)
