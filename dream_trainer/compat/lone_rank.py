"""PyTorch's parts for a rank without the others, whose tensors have no values. Loading them takes a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException as DynamicOutputShapeException,
    FakeTensor as FakeTensor,
    FakeTensorMode as FakeTensorMode,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
    is_traceable_wrapper_subclass_type as is_traceable_wrapper_subclass_type,
)


def make_group_alone(rank: int, world_size: int) -> None:
    """Makes the default group of a rank whose collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


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
def without_propagation(paused: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
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
