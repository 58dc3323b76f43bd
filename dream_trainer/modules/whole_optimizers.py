"""Optimizers of parameters that are shards between steps: what they hold changes place with the parameters.

`configure_optimizers` runs with whole parameters, and `Optimizer.step` with shards. So parameters change place in
groups, in the keys of `state`, and in an optimizer's own attributes (lists, dicts, tuples, other optimizers). What a
constructor made of whole parameters, copies of weights or state, is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from dream_trainer.nested import leaves

_OF_EACH_OPTIMIZER = ("param_groups", "state", "defaults")


class MadeOfWhole(TorchFunctionMode):
    """Inside, notes which tensors are made of whole parameters with the same layout: copies, or zeros.

    Args:
        whole: The parameters.

    Attributes:
        made: Each such tensor, with the parameter that it is made of.
    """

    def __init__(self, whole: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._origins = {id(parameter): parameter for parameter in whole}
        self.made: list[tuple[Tensor, nn.Parameter]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        origins = [self._origins[id(value)] for value in leaves(args) if id(value) in self._origins]
        for value in leaves(result) if origins else ():
            if isinstance(value, Tensor) and id(value) not in self._origins:
                origin = next((one for one in origins if one.shape == value.shape), None)
                if origin is not None:
                    self._origins[id(value)] = origin
                    self.made.append((value, origin))
        return result


class WholeOptimizers:
    """Exchanges what optimizers hold.

    Args:
        optimizers: Returns those of now.
    """

    def __init__(self, optimizers: Callable[[], Iterable[Optimizer]]) -> None:
        self._optimizers = optimizers
        self._attributes: list[tuple[Optimizer, str]] = []

    def exchange(self, others: Mapping[int, Tensor]) -> None:
        """Exchanges parameters; lists and dicts stay the same objects.

        Args:
            others: The tensor that takes the place of another, by the id of that.
        """
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                group["params"][:] = [others.get(id(p), p) for p in group["params"]]
            for parameter in [p for p in optimizer.state if id(p) in others]:
                optimizer.state[others[id(parameter)]] = optimizer.state.pop(parameter)
        for optimizer, name in self._attributes:
            setattr(optimizer, name, _Exchange(others).of(vars(optimizer)[name]))

    def adopt(self, shards: Mapping[int, Tensor], parts: Mapping[int, Tensor]) -> None:
        """Looks through optimizers that are new, after an exchange.

        Args:
            shards: By the id of the whole parameter.
            parts: What takes the place of tensors that are made of whole parameters, by their id.
        """
        self._attributes = []
        for optimizer in self._optimizers():
            _Exchange(parts).of(optimizer.state)
            for name, value in list(vars(optimizer).items()):
                if name not in _OF_EACH_OPTIMIZER:
                    exchange = _Exchange({**shards, **parts})
                    setattr(optimizer, name, exchange.of(value))
                    if not exchange.met.isdisjoint(shards):
                        self._attributes.append((optimizer, name))


class _Exchange:
    """One walk through nested values. `met` are the ids of the tensors that gave their place to others."""

    def __init__(self, others: Mapping[int, Tensor]) -> None:
        self._others = others
        self._seen: set[int] = set()
        self.met: set[int] = set()

    def of(self, value: Any) -> Any:
        """`value`, changed in place except for tensors and tuples."""
        if id(value) in self._others:
            self.met.add(id(value))
            return self._others[id(value)]
        if type(value) is tuple:
            return tuple(self.of(one) for one in value)
        if id(value) in self._seen:
            return value
        self._seen.add(id(value))
        if isinstance(value, list):
            value[:] = [self.of(one) for one in value]
        elif isinstance(value, dict):
            for key, one in list(value.items()):
                new = self.of(key)
                if new is not key:
                    del value[key]
                value[new] = self.of(one)
        elif isinstance(value, Optimizer):
            self.of(vars(value))
        return value
