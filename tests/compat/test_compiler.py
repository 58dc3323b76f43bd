"""Each private or moving name of PyTorch's compiler behind `compiler_compat`, exercised."""

from __future__ import annotations

import logging

import torch

from dream_trainer.compat.compiler import (
    compilations,
    compiled_graphs,
    is_compiled,
    never_compiled,
    told_of_graph_breaks,
)


def test_the_compiler_tells_what_it_traced_again_and_where_it_broke() -> None:
    class Squares(torch.nn.Module):
        factor = 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            (x * 3).sum().item()
            return x * x * self.factor

    torch._dynamo.reset()
    module = Squares()
    assert not is_compiled(module)
    module.compile(backend="eager")
    assert is_compiled(module)
    assert is_compiled(torch.compile(Squares()))
    breaks: list[str] = []
    before, last = compiled_graphs(), max((one.start_us for one in compilations()), default=0)
    log = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
    state = log.level, log.propagate, list(log.handlers)
    with told_of_graph_breaks(breaks.append):
        module(torch.ones(2))
        assert compiled_graphs() - before == 2
        module.factor = 4
        module(torch.ones(2))
    assert (log.level, log.propagate, log.handlers) == state
    assert compiled_graphs() - before == 3
    start = Squares.forward.__code__.co_firstlineno
    assert breaks[0].startswith(f"Graph break in user code at {__file__}:{start + 1}\nGraph Break Reason: ")
    found = compilations(after_us=last)
    assert [(one.where, one.is_last) for one in found] == [
        (f"{__file__}:{line}", False) for line in (start, start + 1, start + 1)
    ]
    assert [one.again_because is not None for one in found] == [False, False, True]
    assert "factor" in str(found[-1].again_because)
    assert compilations(after_us=max(one.start_us for one in found)) == []


def test_listeners_that_leave_in_the_order_in_which_they_came_leave_nothing_behind() -> None:
    """As the callbacks of one trainer do."""

    def breaks_once(x: torch.Tensor) -> torch.Tensor:
        return x + x.sum().item()

    torch._dynamo.reset()
    log = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
    state = log.level, log.propagate, list(log.handlers)
    found: list[str] = []
    first, second = told_of_graph_breaks(lambda text: None), told_of_graph_breaks(found.append)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    torch.compile(breaks_once, backend="eager")(torch.ones(2))
    second.__exit__(None, None, None)
    assert len(found) == 1
    assert (log.level, log.propagate, log.handlers) == state


def test_what_is_never_compiled_is_not_traced_where_the_compiler_meets_it() -> None:
    class Doubles(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    torch._dynamo.reset()
    traced = []
    for wrap in (never_compiled, lambda function: function):
        module = Doubles()
        module.register_forward_hook(wrap(lambda *_: traced.append(torch.compiler.is_compiling())))
        module.compile(backend="eager", fullgraph=True)
        module(torch.ones(2))
    assert traced == [False, True]
