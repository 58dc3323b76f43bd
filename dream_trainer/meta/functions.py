"""Effects of torch functions on their arguments, from their names: all that the tape knows of PyTorch's API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dream_trainer.compat.pytorch import changes_its_first, tree_iter, tree_map

# factories whose result holds no values yet
EMPTY = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}

FILLED = {  # factories that are worth deferring when their result is large
    *("zeros", "ones", "full", "rand", "randn", "randint", "normal", "eye"),
    *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_full"),
}

READS = {  # functions that bring values into Python
    *("item", "tolist", "numpy", "__array__", "__repr__", "__str__", "__format__", "__reduce_ex__", "__dlpack__"),
    *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__"),
    *("equal", "allclose", "is_nonzero", "pin_memory"),
}

QUIET_WRITES = {"batch_norm", "instance_norm"}  # write running statistics without counting it: they run for real

METADATA = {  # end in `_` and yet write no values: they change the tensor object, which stays on meta
    *("requires_grad_", "detach_", "retain_grad", "set_", "t_", "transpose_", "swapaxes_", "swapdims_"),
    *("squeeze_", "unsqueeze_", "as_strided_", "rename_"),
}

OVERWRITES = {  # in-place functions whose result does not depend on what their target held before
    *("zero_", "fill_", "copy_", "normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_"),
    *("constant_", "kaiming_uniform_"),
}

DRAWS = {  # functions whose result is random
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"),
    *("rand_like", "randn_like", "randint_like"),
    *("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_", "bernoulli_"),
    "kaiming_uniform_",
}

CASTS = {"to", "type", "double", "float", "half", "bfloat16", "clone", "contiguous"}  # other memory, maybe other dtype


def name_of(func: Callable[..., Any]) -> str:
    """The function's own name; for a property's getter or setter `__get__` or `__set__`."""
    return str(getattr(func, "__name__", ""))


def targets(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call writes values into, as far as its name tells."""
    if kwargs.get("out") is not None:
        return list(tensor_leaves(kwargs["out"]))
    if (changes_its_first(func) and name_of(func) not in METADATA) or kwargs.get("inplace") is True:
        first = args[0] if args else next(iter(kwargs.values()))
        return list(tensor_leaves(first))
    return []


def tensor_leaves(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor))


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """A copy of nested tuples, lists, dicts and slices with `function` applied to what lies in them."""

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, slice):
            return slice(*map_leaves(function, (leaf.start, leaf.stop, leaf.step)))
        return function(leaf)

    return tree_map(mapped, value, is_leaf=lambda part: isinstance(part, torch.Size))  # else it gets a plain tuple
