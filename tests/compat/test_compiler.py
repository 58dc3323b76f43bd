"""Each private or moving name of PyTorch's compiler behind `compiler_compat`, exercised."""

import torch

from tests.api import is_compiled, never_compiled


def test_a_module_that_is_compiled_either_way_is_known() -> None:
    module = torch.nn.Linear(2, 2)
    assert not is_compiled(module)
    module.compile(backend="eager")
    assert is_compiled(module)
    assert is_compiled(torch.compile(torch.nn.Linear(2, 2)))


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
