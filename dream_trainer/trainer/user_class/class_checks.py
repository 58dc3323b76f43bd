"""Checks of a trainer's class, config and callbacks in its constructor."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache, partial
from itertools import pairwise
from types import FunctionType
from typing import Any

from dream_trainer.checks import all_of
from dream_trainer.config.combinations import refuse_combinations, settings_of
from dream_trainer.config.trainer_config import check_config
from dream_trainer.errors import ConfigError, HookError
from dream_trainer.events.collection import BaseCallback
from dream_trainer.parallel.axes import AXES
from dream_trainer.parallel.axis import Parallelism
from dream_trainer.trainer.hooks import EVENTS, Hooks
from dream_trainer.trainer.mixin_hooks import MixinHooks
from dream_trainer.trainer.runtime import Runtime
from dream_trainer.trainer.user_class.overrides import definers, hands_on, heard, is_ours, names_in, written


def check_trainer(cls: type[MixinHooks], config: Any) -> None:
    """Checks that `cls` has the hooks its parts require, each with its arguments, and `config` the fields they read."""
    check_config(config)
    all_of([partial(_check_config_classes, cls, config), partial(refuse_combinations, settings_of(config))])
    refuse_taken_names(cls)
    for kind, names in _hooks(cls, config.callbacks).items():
        _refuse_uncalled(kind, names)
    _check_hooks(cls)
    _refuse_hooks_of_missing_mixins(cls)
    _refuse_lost_state(cls)
    _check_signatures(cls, config.callbacks)


def _parts(cls: type) -> list[type]:
    return [part for part in cls.__mro__ if issubclass(part, Hooks)]


def _check_config_classes(cls: type, config: Any) -> None:
    for part in _parts(cls):
        needed = vars(part).get("_config_class")
        if needed is not None and not isinstance(config, needed):
            own = type(config)
            bases = [own] if is_ours(own) else [base for base in own.__bases__ if not issubclass(needed, base)]
            names = ", ".join(base.__name__ for base in [*bases, needed])
            write = f"Write `class {own.__name__}({names})`"
            if is_ours(own):
                write = f"Write one, `@dataclass class Config({names})`, and build the trainer with it"
            raise ConfigError(
                f"{part.__name__} needs {needed.__name__}, which {own.__name__} does not inherit. {write}."
            )


def _check_hooks(cls: type) -> None:
    for part in _parts(cls):
        for hook, purpose in vars(part).get("_required_hooks", {}).items():
            if getattr(cls, hook) is getattr(Hooks, hook):
                own = [name for owner in cls.__mro__ if not is_ours(owner) for name in vars(owner)]
                meant = [name for name in get_close_matches(hook, own, n=1, cutoff=0.85) if name not in vars(Hooks)]
                instead = f" It defines {meant[0]}: rename that." if meant else ""
                raise HookError(
                    f"{cls.__name__} does not override {hook}, which {part.__name__} requires: {purpose}{instead}"
                )


def _hooks(cls: type[MixinHooks], callbacks: Iterable[BaseCallback]) -> dict[type, set[str]]:
    """The overridable names of the user's trainer and of each callback class."""
    of_axes = {hook for axis in parallelisms_of(cls) for hook in (axis.hook, *axis.other_hooks)}
    hooks: dict[type, set[str]] = {cls: {*vars(Hooks), "predict_step", "configure_loggers", *of_axes}}
    return hooks | {type(callback): {*vars(BaseCallback), *EVENTS} for callback in callbacks}


def _refuse_uncalled(cls: type, names: set[str]) -> None:
    """Raises HookError if a user's definition comes after ours in the MRO, so that nothing calls it."""
    events = set(EVENTS) if issubclass(cls, Hooks) else set()
    for name in sorted(names - events):
        owners = definers(cls, name)
        ours = next((index for index, part in enumerate(owners) if is_ours(part)), None)
        if name.startswith("_") or ours is None or (ours > 0 and not hands_on(owners[ours - 1], name)):
            continue
        for part in owners[ours:]:
            if not is_ours(part):
                raise HookError(
                    f"{part.__name__}.{name} is never called: the framework's own {name} stands before it. Write "
                    f"`class {cls.__name__}({_order(cls, part)})`."
                )


def _order(cls: type, part: type) -> str:
    """The bases of `cls` with the one that brings `part` in first."""
    first = [base for base in cls.__bases__ if issubclass(base, part)]
    return ", ".join(base.__name__ for base in [*first, *(b for b in cls.__bases__ if b not in first)])


_STATE_HOOKS = ("state_dict", "load_state_dict", "rank_state_dict", "load_rank_state_dict")


