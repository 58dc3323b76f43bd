"""Attention inside a `torch.autograd.Function`, in a step whose sequences are shared by ranks: it is refused.

Its backward is its own: what it computes again there, or by formula, would be of this rank's part alone, since autograd
runs a backward without modes. `torch.utils.checkpoint` with `use_reentrant=True` is such a Function; the other form
finds by itself that it computed something else, and raises.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import CheckpointFunction

from dream_trainer.errors import StepError


def refuse_hidden_backward() -> None:
    """Raises if this is called inside the forward of a Function of which gradients are wanted.

    Raises:
        StepError: It is.
    """
    if torch.is_grad_enabled():  # a Function's forward is without, and what switches it on keeps a graph
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = _function_of(frame)
        if name is not None:
            raise StepError(_RECOMPUTED if frame.f_code is _CHECKPOINT else _OWN.format(name))
        frame = frame.f_back


def _function_of(frame: FrameType) -> str | None:
    """The name of the Function that has a backward and whose forward this is."""
    code = frame.f_code
    first = code.co_varnames[0] if code.co_argcount else ""
    if first != "ctx" and (code.co_name != "forward" or first in ("self", "")):  # most frames
        return None
    context = frame.f_locals[first]
    if isinstance(context, FunctionCtx):
        has_backward = bool(context.next_functions)  # type: ignore[attr-defined]
        return type(context).__name__.removesuffix("Backward") if has_backward else None
    return None if first == "ctx" else _without_context(code)


@cache
def _without_context(code: CodeType) -> str | None:
    """The name of the Function with this forward and `setup_context`; nothing tells whether gradients are wanted."""
    return next((kind.__name__ for kind in _kinds(Function) if _code_of(kind) is code), None)


def _kinds(kind: type[Function]) -> Iterator[type[Function]]:
    for below in kind.__subclasses__():
        yield below
        yield from _kinds(below)


def _code_of(kind: type[Function]) -> CodeType | None:
    forward: Any = kind.forward
    return forward.__code__ if isinstance(forward, FunctionType) else None


_CHECKPOINT = CheckpointFunction.forward.__code__
_RECOMPUTED = (
    "attention inside torch.utils.checkpoint with use_reentrant=True: in backward it would be computed again within "
    "this rank's part of a sequence. Under context_parallel set "
    'device_parameters.activation_checkpointing to "full" or "selective" instead.'
)
_OWN = (
    "attention inside the forward of {}, a torch.autograd.Function: its backward would see this rank's part of a "
    "sequence alone. Under context_parallel call scaled_dot_product_attention outside of it, or in plain functions, "
    "which autograd differentiates."
)
