"""Calls that do not begin at a sharded model's `forward`, made to begin there.

`fully_shard` gathers a model's own parameters when its `forward` is called, and only then: `model.encode(x)` and
`model.embed(tokens)` would meet shards. Here they go in by the model's `__call__`, as `forward` does, and so with its
gathering, its casts and its gradient reduction. PyTorch's `register_fsdp_forward_method` does so for one method that is
named, by an attribute of the instance.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import isfunction
from typing import Any

import torch.nn as nn
from torch import Tensor

from dream_trainer.distributed.class_change import Changed, change_class, own_class
from dream_trainer.distributed.torch_compat import begin_root

# Not ways to compute with a model, whatever they are given.
_NO_FORWARD = frozenset({"forward", "init_weights", "reset_parameters"})


class Entrance:
    """What a model and the parts that lie in its group share.

    Args:
        model: The model.
        check: Called before each call that begins here; raises where ranks may not communicate.

    Attributes:
        inside: Whether a call of the model is running.
        waiting: What that call is to run in the place of `forward`.
    """

    def __init__(self, model: nn.Module, check: Callable[[], object]) -> None:
        self._model = weakref.ref(model)
        self._check = check
        self.inside = False
        self.waiting: Callable[..., Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Entrance:
        raise TypeError("a sharded model cannot be copied. Copy its parameters, as the EMA callback does.")

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs `call` within a call of the model."""
        model = self._model()
        if self.inside or model is None:
            return call(*args, **kwargs)
        self._check()
        self.waiting = call
        try:
            return model(*args, **kwargs)
        finally:
            self.waiting = None


class Entered(Changed):
    """A model whose public methods are calls of it."""

    _entrance: Entrance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A call within a call would end with the gradient reduction of the first one still to come: the parameters
        # are let go in the middle of its backward.
        if self._entrance.inside:
            return self.forward(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, or the method that was called."""
        entrance = self._entrance
        call, entrance.waiting = entrance.waiting, None
        outside, entrance.inside = not entrance.inside, True
        try:
            return super().forward(*args, **kwargs) if call is None else call(*args, **kwargs)
        finally:
            entrance.inside = not outside


class Part(Changed):
    """A module whose parameters lie in the group of the model around it."""

    _entrance: Entrance

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, within a call of the model."""
        return self._entrance.run(super().forward, *args, **kwargs)


def enter_by_methods(model: nn.Module, check: Callable[[], object]) -> None:
    """Makes the public methods of `model` ways into it; before it is sharded.

    Those that its author wrote, when they are given a tensor: `encode(x)` computes, `count_parameters()` does not, and
    may be called on one rank alone.

    Args:
        model: Changed in place.
        check: Called before each call; raises where ranks may not communicate.
    """
    change_class(model, Entered, **_routed_methods(model))
    model._entrance = Entrance(model, check)  # type: ignore[assignment]


def enter_by_parts(model: nn.Module) -> None:
    """Makes the parts of `model` that lie in its own group ways into it; once it is sharded and real."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule) or not isinstance(model, Entered):
        return
    begin_root(model)
    for part in _in_the_same_group(model):
        if part is not model and next(part.parameters(recurse=False), None) is not None:
            change_class(part, Part, **_routed_methods(part))
            part._entrance = model._entrance


def _in_the_same_group(module: nn.Module) -> list[nn.Module]:
    from torch.distributed.fsdp import FSDPModule

    children = [child for child in module.children() if not isinstance(child, FSDPModule)]
    return [module, *(part for child in children for part in _in_the_same_group(child))]


def _routed_methods(module: nn.Module) -> dict[str, Callable[..., Any]]:
    return {name: _by_call(getattr(type(module), name)) for name in _written(own_class(module))}


def _written(cls: type[nn.Module]) -> list[str]:
    """Public methods of a module class and its bases, up to PyTorch's own classes."""
    passed_over = _NO_FORWARD | vars(nn.Module).keys()
    own = {
        name
        for base in cls.__mro__
        if not base.__module__.startswith("torch.")
        for name, value in vars(base).items()
        if isfunction(value) and not name.startswith("_")
    }
    return sorted(own - passed_over)


def _by_call(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = method.__get__(self)
        if _holds_tensor(args) or _holds_tensor(kwargs):
            return self._entrance.run(own, *args, **kwargs)
        return own(*args, **kwargs)

    return call


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensor, value))
    return isinstance(value, Tensor)
