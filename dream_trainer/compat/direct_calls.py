"""`loss.backward()` and `optimizer.step()` without what PyTorch does around them that a plain training step does not
need: 25 us each of a step of 370 (`docs/measurements.md`), since its code is cold when it is reached."""

from __future__ import annotations

from types import FunctionType

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.autograd.graph import _engine_run_backward
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import has_torch_function_unary

# All functions that it makes have the same code; its name would not do, since `functools.wraps` copies it.
_WITH_HOOKS = Optimizer.profile_hook_step(Optimizer.step).__code__


def backward(loss: Tensor) -> None:
    """`loss.backward()` of a loss with one element that requires a gradient.

    Raises:
        RuntimeError: What `loss.backward()` raises.
    """
    if (
        has_torch_function_unary(loss)
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
    none. A step that somebody else has wrapped is called as it is."""
    if (
        profiler._is_profiler_enabled
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    ):
        optimizer.step()
        return
    function = type(optimizer).step
    patched = vars(optimizer).get("step")
    if patched is not None:
        if not _only_notes_the_call(patched, function):
            optimizer.step()
            return
        optimizer._opt_called = True  # type: ignore[attr-defined]  # which its schedulers look at
    if type(function) is FunctionType and function.__code__ is _WITH_HOOKS:
        function.__wrapped__(optimizer)  # type: ignore[attr-defined]
    else:
        function(optimizer)


def _only_notes_the_call(patched: object, function: object) -> bool:
    """Whether `patched` is what a scheduler of torch's puts around `function`."""
    return (
        type(patched) is FunctionType
        and patched.__globals__ is vars(lr_scheduler)
        and vars(patched).get("__wrapped__") is function
    )
