"""What is known of a tensor lives as long as the tensor, however its python object comes and goes."""

import torch
from torch import nn

from tests.api import OfTensors


def test_a_value_is_of_one_tensor_and_goes_with_it() -> None:
    known = OfTensors[str]()
    first, equal = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    known.set(first, "a file")
    assert (known.get(first), known.get(equal)) == ("a file", None)
    del first
    assert not known._values.data


def test_a_python_object_that_died_before_its_tensor_is_known_when_it_is_back() -> None:
    known = OfTensors[str]()
    holder = nn.Linear(2, 2)
    known.set(holder.weight, "a file")
    product = holder.weight * 2  # the graph holds the tensor
    del holder
    assert known.get(product.grad_fn.next_functions[0][0].variable) == "a file"
