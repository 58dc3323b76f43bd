"""Precision of forward and backward, on a plain model and on a sharded one. bf16 and fp16 are mixed: parameters, their
sums and the optimizer stay float32, and steps run under `torch.autocast`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer.compat.pytorch import NormWithStatistics, tf32_products, with_parameters
from dream_trainer.modules.class_change import Changed, change_class

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from dream_trainer.config.device_parameters import DeviceParameters

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def half_dtype(parameters: DeviceParameters) -> torch.dtype | None:
    """The half-precision type that steps compute in; None if they compute in the parameters' own."""
    return _DTYPES[parameters.precision] if parameters.precision in ("bf16", "fp16") else None


def autocast(parameters: DeviceParameters, device: torch.device) -> AbstractContextManager[Any]:
    """The context of a step. Autocast's own cache is off: it is stale once an optimizer has stepped."""
    dtype = half_dtype(parameters)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype, cache_enabled=False)


def without_autocast(parameters: DeviceParameters, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Makes the context of what a step calls besides forwards, which cannot be entered inside itself."""
    return nullcontext if half_dtype(parameters) is None else partial(torch.autocast, device.type, enabled=False)


def reduce_dtype(parameters: DeviceParameters) -> torch.dtype | None:
    """The type that gradients cross the data-parallel ranks in, if one is asked for."""
    return None if parameters.reduce_dtype is None else _DTYPES[parameters.reduce_dtype]


def sharding_policy(parameters: DeviceParameters) -> MixedPrecisionPolicy | None:
    """How `fully_shard` casts parameters, inputs and gradients of blocks; None: not at all."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtype, reduce = half_dtype(parameters), reduce_dtype(parameters)
    if dtype is None and reduce is None:
        return None
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if reduce is None else reduce)


@contextmanager
def float32_products(
    parameters: DeviceParameters, device: torch.device, warn_once: Callable[[str, str], None]
) -> Iterator[None]:
    """Inside, float32 matrix products and convolutions may use TF32 if `precision` allows it; restored afterwards."""
    is_asked_for = parameters.precision == "tf32"
    if is_asked_for and device.type != "cuda":
        warn_once("tf32", f'precision="tf32" is for CUDA devices; this {device.type} computes in float32.')
    with tf32_products() if is_asked_for and device.type == "cuda" else nullcontext():
        yield


# -- Norm layers of a model that gathers its parameters in half precision.
#
# Batch norm's running statistics stay float32 while parameters are in half precision, and no kernel takes both. The
# CPU's layer norm has the same problem if an fp32 buffer or table made its input float32; autocast fixes that on other
# devices. Such layers compute in float32, as norms do under autocast on GPUs.


class Float32Norm(Changed):
    """Computes in float32 and returns its input's type."""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raised = {name: parameter.float() for name, parameter in self.named_parameters(recurse=False)}
        with with_parameters(self, raised):
            result: Tensor = super().forward(input.float(), *args, **kwargs)
        return result.to(input.dtype)


def norms_in_float32(model: nn.Module, device: torch.device) -> None:
    """Makes the norms of `model` that would fail on `device` compute in float32."""
    kinds = (NormWithStatistics, nn.LayerNorm, nn.GroupNorm) if device.type == "cpu" else NormWithStatistics
    for module in model.modules():
        if isinstance(module, kinds):
            change_class(module, Float32Norm)


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Inside, torch uses deterministic algorithms, or raises if an operation has none."""
    if not enabled:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    # cuBLAS is deterministic only with a fixed workspace, and reads this when its handle is made.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace or ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            del os.environ["CUBLAS_WORKSPACE_CONFIG"]
