"""Compiled blocks inside a context-parallel step: attention in their graphs is replaced by ours.

A block is traced whole, without the mode that takes over attention elsewhere, and each graph is changed before it is
compiled: its attention calls, also those in recomputed parts, become calls of our functions, with collectives that
graphs can contain. A block with a graph break raises an error, since attention outside graphs would stay local.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import FunctionType
from typing import Any
from weakref import ref

import torch
import torch.nn as nn
from torch.compiler import is_compiling

from dream_trainer.compat.attention import attend_elsewhere, has_keys_elsewhere
from dream_trainer.compat.compiler import (
    Call,
    CompiledInside,
    CompiledTooOften,
    change_calls,
    changing_backend,
    in_no_graph,
    own_errors,
    too_often_is_told,
)
from dream_trainer.compat.pytorch import function_modes, in_backward
from dream_trainer.errors import DreamTrainerError, StepError
from dream_trainer.modules.class_change import Changed, change_class, own_class
from dream_trainer.parallel.context_attention import AttentionTakeover, Handler
from dream_trainer.parallel.shared_draws import RandomFunction


class SharedBlock(CompiledInside, Changed):
    """Is compiled for whole sequences, and for each length that ranks share."""

    _backend: tuple[str, str | None, Any]  # its name, mode and options
    _whole: Callable[..., Any]  # the forward of its class, compiled as it is

    # A graph compiled around it would trace it as if there were no mode, and attend within this rank's positions.
    @in_no_graph("blocks are compiled by themselves under context_parallel")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        modes = function_modes()
        takeover = next((mode for mode in modes if isinstance(mode, AttentionTakeover)), None)
        if (in_backward() and takeover is None) or (takeover is not None and takeover is not modes[-1]):
            raise StepError(
                "a compiled block was called in context_parallel by torch.utils.checkpoint around it, in backward, or "
                "within another mode, such as torch.device: its attention would not be taken over. Use "
                "device_parameters.activation_checkpointing, or compile=False."
            )
        if takeover is None:  # outside steps, each rank has whole sequences
            with own_errors(DreamTrainerError, _misfit):
                return type(self)._whole(self, *args, **kwargs)
        forward = super().forward
        if not takeover.runs_compiled:
            return forward(*args, **kwargs)
        lengths, own, changed = frozenset(takeover.attention.lengths), ref(self), ""
        # Equal blocks share graphs, up to PyTorch's limit; if blocks differ more, each gets separate graphs.
        for owner in (own,) if (own, lengths) in takeover.compiled else (type(self), own):
            try:
                return _compiled_output(takeover, (owner, lengths), type(self)._backend, forward, args, kwargs)
            except CompiledTooOften as error:
                changed = str(error)
        name = own_class(self).__name__
        takeover.warn(f"{name} compiled too often", _TOO_OFTEN.format(name, changed))
        return forward(*args, **kwargs)


_TOO_OFTEN = (
    "a block of class {} was compiled as often as the compiler allows, and runs uncompiled where something changes "
    "again: right, but slowly. Under context_parallel keep numbers that change out of its attributes, and pad batches "
    "to few shapes. The compiler says that this changed: {}"
)


def _compiled_output(
    takeover: AttentionTakeover,
    key: Any,
    backend: tuple[str, str | None, Any],
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if key not in takeover.compiled:
        takeover.compiled[key] = _compiled_for(takeover, backend)
    with takeover.aside(), has_keys_elsewhere(), own_errors(DreamTrainerError, _misfit), too_often_is_told():
        output, is_compiled = takeover.compiled[key](forward, *args, **kwargs)
    if not is_compiled:
        raise StepError(
            "a compiled block ran uncompiled under context_parallel, as within a TorchDispatchMode or with the "
            "compiler switched off: its attention only saw this rank's part of a sequence. Use compile=False."
        )
    return output


class _InGraphs(AttentionTakeover):
    """For Python code that graphs call as it is, while they are compiled."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.handler(func)(*args, **(kwargs or {}))

    def handler(self, function: Any) -> Handler:
        """The replacement of a function; itself, if it has none."""
        return self._handlers[function]

    def attends(self, function: Any) -> bool:
        """Whether a function is attention that goes to ours."""
        return self.handler(function) == self.attention.scaled_dot_product_attention or function is attend_elsewhere

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, inside this mode."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return call


def _compiled_for(takeover: AttentionTakeover, backend: tuple[str, str | None, Any]) -> Callable[..., Any]:
    """`_run`, compiled for the lengths of now."""
    attention = takeover.attention.in_graphs()
    share = partial(_share, _InGraphs(attention, takeover.further, takeover.warn))
    torch.compiler.allow_in_graph(attend_elsewhere)
    # A separate function has separate graphs, and its own limit on their number.
    run = FunctionType(_run.__code__.replace(), globals())
    return torch.compile(
        run, backend=changing_backend(*backend, partial(change_calls, change=share)), fullgraph=True, dynamic=False
    )


def _run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, bool]:
    """The result of `forward`, and whether the compiler has traced it."""
    return forward(*args, **kwargs), is_compiling()


def compile_with_shared_attention(module: nn.Module, *, backend: str, mode: str | None, options: Any = None) -> None:
    """Compiles the forward of `module`, each shape by itself, for whole sequences and for context-parallel ones."""
    whole = torch.compile(type(module).forward, backend=backend, mode=mode, options=options, dynamic=False)
    of_class = {"_backend": (backend, mode, options), "_whole": staticmethod(whole)}
    change_class(module, SharedBlock, key=(backend, mode, repr(options)), **of_class)


def _share(in_graphs: _InGraphs, call: Call) -> None:
    """Redirects a call of attention to ours."""
    handler, attends = in_graphs.handler(call.function), in_graphs.attends(call.function)
    if isinstance(handler, RandomFunction):
        handler.refuse_in_graph(call.result, *call.args, **call.kwargs)
        handler = handler.function
    if attends and call.is_in_function:
        raise StepError(
            "attention inside a torch.autograd.Function, in a compiled block under context_parallel: its backward "
            "would be of this rank's part of a sequence. Call scaled_dot_product_attention outside of it."
        )
    if attends:
        call.replace(handler)
    elif call.is_flex_attention or "attend_varlen" in call.stack:
        raise StepError(
            'flex_attention, or packed_attention with a mask of kind "flex" or "varlen", within a compiled block under '
            'context_parallel. Use scaled_dot_product_attention, or packed_attention_mask(..., kind="sdpa"); or '
            "compile=False."
        )
    elif "in packed_attention_mask" in call.stack:
        raise StepError(
            "packed_attention_mask was called in a compiled block under context_parallel, and only sees this rank's "
            "documents there. Make the mask before the blocks, and pass it to them; or use compile=False."
        )
    elif call.is_opaque:
        call.replace(in_graphs.around(call.function))


def _misfit(text: str) -> StepError:
    return StepError(
        "scaled_dot_product_attention in a compiled block was given shapes that do not fit. In context_parallel a mask "
        "has the keys of all ranks, and the compiler knows those of one: use packed_attention, is_causal=True, or "
        f"compile=False. PyTorch says: {text.splitlines()[0]}"
    )
