"""PyTorch's named operations: those whose results activation checkpointing keeps, the operation of a call, and a count
of those that wait for the device. And its parts for a rank without the others, whose tensors have no values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _StopRecomputationError

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


class ValueReads(TorchDispatchMode):
    """Inside, counts how often the value of a tensor is read on the host, as `item()` does, which waits for the device.

    Attributes:
        count: How often it was.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def without_values() -> FakeTensorMode:
    """A mode whose operations give tensors without values."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def make_group_alone(rank: int, world_size: int) -> None:
    """Makes the default group of a rank whose collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def inside_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def name_of_group(args: Any) -> str | None:
    """The name of the group in a collective's arguments."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg).group_name
        if isinstance(arg, str) and arg in dist.distributed_c10d._world.pg_names.values():
            return arg
    return None


def ranks_of_group(name: str) -> list[int]:
    group = next(group for group, known in dist.distributed_c10d._world.pg_names.items() if known == name)
    return dist.get_process_group_ranks(group)


@contextmanager
def without_propagation(paused: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """DTensor finds out global shapes by operations on tensors without values, in a mode that is on if there is one:
    they are nothing that a rank holds. Inside, it does that in `paused()`."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def apart(self: ShardingPropagator, schema: Any) -> Any:
        with paused():
            return propagate(self, schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = apart  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[method-assign]
