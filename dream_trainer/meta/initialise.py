"""The default `init_weights`, if the user defines none; children before parents, on the tape.

1. A module built on meta before the recording, with untouched tensors, gets its `reset_parameters()`.
2. A module with an `init_weights()` without arguments gets it called, unless it has had it (in `post_init` or
   its constructor), or has weights that were given rather than drawn.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dream_trainer.compat.pytorch import reset_attention_parameters
from dream_trainer.errors import InitError
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


# -- What a build leaves behind.


_OF_MODULES = frozenset(vars(nn.Module()))


def refuse_lazy(models: Mapping[str, nn.Module]) -> None:
    for model_name, model in models.items():
        for name, module in model.named_modules(prefix=model_name):
            tensors = (*module._parameters.values(), *module._buffers.values())
            if any(is_lazy(tensor) for tensor in tensors if tensor is not None):
                raise InitError(
                    f"self.{name} ({type(module).__name__}) has parameters without a shape, so it cannot be sharded. "
                    "Give its constructor the sizes, or call the model once on an example batch in configure_models."
                )


def refuse_hidden(roots: Mapping[str, Any]) -> None:
    """Refuses modules and tensors on meta that are reached by attributes, and not as children of a module."""
    known = {id(part) for root in roots.values() if isinstance(root, nn.Module) for part in root.modules()}
    seen: set[int] = set()
    for root_name, root in roots.items():
        parts = root.named_modules(prefix=root_name) if isinstance(root, nn.Module) else [(root_name, root)]
        for name, part in parts:
            if isinstance(part, torch.jit.ScriptModule):
                continue  # it keeps the module that it was made from, and does not compute with it
            for place, found in _reached(name, part, known, seen, is_part=isinstance(part, nn.Module)):
                if isinstance(found, Tensor) and not isinstance(root, nn.Module):
                    continue  # an optimizer over a trainer's list of parameters is refused later, with its name
                what = f"a {type(found).__name__}" if isinstance(found, nn.Module) else "a tensor"
                raise InitError(
                    f"self.{place} holds {what} that no module has as its own, so it stayed on the meta device. Assign "
                    "it to the module or to the trainer; nn.ModuleList and nn.ModuleDict hold several."
                )


def _reached(
    name: str, value: Any, known: set[int], seen: set[int], is_part: bool = False
) -> Iterator[tuple[str, Any]]:
    if value is None or id(value) in seen or isinstance(value, str | bytes | int | float | type | ModuleType):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if not is_part and value.is_meta:
            yield name, value
        return
    if isinstance(value, nn.Module) and not is_part:
        if id(value) not in known and any(t.is_meta for t in (*value.parameters(), *value.buffers())):
            yield name, value
        return
    for child_name, child in children_of(name, value):
        yield from _reached(child_name, child, known, seen)


def children_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{name}[{index}]", child) for index, child in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", child) for key, child in value.items())
    elif isinstance(value, partial):
        yield from ((f"{name}.{part}", getattr(value, part)) for part in ("func", "args", "keywords"))
    elif isinstance(value, MethodType):
        yield f"{name}.__self__", value.__self__
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # it is empty
                yield f"{name}.<closure>", cell.cell_contents
    else:
        passed_over = _OF_MODULES if isinstance(value, nn.Module) else ()
        attributes = getattr(value, "__dict__", {})
        yield from ((f"{name}.{key}", child) for key, child in list(attributes.items()) if key not in passed_over)
