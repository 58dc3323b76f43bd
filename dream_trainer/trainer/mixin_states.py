"""The states of a trainer's mixins, to which each adds its own: `super()._mixin_state() | {"its key": state}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dream_trainer.errors import HookError
from dream_trainer.trainer.user_class.overrides import bound, definers

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer


class _TakenKeyError(HookError):
    """Two mixins keep their state under the key that is its argument."""


class MixinStates(dict[str, Any]):
    """A dict to which `|` adds only keys that are not there yet."""

    def __or__(self, other: Mapping[str, Any]) -> MixinStates:  # type: ignore[override]
        for key in self.keys() & other.keys():
            raise _TakenKeyError(key)
        return MixinStates({**self, **other})


def mixin_states(trainer: AbstractTrainer) -> dict[str, Any]:
    """What `_mixin_state` gives; a collective, since loggers communicate there.

    Raises:
        HookError: Two mixins have one key, so that one's state would replace the other's; the message names both.
    """
    try:
        return dict(trainer._mixin_state())
    except _TakenKeyError as error:
        key = error.args[0]
    owner = ""
    # From the last one on, each with those behind it.
    for part in reversed(definers(type(trainer), "_mixin_state")):
        try:
            if key in bound(trainer, "_mixin_state", part)():
                owner = owner or part.__name__
        except _TakenKeyError:
            raise HookError(
                f"{part.__name__} and {owner} both keep their state under the key {key!r} of _mixin_state: one would "
                "replace the other. Give one of them another key."
            ) from None
    return {}
