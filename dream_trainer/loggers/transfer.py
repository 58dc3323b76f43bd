"""Numbers from devices to the host: many 0-dim tensors in one copy, which nobody need wait for at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def start_copy(tensors: Sequence[Tensor]) -> Callable[[], list[float]]:
    """Starts to copy 0-dim tensors to the host; one stack for each dtype and one copy for each device.

    On CUDA into pinned memory, so that nothing waits before the values are asked for.

    Args:
        tensors: On any devices, of any real dtypes; they may change afterwards.

    Returns:
        What gives their values, exactly and in their order; it waits for the copies.
    """
    if len({(tensor.device, tensor.dtype) for tensor in tensors}) == 1:  # as always but for a mixture
        return _start([torch.stack(list(tensors))], tensors[0].device)
    devices: dict[torch.device, dict[torch.dtype, list[int]]] = {}
    for index, tensor in enumerate(tensors):
        devices.setdefault(tensor.device, {}).setdefault(tensor.dtype, []).append(index)
    parts: list[tuple[list[int], Callable[[], list[float]]]] = []
    for device, groups in devices.items():
        # Wide dtypes first, so that each part starts at a multiple of its own element size.
        ordered = sorted(groups.items(), key=lambda group: -group[0].itemsize)
        stacks = [torch.stack([tensors[index] for index in indices]) for _, indices in ordered]
        parts.append(([index for _, indices in ordered for index in indices], _start(stacks, device)))

    def values() -> list[float]:
        values_in_order = [0.0] * len(tensors)
        for indices, numbers in parts:
            for index, number in zip(indices, numbers(), strict=True):
                values_in_order[index] = number
        return values_in_order

    return values


def _start(stacks: list[Tensor], device: torch.device) -> Callable[[], list[float]]:
    """Starts to copy vectors of several dtypes in one go: as bytes, since no dtype holds them all exactly."""
    if len(stacks) == 1:
        data = stacks[0]
    else:
        data = torch.cat([stack.view(torch.uint8) for stack in stacks])
    if device.type == "cuda":
        host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
        host.copy_(data, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
    else:
        host, arrived = data, None

    def numbers() -> list[float]:
        if arrived is not None:
            arrived.synchronize()
        if len(stacks) == 1:
            return [float(value) for value in host.tolist()]
        split = host.cpu().split([stack.nbytes for stack in stacks])
        views = [part.view(stack.dtype) for part, stack in zip(split, stacks, strict=True)]
        return [float(value) for view in views for value in view.tolist()]

    return numbers
