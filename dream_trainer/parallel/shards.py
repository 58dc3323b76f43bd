"""What of a sharded tensor this rank has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dream_trainer.compat.pytorch import local_tensor, shard_dim

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def local_indices(tensor: DTensor, dim: int) -> Tensor:
    """The indices along `dim` that this rank has, int64 on the CPU, for every kind of sharding. No communication."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    shape = [1] * tensor.ndim
    shape[dim] = tensor.shape[dim]
    indices = torch.arange(tensor.shape[dim]).view(shape)
    placements = [placement if shard_dim(placement) == dim else Replicate() for placement in tensor.placements]
    sharded = distribute_tensor(indices, tensor.device_mesh, placements, src_data_rank=None)
    return local_tensor(sharded).flatten().cpu()


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient, laid out as the parameter; sums that tensor parallelism left are made."""
    from torch.distributed.tensor import DTensor

    gradient = parameter.grad
    assert gradient is not None
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_tensor(gradient)
