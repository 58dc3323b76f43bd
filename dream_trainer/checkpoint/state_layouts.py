"""How an optimizer's state tensors lie: what a checkpoint notes of it, and memory to load them into.

Nothing is noted of a tensor of its parameter's shape and layout, and of other plain ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dream_trainer.compat.pytorch import is_dtensor, shard_dim
from dream_trainer.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Layout = str | dict[str, int | None]
# `PLAIN`, or which dimension of the tensor each dimension of the mesh cuts; None for none.

PLAIN = "plain"


def mesh_of(parameters: Sequence[nn.Parameter]) -> DeviceMesh | None:
    return next((parameter.device_mesh for parameter in parameters if is_dtensor(parameter)), None)


def place_of(parameter: nn.Parameter) -> list[Any] | None:
    """Which part of a sharded parameter this rank has: equal places have equal parts. None for a plain one."""
    if not is_dtensor(parameter):
        return None
    mesh = parameter.device_mesh
    return [list(mesh.shape), [str(one) for one in parameter.placements], list(mesh.get_coordinate() or ())]


def layout_to_note(tensor: Tensor, parameter: nn.Parameter | None, mesh: DeviceMesh | None) -> Layout | None:
    """How a state tensor lies, if that does not follow from its parameter."""
    has_its_shape = parameter is not None and tensor.shape == parameter.shape
    if not is_dtensor(tensor):
        return PLAIN if has_its_shape and tensor.ndim and is_dtensor(parameter) else None
    if has_its_shape and is_dtensor(parameter) and tensor.placements == parameter.placements:
        return None
    if tensor.device_mesh != mesh or any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"a DTensor with {tensor.placements} on {tensor.device_mesh} cannot be saved. Keep state on the mesh of "
            "the optimizer's parameters, as Shard or Replicate."
        )
    return {name: shard_dim(placement) for name, placement in zip(_names(mesh), tensor.placements, strict=True)}


def allocate(
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    noted: Layout | None,
    like: Tensor | None,
    mesh: DeviceMesh | None,
) -> Tensor:
    if isinstance(noted, Mapping) and mesh is not None:
        from torch.distributed.tensor import Replicate, Shard, empty

        dims = [noted.get(name) for name in _names(mesh)]
        placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
        return empty(shape, dtype=dtype, device_mesh=mesh, placements=placements).to(device)
    if noted is None and like is not None and like.shape == shape:
        return torch.empty_like(like, dtype=dtype, device=device, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=device)


def _names(mesh: DeviceMesh | None) -> tuple[str, ...]:
    assert mesh is not None
    return mesh.mesh_dim_names or tuple(str(number) for number in range(mesh.ndim))
