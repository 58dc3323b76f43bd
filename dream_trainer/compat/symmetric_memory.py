""" "Async tensor parallelism": matrix products in pieces beside their collective, on GPUs that share memory."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import torch.distributed as dist


def why_memory_is_not_shared(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Lets the ranks of `group` read each other's memory, or says why they cannot; a collective on GPUs."""
    if device.type != "cuda":
        return f"the device is {device.type!r}"
    from torch.distributed import _symmetric_memory as symmetric_memory

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions need no call
        symmetric_memory.enable_symm_mem_for_group(group.group_name)
    try:
        symmetric_memory.rendezvous(symmetric_memory.empty(1, device=device), group)
    except RuntimeError as error:
        return str(error)
    return None


def options_of_overlap(mode: str | None) -> dict[str, Any]:
    """What `torch.compile(options=...)` has to be told, which takes no `mode` beside it."""
    from torch._inductor import list_mode_options

    return {**(list_mode_options(mode) if mode else {}), "_micro_pipeline_tp": True}
