"""Hooks on the gradients of parameters: what `register_hook` and `register_post_accumulate_grad_hook` have set."""

from __future__ import annotations

from collections.abc import Iterable

import torch.nn as nn
from torch import Tensor


def keep_hooks(tensor: Tensor) -> None:
    """After a swap: calls the hooks that were set before it, and those to come."""
    if tensor._backward_hooks is not None:
        tensor._backward_hooks = tensor._backward_hooks
    if tensor._post_accumulate_grad_hooks is not None:
        tensor._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks


def share_hooks(parameter: nn.Parameter, former: nn.Parameter) -> None:
    """Has autograd call the hooks of `former` for `parameter`, also those that are set or removed later."""
    if former._backward_hooks is not None and parameter._backward_hooks is not former._backward_hooks:
        parameter._backward_hooks = former._backward_hooks
    hooks = former._post_accumulate_grad_hooks
    if hooks is not None and parameter._post_accumulate_grad_hooks is not hooks:
        parameter._post_accumulate_grad_hooks = hooks


def has_hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def changes_gradients(parameter: nn.Parameter) -> bool:
    """Whether a hook is set that is given gradients before they are added up (`register_hook`)."""
    return bool(parameter._backward_hooks)


def after_accumulation(parameters: Iterable[nn.Parameter]) -> None:
    """Calls what autograd calls when it has added to `grad`, for those whose `grad` something else has added to."""
    for parameter in parameters:
        if parameter._post_accumulate_grad_hooks and parameter.grad is not None:
            for hook in tuple(parameter._post_accumulate_grad_hooks.values()):
                hook(parameter)
