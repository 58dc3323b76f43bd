"""Which classes of a user's trainer define a name, and which of these definitions are called.

Every definition of an event that is mixed in is heard once; a hook that nothing would call is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from dream_trainer.config.parameter_class import is_ours as is_ours


def definers(cls: type, name: str) -> list[type]:
    """The classes that define `name`, in Python's lookup order."""
    return [part for part in cls.__mro__ if name in vars(part)]


def heard(cls: type, event: str) -> list[type]:
    """The user's classes whose `event` is to be called; not those that one before them reaches by `super()`."""
    heard_classes = []
    is_reached = False
    mixed = _mixed(cls, event)
    for part in (part for part in definers(cls, event) if is_ours(part) or part in mixed):
        if is_ours(part):  # the documented no-op, which calls no other
            is_reached = False
            continue
        if not is_reached:
            heard_classes.append(part)
        is_reached = hands_on(part, event)
    return heard_classes


def _mixed(cls: type, event: str) -> set[type]:
    """The user's classes that define `event`, except those that a class with a single base overrides."""
    if is_ours(cls):
        return set()
    mixed_in = {cls} if event in vars(cls) else set()
    if mixed_in and len(cls.__bases__) == 1 and not hands_on(cls, event):
        return mixed_in
    return mixed_in.union(*(_mixed(base, event) for base in cls.__bases__))


def bound(instance: object, name: str, part: type) -> Callable[..., Any]:
    """The definition of `name` in `part`, a class of `instance`, as a method of `instance`."""
    order = type(instance).__mro__
    index = order.index(part)
    # super() continues after the class that it is given, so it gets the one before.
    owner: Any = instance if index == 0 else super(order[index - 1], instance)
    method: Callable[..., Any] = getattr(owner, name)
    return method


def hands_on(part: type, name: str) -> bool:
    """Whether the definition of `name` in `part` calls the next one: `super().name(...)` or `Base.name(self, ...)`."""
    function = written(vars(part)[name])
    return isinstance(function, FunctionType) and name in names_in(function.__code__)


def written(value: Any) -> Any:
    """The function that an attribute of a class was written as, without decorators that keep it."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    return inspect.unwrap(value)


def names_in(code: CodeType) -> set[str]:
    """All names of attributes and globals that `code` uses, its inner functions included."""
    return {*code.co_names}.union(*(names_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)))
