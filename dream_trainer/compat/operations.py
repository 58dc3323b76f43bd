"""PyTorch's named operations and its activation checkpointing: operations whose results are kept, the operation of a
call, a count of those that wait for the device, and the checkpoint around a call."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _checkpoint_hook, _StopRecomputationError

StopRecomputation = _StopRecomputationError
"""Ends the second run of a checkpointed forward when all that its backward needs is there."""

EXPENSIVE_OPERATIONS = (  # matrix products, convolutions, attention and collectives, kept by "selective"
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten.baddbmm.default",
    "aten.convolution.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "_c10d_functional.all_gather_into_tensor.default",
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_reduce.default",
)


def operation(name: str) -> OpOverload | None:
    """The operation of a name such as `"aten.mm.default"`; None for one of our defaults that this PyTorch lacks."""
    try:
        namespace, packet, overload = name.split(".")
        operation_of_name: OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        return operation_of_name
    except (ValueError, AttributeError, RuntimeError):
        if name in EXPENSIVE_OPERATIONS:
            return None
        raise ValueError(
            f'PyTorch has no operation {name!r}. Names look like "aten.mm.default": namespace, operation, overload.'
        ) from None


def name_of_operation(function: Any) -> tuple[str, str] | None:
    """Namespace and name of an operation of `torch.ops`, whichever overload; None of any other function."""
    if not isinstance(function, (OpOverload, OpOverloadPacket)):
        return None
    namespace, name, *_ = str(function).split(".")
    return namespace, name


def checkpoint_around() -> object:
    """The innermost `torch.utils.checkpoint` whose first run this is, as the function that packs what is saved there;
    None of a reentrant one, which saves nothing then."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore
    if hooks is None or not isinstance(hooks[0], FunctionType):
        return None
    return hooks[0] if hooks[0].__code__ in _checkpoint_hook.__init__.__code__.co_consts else None


def is_inside_function() -> bool:
    """Whether the forward of a `torch.autograd.Function` runs, as a reentrant checkpoint is one."""
    return not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()


class ValueReads(TorchDispatchMode):
    """Inside, counts how often the value of a tensor is read on the host, as `item()` does: it waits for the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
