"""`loss.backward()` and `optimizer.step()` without what PyTorch does around them that a plain training step does not
need: 25 us each of a step of 370 (`docs/measurements.md`), since its code is cold when it is reached."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, _tensor, autograd
from torch.autograd import profiler
from torch.autograd.graph import _engine_run_backward
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import has_torch_function_unary
from torch.utils.hooks import RemovableHandle

# All functions that it makes have the same code.
_WITH_HOOKS = Optimizer.profile_hook_step(Optimizer.step).__code__


def backward(loss: Tensor) -> None:
    """`loss.backward()` of a loss with one element that requires a gradient. One that somebody else has replaced, for
    this tensor, its class or all, is called as it is.

    Raises:
        RuntimeError: What `loss.backward()` raises.
    """
    if (
        type(loss) is not Tensor
        or "backward" in vars(loss)
        or not _is_of(vars(_tensor), Tensor.backward)
        or not _is_of(vars(autograd), autograd.backward)
        or has_torch_function_unary(loss)
        or not loss.is_floating_point()
        or loss.is_nested
        or torch._C._are_functorch_transforms_active()
    ):
        loss.backward()
        return
    gradient = torch.ones_like(loss, memory_format=torch.preserve_format)
    _engine_run_backward((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def step(optimizer: Optimizer) -> None:
    """`optimizer.step()`; without its range for profilers where none is running, and without its hooks where there are
    none. A step that somebody else has wrapped, or of an optimizer that is none of torch's, is called as it is."""
    function = type(optimizer).step
    if (
        type(function) is not FunctionType
        or function.__code__ is not _WITH_HOOKS
        or profiler._is_profiler_enabled
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    ):
        optimizer.step()
        return
    patched = vars(optimizer).get("step")
    if patched is not None:
        if not (_is_of(vars(lr_scheduler), patched) and vars(patched).get("__wrapped__") is function):
            optimizer.step()
            return
        optimizer._opt_called = True  # type: ignore[attr-defined]  # which its schedulers look at
    vars(function)["__wrapped__"](optimizer)


def remove_step_hook(optimizer: Optimizer, handle: RemovableHandle) -> None:
    """Removes a hook while it runs, if it is the last that was registered; PyTorch goes through them in their order,
    and would fail at the next one."""
    if next(reversed(optimizer._optimizer_step_pre_hooks)) == handle.id:
        handle.remove()


def _is_of(module: Mapping[str, Any], function: object) -> bool:
    """Whether `function` is of the module with this dict; its name would not do, since `functools.wraps` copies it."""
    return type(function) is FunctionType and function.__globals__ is module
