"""Operations of PyTorch that are kept are found by their names, and reads of values counted."""

import torch

from tests import api


def test_operations_are_found_by_the_names_that_they_have() -> None:
    for name in api.EXPENSIVE_OPERATIONS:
        found = api.operation(name)
        assert found is None or str(found) == name


def test_reads_of_values_are_counted_and_nothing_else_is() -> None:
    with api.ValueReads() as reads:
        doubled = torch.arange(4.0) * 2
        assert (float(doubled[1]), doubled.sum().item(), bool(doubled.any())) == (2.0, 12.0, True)
    assert reads.count == 3
