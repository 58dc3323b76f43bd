"""The private and unstable names of PyTorch's compiler; only those with a note in their docstring import it."""

from __future__ import annotations

import logging
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch


def compiled_original(module: torch.nn.Module) -> torch.nn.Module | None:
    """The module inside `torch.compile(module)`, or None if `module` is not such a wrapper. Imports no compiler."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None or not isinstance(module, dynamo.OptimizedModule):
        return None
    return cast("torch.nn.Module", module._orig_mod)


class CompiledInside:
    """Marks a module whose forward calls what is compiled."""


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of `module` run compiled: by `module.compile()` or because it is a `torch.compile(...)`."""
    has_compiled_call = module._compiled_call_impl is not None or compiled_original(module) is not None
    return has_compiled_call or isinstance(module, CompiledInside)


def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which the compiler never traces, from any caller. Imports no compiler."""
    return torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function


def in_no_graph(reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function that the compiler calls as it is, for this reason. Imports the compiler."""
    return partial(torch.compiler.disable, reason=reason)


class Call:
    """A call in a graph that the compiler has traced, as a function mode would see it in Python."""

    def __init__(self, node: torch.fx.Node, is_in_function: bool) -> None:
        from torch.fx.node import map_arg

        self._node, self.is_in_function = node, is_in_function
        args, kwargs = map_arg((node.args, node.kwargs), lambda one: one.meta.get("example_value"))
        self.args: tuple[Any, ...] = tuple(args)  # like its arguments: tensors without data
        self.kwargs: dict[str, Any] = dict(kwargs)
        self.function: Any = _as_in_python(node, isinstance(next(iter(args), None), torch.Tensor))
        self.result: Any = node.meta.get("example_value")  # like what it gives
        self.stack = node.stack_trace or ""

    @property
    def is_flex_attention(self) -> bool:
        return isinstance(self.function, torch._ops.HigherOrderOperator) and self.function.name() == "flex_attention"

    @property
    def is_opaque(self) -> bool:
        """Whether it calls Python code that the compiler does not trace."""
        place = getattr(self.function, "__module__", None) or ""
        # Functions of the compiler's own call such code: an autograd.Function, or what is not traced strictly.
        is_pytorchs = place.partition(".")[0] == "torch" and not place.startswith("torch._dynamo.")
        return isinstance(self.function, FunctionType) and not is_pytorchs

    def replace(self, function: Callable[..., Any]) -> None:
        self._node.target = function


def _as_in_python(node: torch.fx.Node, is_of_tensor: bool) -> Any:
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target), None)
    name = getattr(node.target, "__name__", "")
    if is_of_tensor and getattr(operator, name, None) is node.target:
        return getattr(torch.Tensor, f"__{name}__", node.target)
    return node.target


def change_calls(graph: torch.fx.GraphModule, change: Callable[[Call], None]) -> None:
    """Calls `change` with each call in a graph, and in what the graph calls as one, such as checkpoints."""
    parts = [module for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    in_functions = {inner for part in parts for each in _parts_of_functions(part) for inner in each.modules()}
    for part in parts:
        for node in part.graph.nodes:
            if node.op in ("call_function", "call_method"):
                change(Call(node, part in in_functions))
        part.recompile()


def _parts_of_functions(part: torch.fx.GraphModule) -> Iterator[torch.nn.Module]:
    """The graphs of forward and backward of each `torch.autograd.Function` that `part` calls."""
    for node in part.graph.nodes:
        target = node.target
        if isinstance(target, torch._ops.HigherOrderOperator) and target.name() == "autograd_function_apply":
            names = [str(given.target) for given in node.all_input_nodes if given.op == "get_attr"]
            yield from (value for name in names if isinstance(value := getattr(part, name, None), torch.nn.Module))


def changing_backend(
    name: str, mode: str | None, options: Any, change: Callable[[torch.fx.GraphModule], None]
) -> Callable[..., Any]:
    """The backend of a name for graphs of fixed shapes, which calls `change` with each before it compiles it."""
    kind = torch._TorchCompileInductorWrapper if name == "inductor" else partial(torch._TorchCompileWrapper, name)
    backend = kind(mode, options, False)

    def compile_changed(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        change(graph)
        return backend(graph, example_inputs)

    return compile_changed


@contextmanager
def own_errors(kind: type[Exception], of_shapes: Callable[[str], Exception]) -> Iterator[None]:
    """Inside, errors of `kind` come without the compiler's around them, and those of attention's shapes changed."""
    from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError

    try:
        yield
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, kind):
            raise error.inner_exception from None
        raise
    except TorchRuntimeError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        raise of_shapes(str(error)) from error


class CompiledTooOften(Exception):
    """A function has the maximum number of graphs, and none fits. The text says what changed."""


class _Limits(logging.Filter):
    """Takes what is logged where a function is compiled too often, and lets all else through."""

    changed = "unknown"

    def filter(self, record: logging.LogRecord) -> bool:
        if "hit config.%s" not in str(record.msg):
            return True
        reason = record.getMessage().partition("last reason: ")[2].partition("\n")[0]
        self.changed = reason.partition(": ")[2] or reason  # it begins with the id of what was compiled
        return False


@contextmanager
def too_often_is_told() -> Iterator[None]:
    """Inside, a function that needs more than the maximum number of graphs raises CompiledTooOften and logs nothing."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    log, limits = logging.getLogger("torch._dynamo.convert_frame"), _Limits()
    log.addFilter(limits)
    try:
        yield
    except FailOnRecompileLimitHit as error:
        raise CompiledTooOften(limits.changed) from error
    finally:
        log.removeFilter(limits)
