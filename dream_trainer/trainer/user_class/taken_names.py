"""Names that a user's trainer and the framework may not both use: one would replace the other without a word.

Of methods that is seen when the trainer is built. Attributes are seen when they are assigned: what the framework's own
code assigns is the framework's from then on, and what anybody else assigned first is not taken away from them.
"""

from __future__ import annotations

import sys
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any

from dream_trainer.errors import HookError
from dream_trainer.trainer.cooperation import Cooperation
from dream_trainer.trainer.user_class.overrides import definers, hands_on, is_ours, written

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer

# Attributes that a mixin of another library declares.
_DECLARATIONS = frozenset(
    {"_required_hooks", "_config_class", "_keeps_ranks_equal", "_shards_parameters", "_names_validation_loaders"}
)
# Hooks that a user may assign, say `self.training_step = torch.compile(self.training_step)`.
_STEPS = frozenset({"training_step", "validation_step", "predict_step", "move_batch", "batch_size"})
_OURS = "_names_of_ours"
# Public methods that the framework itself calls for what they do: an override calls `super()`.
_CALLED_BY_US = frozenset(
    {"warn_once", "changing_weights", "callback_is_due", "settle", "close", "request_stop", "request_save"}
)


def refuse_taken_names(cls: type) -> None:
    """Checks what the user's classes among the bases of `cls` define.

    Raises:
        HookError: It would replace something of ours that is not made to be overridden; the message names both places.
    """
    for part in cls.__mro__:
        if not is_ours(part) and part is not object:
            for name, value in vars(part).items():
                _refuse_if_taken(cls, part, name, value)


def _refuse_if_taken(cls: type, part: type, name: str, value: Any) -> None:
    ours = [owner for owner in definers(cls, name) if is_ours(owner)]
    is_special = name.startswith("__") and name.endswith("__")
    if not ours or is_special or name in _DECLARATIONS:
        return
    if not name.startswith("_"):
        is_method = callable(written(value)) and callable(vars(ours[-1])[name])
        if value is None and callable(vars(ours[-1])[name]):
            raise HookError(
                f"{part.__name__}.{name} is None, and the framework calls it. Leave it out: what is not overridden "
                "does what its default does."
            )
        if not is_method or (name in _CALLED_BY_US and not hands_on(part, name)):
            raise _taken(f"{part.__name__}.{name}", name, ours[-1])
        return
    if name not in vars(Cooperation) or not isinstance(written(value), FunctionType):
        raise _taken(f"{part.__name__}.{name}", name, ours[-1])
    if not hands_on(part, name):
        raise HookError(
            f"{part.__name__}.{name} does not call super().{name}(...), so that the mixins behind it would not be "
            "asked. Call it, and hand on what it returns together with yours (docs/extend.md). If it is no mixin's "
            "hook, give it another name."
        )


def note_assignment(trainer: AbstractTrainer, name: str, value: Any) -> None:
    """Checks an assignment to an attribute of `trainer`; called by its `__setattr__`.

    Raises:
        HookError: The name is the framework's and somebody else assigns it, or the other way about.
    """
    attributes = vars(trainer)
    owner_of_name: dict[str, str] = attributes.setdefault(_OURS, {_OURS: __name__})
    frame = sys._getframe(2)
    place = frame.f_globals.get("__name__", "")
    if place.startswith("dream_trainer."):
        if name not in owner_of_name:
            owner_of_name[name] = place
            _refuse_users(trainer, name, value)
    elif name in owner_of_name:
        if attributes[name] is not value and name not in _FOLLOWED:
            raise _taken(f"self.{name}, assigned in {_line(frame)},", name, owner_of_name[name])
    else:
        owners = [part for part in definers(type(trainer), name) if is_ours(part)]
        if owners and not (name in _STEPS and callable(value)):
            raise _taken(f"self.{name}, assigned in {_line(frame)},", name, owners[-1])


def _refuse_users(trainer: AbstractTrainer, name: str, value: Any) -> None:
    """The framework assigns `name` for the first time: the user's class must not have it."""
    attributes = vars(trainer)
    if name in attributes and attributes[name] is not value:
        raise _taken(f"self.{name} of {type(trainer).__name__}", name, vars(trainer)[_OURS][name])
    for part in definers(type(trainer), name):
        if not is_ours(part):
            raise _taken(f"{part.__name__}.{name}", name, vars(trainer)[_OURS][name])


def _taken(theirs: str, name: str, ours: type | str) -> HookError:
    place = ours if isinstance(ours, str) else f"{ours.__name__} ({ours.__module__})"
    advice = _ADVICE.get(name, "Give it another name.")
    return HookError(f"{theirs} has a name that the framework uses: {name} of {place}. {advice}")


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


# Assigned by users and followed: new data for the next epoch.
_FOLLOWED = frozenset({"train_dataloader"})

_ADVICE = {
    "batch_size": "It is a hook that counts the samples of a batch; a loader's size is "
    "config.training_parameters.train_batch_size, or the loader's own. Give yours another name.",
    "train_dataloader": "Return the loaders from configure_dataloaders(): (train, val).",
    "val_dataloaders": "Return the loaders from configure_dataloaders(): (train, val).",
    "config": "A trainer keeps the config it was built with. Build a new trainer: dataclasses.replace(config, ...).",
    "training": "It tells whether the trainer trains or validates; modules are switched by their own train() and "
    "eval(). Give yours another name.",
    "total_steps": "It is planned from the config's limits and the data. Set n_epochs or max_steps.",
}
