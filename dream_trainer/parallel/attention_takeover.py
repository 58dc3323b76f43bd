"""Inside a step whose sequences are shared by ranks: calls of attention go to ours.

A model needs no change, where all that looks at other positions is `scaled_dot_product_attention`. Everything else that
does would see this rank's positions alone: the first step's verification finds it (`parallel/verify.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from dream_trainer.compat.operations import name_of_operation
from dream_trainer.compat.pytorch import function_modes
from dream_trainer.errors import StepError
from dream_trainer.parallel.context_attention import ContextAttention
from dream_trainer.parallel.shared_draws import RandomFunction, is_draw

Handler = Callable[..., Any]

_COMPILED = (
    "torch.compile, or flex_attention, which is compiled, inside a step whose sequences are shared by ranks. Under "
    "context_parallel call scaled_dot_product_attention, uncompiled; for packed rows packed_attention, which may use "
    "flex_attention."
)


class AttentionTakeover(TorchFunctionMode):
    """Inside, functions of PyTorch and of ours are replaced by their handlers."""

    def __init__(
        self,
        attention: ContextAttention,
        further: Callable[[ContextAttention], Mapping[Callable[..., Any], Handler]],
        warn: Callable[[str, str], None],
    ) -> None:
        super().__init__()
        self.attention, self.further, self.warn = attention, further, warn
        self.compiled: dict[Any, Callable[..., Any]] = {}  # for the lengths of sequences, by whose it is
        self.runs_compiled = True  # whether blocks that are compiled run so
        self._handlers = _Handlers(self._first_seen)
        self._handlers |= further(attention)
        self._handlers[F.scaled_dot_product_attention] = attention.scaled_dot_product_attention

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

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Inside, blocks that are compiled run as they are."""
        self.runs_compiled = False
        try:
            yield
        finally:
            self.runs_compiled = True

    def _first_seen(self, function: Any) -> Handler:
        """What a function that has no handler is replaced by; each is looked at once."""
        operation = name_of_operation(function)
        if operation == ("aten", F.scaled_dot_product_attention.__name__):
            return self.attention.scaled_dot_product_attention
        name = operation[1].strip("_") if operation is not None else _name_in_pytorch(function)
        if is_draw(name) and function is not Tensor.__rand__:  # the reversed `&`
            return RandomFunction(function, name, self.attention.shapes)
        return function  # type: ignore[no-any-return]


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


def _name_in_pytorch(function: Any) -> str:
    """The name of a function of PyTorch's, without underscores around it; nothing for any other."""
    if not isinstance(function, BuiltinFunctionType | FunctionType | MethodDescriptorType | WrapperDescriptorType):
        return ""
    is_pytorchs = not isinstance(function, FunctionType) or function.__module__.startswith("torch.")
    return function.__name__.strip("_") if is_pytorchs else ""
