"""Operations of PyTorch are known by name, whichever overload is called."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests import api


def test_an_operation_has_a_namespace_and_a_name_and_nothing_else_has() -> None:
    assert (
        api.name_of_operation(torch.ops.aten.mm) == api.name_of_operation(torch.ops.aten.mm.default) == ("aten", "mm")
    )
    assert api.name_of_operation(torch.ops.aten.sum.dim_IntList) == ("aten", "sum")
    assert api.name_of_operation(torch.mm) is None
    assert api.name_of_operation(torch.nn.functional.linear) is None


def test_operations_are_found_by_the_names_that_they_have() -> None:
    for name in api.EXPENSIVE_OPERATIONS:
        found = api.operation(name)
        assert found is None or str(found) == name


def test_reads_of_values_are_counted_and_nothing_else_is() -> None:
    with api.ValueReads() as reads:
        doubled = torch.arange(4.0) * 2
        assert (float(doubled[1]), doubled.sum().item(), bool(doubled.any())) == (2.0, 12.0, True)
    assert reads.count == 3


def test_a_first_run_inside_a_checkpoint_or_another_function_is_seen_and_nothing_else_is() -> None:
    seen: list[tuple[bool, bool]] = []

    def run(x: Tensor) -> Tensor:
        seen.append((api.checkpoint_around() is not None, api.is_inside_function()))
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    for is_reentrant in (False, True):
        checkpoint(run, x, use_reentrant=is_reentrant).sum().backward()
    for context in (torch.autograd.graph.save_on_cpu(), torch.no_grad(), torch.inference_mode()):
        with context:
            run(x)
    assert seen == [(True, False), (False, False), (False, True), *[(False, False)] * 4]