def _refuse_lost_state(cls: type) -> None:
    """Raises HookError if two classes have state to save and only one would be asked for it."""
    for name in _STATE_HOOKS:
        owners = [part for part in definers(cls, name) if not is_ours(part)]
        for part, lost in pairwise(owners):
            if not hands_on(part, name):
                raise HookError(
                    f"{part.__name__}.{name} and {lost.__name__}.{name} are both defined, and only the first is "
                    f"called: the other's state would be lost. Call super().{name}({_ARGUMENTS.get(name, '')}) in "
                    f"{part.__name__}.{name}."
                )


_ARGUMENTS = {"load_state_dict": "state", "load_rank_state_dict": "state"}


def _check_signatures(cls: type[MixinHooks], callbacks: Iterable[BaseCallback]) -> None:
    for kind, names in _hooks(cls, callbacks).items():
        if issubclass(kind, Hooks):
            names = names | {name for part in kind.__mro__ if is_ours(part) for name in vars(part)}
        for name in sorted(names):
            if not name.startswith("_"):
                _check_signature(kind, name)


def _check_signature(cls: type, name: str) -> None:
    """Raises HookError if the method `name` of `cls` cannot take the arguments of the one it overrides."""
    owners = definers(cls, name)
    ours = [part for part in owners if is_ours(part)]
    if not ours:
        return
    called = heard(cls, name) if name in EVENTS else [owners[0]]
    for part in called:
        if not is_ours(part):
            _check_arguments(part, name, vars(ours[-1])[name])


def _check_arguments(part: type, name: str, declared: Any) -> None:
    written = inspect.unwrap(vars(part)[name], stop=_may_change_arguments)
    if not isinstance(written, FunctionType) or not isinstance(declared, FunctionType):
        return
    expected, actual = inspect.signature(declared).parameters, inspect.signature(written, follow_wrapped=False)
    by_name = [key for key, parameter in expected.items() if parameter.kind is parameter.KEYWORD_ONLY]
    by_place = [key for key, parameter in expected.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    try:
        actual.bind(*by_place, **dict.fromkeys(by_name))
    except TypeError as error:
        arguments = ", ".join([*by_place[1:], *by_name])
        raise HookError(
            f"{part.__name__}.{name}{_bare(actual)} cannot be called with ({arguments}), as it will be: "
            f"{error}. Write `def {name}{_bare(inspect.signature(declared))}`."
        ) from None


def _bare(signature: inspect.Signature) -> inspect.Signature:
    """`signature` without types."""
    return inspect.Signature([one.replace(annotation=one.empty) for one in signature.parameters.values()])


def _may_change_arguments(decorated: Any) -> bool:
    """Whether a decorator is the user's and may change arguments; PyTorch's and contextlib's pass all of them."""
    if not isinstance(decorated, FunctionType):
        return True
    return decorated.__globals__["__name__"].split(".")[0] not in ("torch", "contextlib")


def parallelisms_of(cls: type) -> list[Parallelism]:
    """Those that the mixins of `cls` bring."""
    return [brought for part in _parts(cls) if (brought := vars(part).get("_parallelism")) is not None]


def _refuse_hooks_of_missing_mixins(cls: type) -> None:
    brought = parallelisms_of(cls)
    for axis in AXES:
        for hook in (axis.hook, *axis.other_hooks):
            if axis not in brought and definers(cls, hook):
                raise HookError(
                    f"{cls.__name__} overrides {hook}, which only {axis.mixin} calls. Add it to the trainer's bases."
                )


_SETUP_HOOKS = (
    "configure_models",
    "init_weights",
    "load_pretrained",
    "configure_optimizers",
    "configure_schedulers",
    "configure_metrics",
)


def uncalled_hooks(cls: type[MixinHooks]) -> list[str]:
    """Hooks that `cls` overrides and nothing in it calls."""
    if cls._keeps_ranks_equal:
        return []
    return [hook for hook in _SETUP_HOOKS if getattr(cls, hook) is not getattr(Hooks, hook)]


_CALLED_BY = {"predict_step": "EvalMixin", "configure_loggers": "LoggerMixin"}


def uncalled_methods(runtime: Runtime) -> list[str]:
    """Warnings of public methods that look like a hook or an event and that nothing calls."""
    kinds = _hooks(type(runtime.hooks), runtime.config.callbacks)
    parts = [(cls, part, is_ours(part)) for cls in kinds for part in cls.__mro__]
    called = {name for _, part, is_ours in parts if is_ours for name in vars(part)}
    users_functions = [
        (cls, name, function)
        for cls, part, is_ours in parts
        for name, value in vars(part).items()
        if not is_ours and isinstance(function := inspect.unwrap(value), FunctionType)
    ]
    called |= {used for _, name, function in users_functions for used in names_in(function.__code__) - {name}}
    return [
        f"nothing calls {cls.__name__}.{name}: only {_CALLED_BY[name]} does. Add it to the trainer."
        if name in _CALLED_BY
        else f"nothing calls {cls.__name__}.{name}, which is not a hook; the nearest hook is {nearest}. Rename it: to "
        f"{nearest}, or to my_{name} if your code outside the class calls it."
        for cls, name, _ in users_functions
        if not name.startswith("_") and name not in called and (nearest := _nearest(name, kinds[cls]))
    ]


def _nearest(name: str, hooks: set[str]) -> str | None:
    """The hook that `name`, maybe Lightning's, stands for; None if it looks like none."""
    spelled = re.sub(r"^on_(.+)_start$", r"pre_\1", re.sub(r"^on_(.+)_end$", r"post_\1", name))
    if spelled != name:
        spelled = spelled.replace("validation", "val").replace("train_epoch", "epoch")
    looks_like_one = re.match(r"(pre|post|on|configure)_", name)
    return next(iter(get_close_matches(spelled, sorted(hooks), n=1, cutoff=0.0 if looks_like_one else 0.85)), None)


# Attributes that a mixin of another library declares.
_DECLARATIONS = frozenset(
    "_required_hooks _config_class _keeps_ranks_equal _shards_parameters _names_validation_loaders _parallelism".split()
)
# Hooks that a user may assign, say `self.training_step = torch.compile(self.training_step)`.
_STEPS = frozenset({"training_step", "validation_step", "predict_step", "move_batch", "batch_size"})
# Public methods that the framework itself calls for what they do: an override calls `super()`.
_CALLED_BY_US = frozenset(
    {"warn_once", "changing_weights", "callback_is_due", "settle", "close", "request_stop", "request_save"}
)


# -- Names that a user's trainer and the framework may not both use: one would silently replace the other.
#
# Methods are compared when the trainer is built, attributes when they are assigned.


def refuse_taken_names(cls: type) -> None:
    for part in cls.__mro__:
        if not is_ours(part) and part is not object:
            for name, value in vars(part).items():
                if name in _ATTRIBUTES:
                    raise _taken(f"{part.__name__}.{name}", name, names_of_ours(cls)[name])
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
                f"{part.__name__}.{name} is None, and the framework calls it. Leave it out: without an override the "
                "default runs."
            )
        if not is_method or (name in _CALLED_BY_US and not hands_on(part, name)):
            raise _taken(f"{part.__name__}.{name}", name, ours[-1])
        return
    if name not in vars(MixinHooks) or not isinstance(written(value), FunctionType):
        raise _taken(f"{part.__name__}.{name}", name, ours[-1])
    if not hands_on(part, name):
        raise HookError(
            f"{part.__name__}.{name} does not call super().{name}(...), so that the mixins behind it would not be "
            "asked. Call it, and return its result together with yours (docs/extend.md). If it is no mixin's "
            "hook, give it another name."
        )


