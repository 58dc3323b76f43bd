"""Copies of models as they were in one piece: without values, and run with those of the models that were cut since."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.func import functional_call


def copied_without_values(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are on the meta device.

    Raises:
        RuntimeError: Something in it cannot be copied.
        TypeError: Likewise.
    """
    without_values: dict[int, Any] = {
        id(tensor): _without_value(tensor) for tensor in (*model.parameters(), *model.buffers())
    }
    return copy.deepcopy(model, without_values)


def run_with_values_of(
    model: nn.Module, whole: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> Any:
    """`whole(*args, **kwargs)` with the whole parameters and buffers of `model`; a collective where it is cut."""
    cut = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        place, _, own = name.rpartition(".")
        if own not in dict(whole.get_submodule(place).named_buffers(recurse=False)):  # set since it was copied
            whole.get_submodule(place).register_buffer(own, buffer)
    names = [name for name, _ in (*whole.named_parameters(), *whole.named_buffers())]
    return functional_call(whole, {name: plain(cut[name].detach()).to(device) for name in names}, args, dict(kwargs))


def plain(tensor: Tensor) -> Tensor:
    """All of a tensor, of which ranks may have parts; a collective then."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _without_value(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
