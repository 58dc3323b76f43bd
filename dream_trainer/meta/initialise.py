"""What `init_weights` does when the user writes none; children before parents, on the tape.

1. A module built on meta before the recording, with untouched tensors, gets its `reset_parameters()`.
2. A module with an `init_weights()` without arguments gets it called, unless it has had it (in `post_init` or
   its constructor), or has weights that were given rather than drawn.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import chain
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from dream_trainer.compat.pytorch import reset_attention_parameters
from dream_trainer.meta.tape import Tape


@runtime_checkable
class HasInitWeights(Protocol):
    """A module that knows how it wants to be initialised, as a whole."""

    def init_weights(self) -> None: ...


@runtime_checkable
class HasResetParameters(Protocol):
    """A module that draws its own direct parameters, as PyTorch's layers do."""

    def reset_parameters(self) -> None: ...


@runtime_checkable
class HasPostInit(Protocol):
    """A model of transformers, as far as it matters here: its constructor ends with `post_init()`."""

    def post_init(self) -> None: ...


def default_init(model: nn.Module, tape: Tape) -> None:
    """Initialises what the constructor of `model`, built by this tape or on meta before it, left to do."""
    with torch.no_grad(), tape.recording():
        for module in _children_first(model):
            tensors = chain(module.parameters(recurse=False), module.buffers(recurse=False))
            if any(tape.is_untouched(tensor) for tensor in tensors):
                _reset(module)
        for module in _children_first(model):
            if isinstance(module, HasInitWeights) and not _has_had_it(module, tape):
                module.init_weights()


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    return iter(reversed(list(module.modules())))


def _reset(module: nn.Module) -> None:
    if isinstance(module, (nn.MultiheadAttention, nn.Transformer)):
        reset_attention_parameters(module)
    elif isinstance(module, HasResetParameters):
        module.reset_parameters()


def _has_had_it(module: HasInitWeights, tape: Tape) -> bool:
    """Whether `init_weights` is not to be called: what it does is done, or cannot be asked for."""
    assert isinstance(module, nn.Module)
    is_done = isinstance(module, HasPostInit) or tape.has_initialised(module)
    return is_done or not _needs_no_arguments(module) or _is_given(module, tape)


def _needs_no_arguments(module: HasInitWeights) -> bool:
    """Inner modules often take arguments here (`init_weights(std)`), and are called by their parent."""
    parameters = inspect.signature(module.init_weights).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(p.default is not p.empty or p.kind in variadic for p in parameters)


def _is_given(module: nn.Module, tape: Tape) -> bool:
    parameters = list(module.parameters())
    if not parameters:
        return False
    return not any(tape.tracks(p) for p in parameters) or any(tape.is_given(p) for p in parameters)
