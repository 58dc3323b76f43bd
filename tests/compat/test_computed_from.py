"""What autograd knows of where a tensor comes from."""

from __future__ import annotations

import torch

from tests.api import is_computed_from, viewed


def test_views_of_views_are_of_what_owns_the_values() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3, 4))
    with torch.no_grad():
        views = (weight, weight.mT, weight[0].T, weight.detach().view(6, 4))
    assert [viewed(view) is weight for view in views] == [True, True, True, False]


def test_shapes_along_a_graph_are_found_up_to_a_number_of_operations() -> None:
    leaf = torch.zeros(5, 7, requires_grad=True)
    other = torch.zeros(3, 3, requires_grad=True)
    result = (leaf.exp()[:3, :3].contiguous() @ other).sum(0)
    assert is_computed_from(result, lambda shape: shape == (5, 7))
    assert is_computed_from(result, lambda shape: shape == (3,))
    assert not is_computed_from(result, lambda shape: shape == (7, 5))
    assert not is_computed_from(result, lambda shape: shape == (5, 7), most=2)
    assert not is_computed_from(result.detach(), lambda shape: True)
