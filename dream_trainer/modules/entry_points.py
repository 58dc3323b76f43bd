"""Calls that do not begin at a sharded model's `forward`, made to begin there.

`fully_shard` gathers a model's own parameters when its `forward` is called, and only then: `model.encode(x)` and
`model.embed(tokens)` would meet shards. Here they go in by the model's `__call__`, as `forward` does, and so with its
gathering, its casts and its gradient reduction. PyTorch's `register_fsdp_forward_method` does so for one method that is
named, by an attribute of the instance.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from inspect import isfunction
from typing import Any

import torch.nn as nn
from torch import Tensor

from dream_trainer.compat.pytorch import begin_root
from dream_trainer.modules.class_change import Changed, change_class, own_class

# Not ways to compute with a model, whatever they are given. They may run on one rank alone.
_NO_FORWARD = frozenset({"forward", "init_weights", "reset_parameters"})
_KEEPS_BOOKS = re.compile(r"(save|load|push|export|print|count|num|describe|register|state_dict)(_|$)")


class Entrance:
    """What a model and the parts that lie in its group share.

    Args:
        model: The model.
        check: Called before each call that begins here; raises where ranks may not communicate.

    Attributes:
        inside: Whether a call of the model is running.
        waiting: What that call must run instead of `forward`.
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


def forward_methods(module: nn.Module) -> list[str]:
    """Public methods of `module` that compute with its weights, as far as their names tell.

    Those that its author wrote, but for what saves, loads, counts or prints (`save_pretrained`, `num_parameters`).
    """
    passed_over = _NO_FORWARD | vars(nn.Module).keys()
    methods = {
        name
        for base in own_class(module).__mro__
        if not base.__module__.startswith("torch.")
        for name, value in vars(base).items()
        if isfunction(value) and not name.startswith("_") and not _KEEPS_BOOKS.match(name)
    }
    return sorted(methods - passed_over)


def enter_by_methods(model: nn.Module, names: Iterable[str], check: Callable[[], object]) -> None:
    """Makes methods of `model` ways into it, when they are given a tensor; before it is sharded.

    Args:
        model: Changed in place.
        names: Of the methods.
        check: Called before each call; raises where ranks may not communicate.
    """
    change_class(model, Entered, key=tuple(names), **_routed_methods(model, names))
    model._entrance = Entrance(model, check)  # type: ignore[assignment]


def enter_by_parts(model: nn.Module, methods: Callable[[nn.Module], Sequence[str]]) -> None:
    """Makes the parts of `model` that lie in its own group ways into it; once it is sharded and real.

    Args:
        model: Changed in place.
        methods: The names of the methods of a part that compute with its weights.
    """
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule) or not isinstance(model, Entered):
        return
    begin_root(model)
    for part in _in_the_same_group(model):
        if part is not model and next(part.parameters(recurse=False), None) is not None:
            names = tuple(methods(part))
            change_class(part, Part, key=names, **_routed_methods(part, names))
            part._entrance = model._entrance  # pyright: ignore[reportArgumentType]


def _in_the_same_group(module: nn.Module) -> list[nn.Module]:
    from torch.distributed.fsdp import FSDPModule

    children = [child for child in module.children() if not isinstance(child, FSDPModule)]
    return [module, *(part for child in children for part in _in_the_same_group(child))]


def _routed_methods(module: nn.Module, names: Iterable[str]) -> dict[str, Callable[..., Any]]:
    return {name: _by_call(getattr(type(module), name)) for name in names}


def _by_call(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = method.__get__(self)
        if _holds_tensor(args) or _holds_tensor(kwargs):
            return self._entrance.run(bound, *args, **kwargs)
        return bound(*args, **kwargs)

    return call


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensor, value))
    return isinstance(value, Tensor)
