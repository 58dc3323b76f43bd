"""The private and unstable names of PyTorch's compiler; only those with a note in their docstring import it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

_OPS = torch.ops._c10d_functional


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


def is_opaque(function: Any) -> bool:
    """Whether it is Python code that a graph calls as it is: the compiler does not trace it."""
    place = getattr(function, "__module__", None) or ""
    # Functions of the compiler's own call such code: an autograd.Function, or what is not traced strictly.
    is_pytorchs = place.partition(".")[0] == "torch" and not place.startswith("torch._dynamo.")
    return isinstance(function, FunctionType) and not is_pytorchs


def change_calls(graph: torch.fx.GraphModule, change: Callable[[torch.fx.Node, bool], None]) -> None:
    """Calls `change` with each call in a graph, at any depth, and whether it is in a `torch.autograd.Function`."""
    parts = [module for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    in_functions = {inner for part in parts for each in _parts_of_functions(part) for inner in each.modules()}
    for part in parts:
        for node in part.graph.nodes:
            if node.op == "call_function":
                change(node, part in in_functions)
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


def errors_of_compiler() -> ModuleType:
    import torch._dynamo.exc

    return torch._dynamo.exc


def options_of_mode(mode: str | None) -> dict[str, Any]:
    """Options for `torch.compile(options=...)`, which does not accept `mode` at the same time."""
    from torch._inductor import list_mode_options

    return {**list_mode_options(mode)} if mode else {}


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, running: Any) -> Tensor:
        # Detached: the inner tensor may be returned again, and would otherwise be in two graphs.
        return cast(Tensor, running.trigger_wait().detach())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0]


def waited(value: Any) -> Any:
    """`value`, or the finished tensor if it is the result of a collective that may still run; gradients pass."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return _Waited.apply(value) if isinstance(value, AsyncCollectiveTensor) else value  # type: ignore[no-untyped-call]


def is_traced(tensor: Tensor) -> bool:
    """Whether the compiler makes a graph of what is computed with a tensor."""
    module = sys.modules.get("torch._subclasses.functional_tensor")
    return module is not None and isinstance(tensor, module.FunctionalTensor)


def gathered_in_graph(flat: Tensor, size: int, group: ProcessGroup) -> Tensor:
    """All-gathers from `size` ranks of a group, one after the other, by a collective that compiled graphs can have."""
    return cast(Tensor, _OPS.wait_tensor(_OPS.all_gather_into_tensor(flat, size, group.group_name)))


def summed_in_graph(flat: Tensor, size: int, group: ProcessGroup) -> Tensor:
    """This rank's part of the sum over `size` ranks, whose parts lie one after the other; like `gathered_in_graph`."""
    return cast(Tensor, _OPS.wait_tensor(_OPS.reduce_scatter_tensor(flat, "sum", size, group.group_name)))


def exchanged_in_graph(flat: Tensor, size: int, group: ProcessGroup) -> Tensor:
    """Exchanges equal parts among `size` ranks, returning those for this rank; like `gathered_in_graph`."""
    parts = [flat.numel() // size] * size
    return cast(Tensor, _OPS.wait_tensor(_OPS.all_to_all_single(flat, parts, parts, group.group_name)))


def why_memory_is_not_shared(group: ProcessGroup, device: torch.device) -> str | None:
    """Lets the ranks of `group` read each other's memory, or says why they cannot; a collective on GPUs."""
    if device.type != "cuda":
        return f"the device is {device.type!r}"
    from torch.distributed import _symmetric_memory as symmetric_memory

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions need no call
        symmetric_memory.enable_symm_mem_for_group(group.group_name)
    try:
        symmetric_memory.rendezvous(symmetric_memory.empty(1, device=device), group)
    except RuntimeError as error:
        return str(error)
    return None
