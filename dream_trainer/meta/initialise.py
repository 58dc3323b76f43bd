"""The default `init_weights`, if the user defines none; children before parents, on the tape.

1. A module built on meta before the recording, with untouched tensors, gets its `reset_parameters()`.
2. A module with an `init_weights()` without arguments gets it called, unless it has had it (in `post_init` or
   its constructor), or has weights that were given rather than drawn.
"""

from __future__ import annotations

import inspect
from itertools import chain
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from dream_trainer.compat.pytorch import reset_attention_parameters
from dream_trainer.meta.tape import Tape


@runtime_checkable
class HasInitWeights(Protocol):
    def init_weights(self) -> None: ...


@runtime_checkable
class HasResetParameters(Protocol):
    def reset_parameters(self) -> None: ...


@runtime_checkable
class HasPostInit(Protocol):  # a model of transformers: its constructor ends with `post_init()`
    def post_init(self) -> None: ...


def default_init(model: nn.Module, tape: Tape) -> None:
    """Initialises parameters left by the constructor of `model`, built by this tape or on meta before it."""
    children_first = [*reversed(list(model.modules()))]
    with torch.no_grad(), tape.recording():
        for module in children_first:
            tensors = chain(module.parameters(recurse=False), module.buffers(recurse=False))
            if not any(tape.is_untouched(tensor) for tensor in tensors):
                continue
            if isinstance(module, (nn.MultiheadAttention, nn.Transformer)):
                reset_attention_parameters(module)
            elif isinstance(module, HasResetParameters):
                module.reset_parameters()
        for module in children_first:
            if isinstance(module, HasInitWeights) and not _has_had_it(module, tape):
                module.init_weights()


def _has_had_it(module: HasInitWeights, tape: Tape) -> bool:
    """Whether `init_weights` must not be called: its work is done, or it cannot be called."""
    assert isinstance(module, nn.Module)
    if isinstance(module, HasPostInit) or tape.has_initialised(module):
        return True
    # Inner modules often take arguments here (`init_weights(std)`), and are called by their parent.
    arguments = inspect.signature(module.init_weights).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(p.default is p.empty and p.kind not in variadic for p in arguments):
        return True
    parameters = list(module.parameters())
    is_tracked = not parameters or any(tape.tracks(p) for p in parameters)
    return not is_tracked or any(tape.is_given(p) for p in parameters)
