"""What `init_weights` does when the user writes none.

The constructors have run on the tape, so what they chose stands: PyTorch's own `reset_parameters`, a constructor's
`self.apply(init)`, loaded weights. Two things remain, done here in this order, children before parents in each:

1. A module that was built on meta *before* the recording has lost what its constructor computed: a module with
   untouched parameters or buffers gets its `reset_parameters()`, as its constructor would have done.
2. A module with an `init_weights()` of its own (callable without arguments) gets it called, so a parent's has the last
   word over its children's. Left alone are modules that have had it: their constructor called it, as timm's do, or they
   are models of transformers, whose `post_init` does, and which would draw again what was put on them since (an
   adapter, a head). So are those with weights that were given rather than drawn: all parameters real, or one of them
   copied from a real tensor, as `load_state_dict` does.
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
    """Initialises what `model`'s constructor left to do (see the module's docstring), on the tape.

    Args:
        model: Built by this tape, or on meta before it; not yet sharded.
        tape: Records the calls; it may be recording already.
    """
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
