"""CallbackCollection: the callbacks of a run, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from dream_trainer.checks import refuse
from dream_trainer.errors import ConfigError
from dream_trainer.events.callback import Callback, LoggingCallback
from dream_trainer.events.sanity_checks import SanityChecks

C = TypeVar("C", bound=Callback)


class CallbackCollection:
    """The callbacks of a run, in order. Several of one class are fine; if they log, they need different names.

    Args:
        callbacks: The callbacks.
        defaults: Callbacks that also run, by default, and keep no state: checkpoints, the record of the config,
            `len` and iteration leave it out. Default: `[SanityChecks()]`; `[]` for nothing.

    Raises:
        ConfigError: Two of them would log under one name, one that logs has none, or an `order` is not an integer.
        TypeError: Something in it is not a Callback, or it is a callback instead of a list.
    """

    def __init__(self, callbacks: Iterable[Callback] = (), defaults: Iterable[Callback] | None = None) -> None:
        for given in (callbacks, defaults):
            if isinstance(given, Callback):
                raise TypeError(f"CallbackCollection got {given!r}. Use a list: callbacks=[...].")
        members: list[Any] = [callbacks] if isinstance(callbacks, type) else list(callbacks)
        self._callbacks: list[Callback] = members
        self._defaults: list[Callback] = [SanityChecks()] if defaults is None else list(defaults)
        for callback in (*members, *self._defaults):
            if isinstance(callback, type) and issubclass(callback, Callback):
                name = callback.__name__
                raise TypeError(f"{name} is a class, not a callback. Write {name}() in the list.")
            if not isinstance(callback, Callback):
                raise TypeError(f"{callback!r} is not a Callback. Derive its class from dream_trainer.Callback.")
            if not isinstance(callback.order, int):
                raise ConfigError(
                    f"{type(callback).__name__}.order={callback.order!r} is not an integer. Use one such as 10; "
                    "lower runs earlier."
                )
        _refuse_one_name(self._callbacks)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def __len__(self) -> int:
        return len(self._callbacks)

    def __repr__(self) -> str:
        return f"CallbackCollection({self._callbacks!r})"

    def get(self, cls: type[C]) -> C:
        """The first callback of class `cls`; raises KeyError if there is none."""
        for callback in (*self._callbacks, *self._defaults):
            if isinstance(callback, cls):
                return callback
        names = ", ".join(type(callback).__name__ for callback in self._callbacks) or "none"
        raise KeyError(f"no {cls.__name__} among the callbacks ({names}).")

    def add_default(self, callback: Callback) -> None:
        """Adds the default callbacks, for a trainer that is being built."""
        self._defaults.append(callback)

    def in_order(self) -> list[Callback]:
        """All of them by `order`, then position."""
        return sorted((*self._callbacks, *self._defaults), key=lambda callback: callback.order)


def _refuse_one_name(callbacks: Iterable[Callback]) -> None:
    named: dict[str, str] = {}
    for callback in callbacks:
        if isinstance(callback, LoggingCallback):
            kind, name = type(callback).__name__, callback.name
            refuse(not name, f"{kind} has no name. Call super().__init__(name) in its __init__.")
            if name in named:
                raise ConfigError(
                    f"{named[name]} and {kind} would both log under name={name!r}, and their values would mix. "
                    f"Give one of them another name: {kind}(name='{name}_2')."
                )
            named[name] = kind
