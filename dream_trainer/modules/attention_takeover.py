"""Inside a step whose sequences are shared by ranks: calls of attention go to ours, and what cannot is named.

A model needs no change, where all that looks at other positions is `scaled_dot_product_attention`. Everything else that
does would see this rank's positions alone, and train wrong without a word: what of it can be told is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from types import BuiltinFunctionType, FunctionType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from dream_trainer.compat.computed_from import is_computed_from
from dream_trainer.compat.operations import name_of_operation
from dream_trainer.compat.pytorch import function_modes
from dream_trainer.errors import StepError
from dream_trainer.modules.context_attention import ContextAttention
from dream_trainer.modules.hidden_backward import refuse_hidden_backward
from dream_trainer.modules.position_checks import PositionChecks, is_spanning, name_in_pytorch
from dream_trainer.modules.shared_draws import RandomFunction, is_draw

Handler = Callable[..., Any]

_OF_PYTORCH = {"aten", "prims", "prim", "c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp"} | {
    *("symm_mem", "inductor", "profiler", "torch_attn", "quantized", "mkldnn", "mkl", "dream_trainer"),
}
"""Namespaces of operators that are known not to mix positions, but for attention and what is checked."""
_ATTENDS = re.compile("atten|attn|transformer_encoder")
_VALUES = ("input", "tensors", "self")
_MOST_LENGTHS = 64
"""Pairs of other lengths that are looked at, so that such as vary without end cost nothing."""

_COMPILED = (
    "torch.compile, or flex_attention, which is compiled, inside a step whose sequences are shared by ranks. Under "
    "context_parallel call scaled_dot_product_attention, uncompiled; for packed rows packed_attention, which may use "
    "flex_attention."
)


class AttentionTakeover(TorchFunctionMode):
    """Inside, functions of PyTorch and of ours are replaced by their handlers.

    Attributes:
        attention: What attention goes to.
        further: As given.
        warn: As given.
        checks: What is called before other functions, with their arguments.
        compiled: What was compiled for the lengths of sequences, by whose it is.
    """

    def __init__(
        self,
        attention: ContextAttention,
        further: Callable[[ContextAttention], Mapping[Callable[..., Any], Handler]],
        warn: Callable[[str, str], None],
    ) -> None:
        super().__init__()
        self.attention, self.further, self.warn = attention, further, warn
        self.compiled: dict[Any, Callable[..., Any]] = {}
        self.checks: dict[Any, Handler] = PositionChecks(attention, warn).of
        self._other_keys: set[tuple[int, int]] = set()
        self._handlers = _Handlers(self._first_seen)
        self._handlers |= {function: Checked(function, check) for function, check in self.checks.items()}
        self._handlers |= {function: _with_gradients(ours) for function, ours in further(attention).items()}
        self._handlers[F.scaled_dot_product_attention] = self._attend
        gumbel = F.gumbel_softmax
        self._handlers[gumbel] = RandomFunction(self._handlers[gumbel], gumbel.__name__, attention.shapes)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_compiling():
            raise StepError(_COMPILED)
        return self._handlers[func](*args, **(kwargs or {}))

    def is_on(self) -> bool:
        """Whether a step is running, and nobody is `aside`."""
        return self in function_modes()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, nothing is replaced, for what calls no attention and very many functions."""
        if self not in function_modes()[-1:]:
            yield
            return
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    def _attend(self, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        refuse_hidden_backward()
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise StepError(
                "attention was called within torch.jit.trace, in a step whose sequences are shared by ranks: the trace "
                "would attend within this rank's part. Under context_parallel call the module as it is."
            )
        lengths = query.shape[-2], key.shape[-2]
        if lengths[1] not in self.attention.lengths and lengths not in self._other_keys:
            self._look_at_other_keys(query, key)
        return self.attention.scaled_dot_product_attention(query, key, *args, **kwargs)

    def _look_at_other_keys(self, query: Tensor, key: Tensor) -> None:
        """Of lengths not seen before: an encoder's are not computed from this rank's part; others see it alone."""
        queries, keys = query.shape[-2], key.shape[-2]
        if len(self._other_keys) < _MOST_LENGTHS:
            self._other_keys.add((queries, keys))
        else:
            return
        if queries == keys and any(_has_whole(query.shape, length) for length in self.attention.lengths):
            return  # each position by itself, among whatever it has several of
        if is_computed_from(key, lambda shape: any(_has_positions(shape, one) for one in self.attention.lengths)):
            self.warn(
                "keys of another length under context_parallel",
                f"attention of {queries} queries to {keys} keys, which are no part of a sequence, was computed as it "
                "is; but the keys come from this rank's part, as where a token is joined in front, positions are "
                "pooled or taken in windows. It then sees this part alone, and not what one rank would. Have keys "
                f"be all positions of the part, or train with context_parallel=1. (Parts: {self.attention.lengths}.)",
            )

    def _first_seen(self, function: Any) -> Handler:
        """What a function that has no handler is replaced by; each is looked at once."""
        of_operation = name_of_operation(function)
        if of_operation is None:
            name = name_in_pytorch(function)
            if isinstance(function, BuiltinFunctionType) and _ATTENDS.search(name):
                return Checked(function, partial(_refuse_attention, function.__name__))
            return self._looked_at_by_name(function, name)
        namespace, operator = of_operation
        if namespace not in _OF_PYTORCH:
            return Checked(function, partial(self._warn_of_operator, f"{namespace}::{operator}"))
        if operator == F.scaled_dot_product_attention.__name__:
            return self._attend
        if _ATTENDS.search(operator):
            return Checked(function, partial(_refuse_attention, str(function)))
        name = operator.strip("_")
        twins = [check for known, check in self.checks.items() if known.__name__.strip("_") == name]
        return Checked(function, twins[0]) if twins else self._looked_at_by_name(function, name)

    def _looked_at_by_name(self, function: Any, name: str) -> Handler:
        handler = Checked(function, partial(self._warn_of_spanning, name)) if is_spanning(name) else function
        if is_draw(name) and function is not Tensor.__rand__:  # the reversed `&`
            return RandomFunction(handler, name, self.attention.shapes)
        return handler

    def _warn_of_spanning(self, name: str, *args: Any, **kwargs: Any) -> None:
        if any(not self.attention.lengths.isdisjoint(one.shape[1:]) for one in _tensors(*args, *kwargs.values())):
            self.warn(
                f"{name} under context_parallel",
                f"the step calls {name} with this rank's part of a sequence. If it goes over positions, it sees this "
                "part alone, and the result is not what one rank would compute. Compute it in the loader and cut it as "
                "the tokens are, or train with context_parallel=1.",
            )

    def _warn_of_operator(self, name: str, *args: Any, **kwargs: Any) -> None:
        tensors = list(_tensors(*args, *kwargs.values()))
        if any(_has_positions(tensor.shape, length) for tensor in tensors for length in self.attention.lengths):
            self.warn(
                f"{name} under context_parallel",
                f"the step calls the operator {name}, which cannot be seen into, with this rank's part of a sequence. "
                "If it attends or mixes positions in another way, it sees this part alone, and the step trains wrong. "
                "Then call scaled_dot_product_attention in its place, or train with context_parallel=1.",
            )


class _Handlers(dict[Any, Handler]):
    """Of functions, each of which is looked at when it is first called."""

    def __init__(self, first_seen: Callable[[Any], Handler]) -> None:
        super().__init__()
        self._first_seen = first_seen

    def __missing__(self, function: Any) -> Handler:
        handler = self._first_seen(function)
        if not isinstance(function, FunctionType) or function.__closure__ is None:  # such may be made for each call
            self[function] = handler
        return handler


class Checked:
    """A function whose arguments are looked at before it is called."""

    def __init__(self, function: Callable[..., Any], check: Callable[..., None]) -> None:
        self._function, self._check = function, check

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.look(*args, **kwargs)
        return self._function(*args, **kwargs)

    def look(self, *args: Any, **kwargs: Any) -> None:
        """Looks at the arguments of a call."""
        if args:
            self._check(*args, **kwargs)
            return
        self._check(  # torch.softmax(input=scores, dim=-1)
            *(kwargs[name] for name in _VALUES if name in kwargs),
            **{name: value for name, value in kwargs.items() if name not in _VALUES},
        )


def _with_gradients(attend: Handler) -> Handler:
    def call(*args: Any, **kwargs: Any) -> Any:
        refuse_hidden_backward()
        return attend(*args, **kwargs)

    return call


def _tensors(*values: Any) -> Iterator[Tensor]:
    """Those given, and those of lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(*value)


def _has_positions(shape: Sequence[int], length: int) -> bool:
    """Whether there may be `length` positions, behind the batch and before features."""
    return length in (shape[1:2] if len(shape) < 4 else shape[1:-1])


def _has_whole(shape: Sequence[int], length: int) -> bool:
    """Whether what is attended in is each position's own: all are in the batch of `[*batch, heads, length, width]`."""
    is_flat = prod(shape[:-3] if len(shape) > 3 else shape[:-2]) % length == 0
    return shape[-2] < length and (is_flat or length in shape[:-2])


def _refuse_attention(name: str, *_: Any, **__: Any) -> NoReturn:
    raise StepError(
        f"{name} attends within this rank's part of a sequence. Under context_parallel call "
        "scaled_dot_product_attention, which chooses the kernel."
    )