def check_assignment(trainer: MixinHooks, name: str, value: Any) -> None:
    """Raises HookError if `trainer.name = value` would replace something of the framework's."""
    cls: Any = type(trainer)
    owner = names_of_ours(cls).get(name)
    if owner is None or name in _FOLLOWED or (name in _STEPS and callable(value)):
        return
    if name != "config" or vars(trainer).get(name, value) is not value:
        raise _taken(f"self.{name} of {type(trainer).__name__}", name, owner)


@cache
def names_of_ours(cls: Any) -> dict[str, type]:
    """The framework's definitions in the classes of `cls`, except names that Python mangles (`__name`)."""
    parts = [part for part in reversed(cls.__mro__) if is_ours(part)]
    names: dict[str, type] = {
        name: part for part in parts for name in vars(part) if not name.startswith(("__", f"_{part.__name__}__"))
    }
    names.update(dict.fromkeys(_ATTRIBUTES, names["world"]))
    return names


def _taken(theirs: str, name: str, ours: type) -> HookError:
    advice = _ADVICE.get(name, "Give it another name.")
    return HookError(
        f"{theirs} has a name that the framework uses: {name} of {ours.__name__} ({ours.__module__}). {advice}"
    )


# The framework's own attributes of a trainer.
_ATTRIBUTES = ("config", "_runtime")
# Assigned by users and followed: new data for the next epoch.
_FOLLOWED = frozenset({"train_dataloader"})

_ADVICE = {
    "batch_size": "It is a hook that counts the samples of a batch; a loader's size is self.micro_batch_size. "
    "Give yours another name.",
    "train_dataloader": "Return the loaders from configure_dataloaders(): (train, val).",
    "val_dataloaders": "Return the loaders from configure_dataloaders(): (train, val).",
    "config": "A trainer keeps the config it was built with. Build a new trainer: dataclasses.replace(config, ...).",
    "training": "It tells whether the trainer trains or validates; modules are switched by their own train() and "
    "eval(). Give yours another name.",
    "total_steps": "It is planned from the config's limits and the data. Set n_epochs or max_steps.",
}
