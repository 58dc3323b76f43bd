"""Precision: what forward and backward compute in, on a plain model and on a sharded one.

bf16 and fp16 are mixed: parameters, their sums and the optimizer stay float32. Steps run under `torch.autocast`, so
all methods of a model compute the same way, not only `forward`; sharded models besides gather their parameters in half
precision (`MixedPrecisionPolicy`). fp16 has a range of its own, for which trainer/step/loss_scale.py cares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer.compat.pytorch import tf32_products, with_parameters
from dream_trainer.modules.class_change import Changed, change_class

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from dream_trainer.config.device_parameters import DeviceParameters

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def half_dtype(parameters: DeviceParameters) -> torch.dtype | None:
    """The half-precision type that steps compute in; None if they compute in the parameters' own."""
    return _DTYPES[parameters.precision] if parameters.precision in ("bf16", "fp16") else None


def autocast(parameters: DeviceParameters, device: torch.device) -> AbstractContextManager[Any]:
    """The context of a step: `torch.autocast` to the configured type, or nothing.

    Without autocast's cache of cast parameters, which is stale once an optimizer has stepped
    (docs/measurements.md#autocasts-cache).
    """
    dtype = half_dtype(parameters)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype, cache_enabled=False)


def without_autocast(parameters: DeviceParameters, device: torch.device) -> AbstractContextManager[Any] | None:
    """For what is called within a step and is not forward: a backward computes in its forward's types, an optimizer in
    the parameters'. None if steps are not under autocast."""
    return None if half_dtype(parameters) is None else torch.autocast(device.type, enabled=False)


def under_autocast(
    step: Callable[[Any, int], Any], parameters: DeviceParameters, device: torch.device
) -> Callable[[Any, int], Any]:
    """`step`, computing in the configured type; `step` itself if that is the parameters' own."""
    if half_dtype(parameters) is None:
        return step
    context = autocast(parameters, device)

    def inside(batch: Any, batch_idx: int) -> Any:
        with context:
            return step(batch, batch_idx)

    return inside


def reduce_dtype(parameters: DeviceParameters) -> torch.dtype | None:
    """The type that gradients cross the data-parallel ranks in, if one is asked for."""
    return None if parameters.reduce_dtype is None else _DTYPES[parameters.reduce_dtype]


def sharding_policy(parameters: DeviceParameters) -> MixedPrecisionPolicy | None:
    """How `fully_shard` casts parameters, inputs and gradients of blocks; None: not at all.

    The root's outputs are float32 besides (`dream_trainer.modules.sharding.shard_by_blocks`).
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtype, reduce = half_dtype(parameters), reduce_dtype(parameters)
    if dtype is None and reduce is None:
        return None
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if reduce is None else reduce)


@contextmanager
def float32_products(
    parameters: DeviceParameters, device: torch.device, warn_once: Callable[[str, str], None]
) -> Iterator[None]:
    """Inside, float32 matrix products and convolutions may use TF32, if `precision` says so; then as it was."""
    if parameters.precision != "tf32":
        yield
        return
    if device.type != "cuda":
        warn_once("tf32", f'precision="tf32" is for CUDA devices; this {device.type} computes in float32.')
        yield
        return
    with tf32_products():
        yield


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
