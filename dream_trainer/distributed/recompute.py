"""Activation checkpointing in place: a module's forward is run again in backward instead of keeping what it computed.

The module's class changes, as under `fully_shard`: names in the state dict stay, and a deep copy computes with its own
weights. Non-reentrant checkpointing as in `torch.utils.checkpoint`; the selective form keeps the outputs of the
operations that are dear to compute (Korthikanti et al., 2022, arXiv:2205.05198, at the level of operations).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

DEAR_OPERATIONS = (
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
"""Matrix products, convolutions, attention and collectives: what the selective form keeps."""

# Equal blocks share a class, so that they compile once.
_classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


class Recomputed(nn.Module):
    """Keeps the inputs of its forward, and computes the rest again in backward."""

    _contexts: ClassVar[Any] = None  # makes the pair of contexts of selective checkpointing

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, checkpointed where a backward can follow."""
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        if self._contexts is not None:
            kwargs["context_fn"] = self._contexts
        return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)


def recompute(module: nn.Module, keep: Sequence[str] = ()) -> None:
    """Makes `module` recompute its activations in backward.

    Args:
        module: Any but one whose forward has side effects, such as counting its calls.
        keep: Operations whose outputs are kept, such as `"aten.mm.default"`; none recomputes everything.

    Raises:
        ValueError: PyTorch has no operation of a given name.
    """
    if not isinstance(module, Recomputed):
        module.__class__ = _recomputed(type(module), tuple(keep))


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that `module` was written as."""
    return type(module).__bases__[1] if isinstance(module, Recomputed) else type(module)


def _recomputed(cls: type[nn.Module], keep: tuple[str, ...]) -> type[nn.Module]:
    if (cls, keep) not in _classes:
        body: dict[str, Any] = {"__module__": cls.__module__, "__doc__": cls.__doc__}
        if keep:
            operations = [found for name in keep if (found := operation(name)) is not None]
            body["_contexts"] = staticmethod(partial(create_selective_checkpoint_contexts, operations))
        _classes[cls, keep] = type(f"Recomputed{cls.__name__}", (Recomputed, cls), body)
    return _classes[cls, keep]


def operation(name: str) -> torch._ops.OpOverload | None:
    """The operation of a name such as `"aten.mm.default"`; None for one of ours that this PyTorch does not have.

    Raises:
        ValueError: There is none, and it is not among `DEAR_OPERATIONS`.
    """
    try:
        namespace, packet, overload = name.split(".")
        found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        return found
    except (ValueError, AttributeError, RuntimeError):
        if name in DEAR_OPERATIONS:
            return None
        raise ValueError(
            f'PyTorch has no operation {name!r}. Names look like "aten.mm.default": namespace, operation, overload.'
        ) from None
