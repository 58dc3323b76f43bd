"""What parameters, gradients and optimizer state take on this rank: before the first step, and as they really are.

Activations are left out: nothing but a step tells what they take.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from dream_trainer.compat.pytorch import local_tensor
from dream_trainer.loggers.formatting import format_bytes
from dream_trainer.nested import leaves

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer

Bytes = Counter[torch.dtype]
"""Bytes by the dtype of the tensors that take them."""


def bytes_of(values: Iterable[Any]) -> Bytes:
    """What this rank holds of the tensors in `values`, however nested; each tensor once."""
    tensors = {id(leaf): leaf for value in values for leaf in leaves(value) if isinstance(leaf, Tensor)}
    n_bytes: Bytes = Counter()
    for tensor in tensors.values():
        n_bytes[tensor.dtype] += local_tensor(tensor).numel() * tensor.element_size()
    return n_bytes


def parameter_bytes(trainer: AbstractTrainer) -> Bytes:
    """Of the parameters of all models, as they lie on this rank, and of their buffers."""
    models = trainer.named_models().values()
    return bytes_of(tensor for model in models for tensor in (*model.parameters(), *model.buffers()))


def gradient_bytes(optimizers: Iterable[Optimizer]) -> Bytes:
    """Of the gradients that the optimizers' parameters will have, which are as the parameters are."""
    return bytes_of(p for optimizer in optimizers for p in _parameters(optimizer) if p.requires_grad)


def held_gradient_bytes(optimizer: Optimizer) -> Bytes:
    """Of the gradients that are there."""
    return bytes_of(p.grad for p in _parameters(optimizer) if p.grad is not None)


def state_bytes(optimizers: Iterable[Optimizer]) -> Bytes | None:
    """Of the optimizers' state from the first step on, found by such a step of a copy on the meta device.

    Nothing is allocated, and the optimizers stay as they are. State that is there already (after a resume) is counted
    as it is.

    Returns:
        None if one of them cannot be told: it is not PyTorch's (whose step may communicate), reads numbers from its
        tensors (Adafactor, ASGD), or needs a closure (LBFGS).
    """
    total: Bytes = Counter()
    for optimizer in optimizers:
        of_optimizer = held_state_bytes(optimizer) if optimizer.state else _state_after_a_step(optimizer)
        if of_optimizer is None:
            return None
        total += of_optimizer
    return total


def held_state_bytes(optimizer: Optimizer) -> Bytes:
    """Of the optimizer's state as it is."""
    return bytes_of(optimizer.state.values())


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _state_after_a_step(optimizer: Optimizer) -> Bytes | None:
    if not type(optimizer).__module__.startswith(("torch.optim.", "dream_trainer.optim.")):
        return None
    # Equal shards have equal state, so one of them is enough: on meta a parameter takes a millisecond or two.
    counts: Counter[Tensor] = Counter()
    groups = []
    for group in optimizer.param_groups:
        counts_of_kind = Counter((local_tensor(p).shape, p.dtype) for p in group["params"] if p.requires_grad)
        twins = {_on_meta(shape, dtype): count for (shape, dtype), count in counts_of_kind.items()}
        counts.update(twins)
        # Other ways to the same state, which the meta device does not have.
        ways: dict[str, Any] = {way: False for way in ("fused", "foreach", "capturable") if way in group}
        groups.append({**group, "params": list(twins), **ways})
    twin = copy.copy(optimizer)
    twin.state, twin.param_groups = defaultdict(dict), groups
    try:
        twin.step()
    except Exception:  # an estimate stops no run
        return None
    total: Bytes = Counter()
    for parameter, count in counts.items():
        for dtype, n_bytes in bytes_of([twin.state[parameter]]).items():
            total[dtype] += n_bytes * count
    return total


def _on_meta(shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    return parameter


def in_words(found: Bytes | None) -> str:
    """`2.00 GiB float32, 3.00 MiB bfloat16`."""
    if found is None:
        return "unknown"
    kinds = [(format_bytes(count), str(dtype).removeprefix("torch.")) for dtype, count in found.most_common() if count]
    return ", ".join(map(" ".join, kinds)) or "none"


def estimate(trainer: AbstractTrainer) -> dict[str, Bytes | None]:
    """What each part will take from the first step on; before it, on any rank."""
    optimizers = trainer.named_optimizers().values()
    return {
        "parameters": parameter_bytes(trainer),
        "gradients": gradient_bytes(optimizers),
        "optimizer state": state_bytes(optimizers),
    }


def measured(trainer: AbstractTrainer, gradients: Bytes) -> dict[str, Bytes]:
    """What each part takes after a step in which the gradients took so much."""
    state = sum((held_state_bytes(optimizer) for optimizer in trainer.named_optimizers().values()), Counter())
    return {"parameters": parameter_bytes(trainer), "gradients": gradients, "optimizer state": state}
