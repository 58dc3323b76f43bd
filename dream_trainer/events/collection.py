"""BaseCallback and CallbackCollection: what config, trainer and checkpoints know of a run's callbacks. They know no
trainer: a callback's events, which are called with one, are in events/callback.py."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from dream_trainer.checks import refuse


class BaseCallback:
    """A callback without its events: its place among others, and its state."""

    order: int = 0
    main_process_only: ClassVar[bool] = False
    needs_whole_models: ClassVar[bool] = False
    sees_shards: ClassVar[bool] = False

    def state_dict(self) -> dict[str, Any]:
        """State to restore after a resume: numbers, strings, containers of them. Default: nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of `state_dict`."""

    def begin_branch(self, *, new_counters: bool, new_data: bool) -> None:
        """Called after `load_state_dict` if the run begins from another run's checkpoint: reset state of that run only.

        Default: nothing, so that all state is kept.

        Args:
            new_counters: Whether the run begins at step 0, so that counts of steps and best values should restart.
            new_data: Whether the data restart, for instance in the middle of an epoch.
        """

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Named tensors to keep in the checkpoint: DTensors, or plain and equal on all ranks. Default: none.

        They are written as they are and loaded in place, so they must exist from `post_setup` on. Loading them comes
        before `load_state_dict`, which is not called if a checkpoint lacks one of them.
        """
        return {}

    def validation_context(self, trainer: Any) -> AbstractContextManager[None]:
        """Wraps a whole validation, `evaluate` or `predict`, events included; its exit runs however that ends."""
        return nullcontext()

    def _hears(self, event: str) -> bool:
        """Whether the class overrides `event`."""
        return False

    def _log_name(self) -> str | None:
        """First part of the names of the metrics that it logs, if it logs any."""
        return None


class Timed:
    """What is due by rank 0's clock: a `TimedCallback`."""

    @abstractmethod
    def is_due_by_the_clock(self) -> bool:
        """Whether it is time; asked on rank 0, until the callback has acted."""


T = TypeVar("T")
C = TypeVar("C", bound=BaseCallback)


def numbered(objects: Iterable[T]) -> Iterator[tuple[str, T]]:
    """Each with its class and its number within that, `EMA.0`: adding or removing one shifts no other class's."""
    counts: Counter[str] = Counter()
    for each in objects:
        name = type(each).__name__
        yield f"{name}.{counts[name]}", each
        counts[name] += 1


class CallbackCollection:
    """The callbacks of a run, in order. Several of one class are fine; if they log, they need different names.

    Args:
        callbacks: The callbacks.
        defaults: Callbacks that also run, by default, and keep no state: checkpoints, the record of the config,
            `len` and iteration leave it out. Default: the trainer's, `[SanityChecks()]`; `[]` for nothing.

    Raises:
        ConfigError: Two of them would log under one name, or one that logs has none.
        TypeError: Something in it is not a Callback.
    """

    def __init__(self, callbacks: Iterable[BaseCallback] = (), defaults: Iterable[BaseCallback] | None = None) -> None:
        self._callbacks = list(callbacks)
        self._has_defaults = defaults is not None
        self._defaults = list(defaults or ())
        for callback in (*self._callbacks, *self._defaults):
            if not isinstance(callback, BaseCallback):
                raise TypeError(f"{callback!r} is not a Callback: build it, as in [Progress()].")
        named: dict[str, str] = {}
        for callback in self._callbacks:
            kind, name = type(callback).__name__, callback._log_name()
            if name is not None:
                refuse(not name, f"{kind} has no name. Call super().__init__(name) in its __init__.")
                refuse(
                    name in named,
                    f"{named.get(name)} and {kind} would both log under name={name!r}, and their values would mix. "
                    f"Give one of them another name: {kind}(name='{name}_2').",
                )
                named[name] = kind

    def __iter__(self) -> Iterator[BaseCallback]:
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

    def use_defaults(self, callbacks: Iterable[BaseCallback]) -> None:
        """Takes the default callbacks of a trainer that is being built, unless it has some."""
        if not self._has_defaults:
            self._defaults = [*callbacks, *self._defaults]
            self._has_defaults = True

    def add_default(self, callback: BaseCallback) -> None:
        """Adds to the default callbacks, for a trainer that is being built."""
        self._defaults.append(callback)

    def in_order(self) -> list[BaseCallback]:
        """All of them by `order`, then position."""
        return sorted((*self._callbacks, *self._defaults), key=lambda callback: callback.order)
