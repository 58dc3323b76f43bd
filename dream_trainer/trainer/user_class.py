"""Which definitions in a user's trainer class are called, and checks of it, its config and its callbacks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any

from dream_trainer.checks import all_of
from dream_trainer.config.combinations import refuse_combinations, settings_of
from dream_trainer.config.parameter_class import is_ours as is_ours
from dream_trainer.config.trainer_config import check_config
from dream_trainer.errors import ConfigError, HookError
from dream_trainer.events.collection import BaseCallback
from dream_trainer.parallel.axis import AXES, Parallelism
from dream_trainer.trainer.hooks import EVENTS, Hooks, MixinHooks


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
    method: Callable[..., Any] = getattr(instance if index == 0 else super(order[index - 1], instance), name)
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


# -- checks in the constructor


def check_trainer(cls: type[MixinHooks], config: Any) -> None:
    """Checks that `cls` has the hooks its parts require, each with its arguments, and `config` the fields they read."""
    check_config(config)
    all_of([partial(_check_config_classes, cls, config), partial(refuse_combinations, settings_of(config))])
    refuse_taken_names(cls)
    brought = parallelisms_of(cls)
    of_axes = {hook for axis in brought for hook in (axis.hook, *axis.other_hooks)}
    hooks: dict[type, set[str]] = {cls: {*vars(Hooks), "predict_step", "configure_loggers", *of_axes}}
    hooks |= {type(callback): {*vars(BaseCallback), *EVENTS} for callback in config.callbacks}
    for kind, names in hooks.items():
        _refuse_uncalled(kind, names)
        _check_signatures(kind, names)
    for part in _parts(cls):
        for hook, purpose in vars(part).get("_required_hooks", {}).items():
            if getattr(cls, hook) is getattr(Hooks, hook):
                raise HookError(f"{cls.__name__} does not override {hook}, which {part.__name__} requires: {purpose}")
    for axis in AXES:
        for hook in (axis.hook, *axis.other_hooks):
            if axis not in brought and definers(cls, hook):
                raise HookError(
                    f"{cls.__name__} overrides {hook}, which only {axis.mixin} calls. Add it to the trainer's bases."
                )
    _refuse_lost_state(cls)


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


def _refuse_uncalled(cls: type, names: set[str]) -> None:
    for name in sorted(names.difference(EVENTS if issubclass(cls, Hooks) else ())):
        owners = definers(cls, name)
        ours = next((index for index, part in enumerate(owners) if is_ours(part)), None)
        if name.startswith("_") or ours is None or (ours > 0 and not hands_on(owners[ours - 1], name)):
            continue
        for part in owners[ours:]:
            if not is_ours(part):
                bases = sorted(cls.__bases__, key=lambda base: not issubclass(base, part))
                raise HookError(
                    f"{part.__name__}.{name} is never called: the framework's own {name} stands before it. Write "
                    f"`class {cls.__name__}({', '.join(base.__name__ for base in bases)})`."
                )


def _refuse_lost_state(cls: type) -> None:
    for name in ("state_dict", "load_state_dict", "rank_state_dict", "load_rank_state_dict"):
        for part, lost in pairwise(part for part in definers(cls, name) if not is_ours(part)):
            if not hands_on(part, name):
                raise HookError(
                    f"{part.__name__}.{name} and {lost.__name__}.{name} are both defined, and only the first is "
                    f"called: the other's state would be lost. Call super().{name}() in {part.__name__}.{name}."
                )


def _check_signatures(kind: type, names: set[str]) -> None:
    if issubclass(kind, Hooks):
        names = names | {name for part in kind.__mro__ if is_ours(part) for name in vars(part)}
    for name in sorted(name for name in names if not name.startswith("_")):
        owners = definers(kind, name)
        declared = [vars(part)[name] for part in owners if is_ours(part)]
        for part in heard(kind, name) if name in EVENTS else owners[:1]:
            if declared and not is_ours(part):
                _check_arguments(part, name, declared[-1])


def _check_arguments(part: type, name: str, declared: Any) -> None:
    function = vars(part)[name]
    if not isinstance(function, FunctionType) or not isinstance(declared, FunctionType):
        return
    # A decorator may change the arguments.
    expected, actual = inspect.signature(declared).parameters, inspect.signature(function, follow_wrapped=False)
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


def parallelisms_of(cls: type) -> list[Parallelism]:
    return [brought for part in _parts(cls) if (brought := vars(part).get("_parallelism")) is not None]


_OF_SETUP = (
    "configure_models init_weights load_pretrained configure_optimizers configure_schedulers configure_metrics".split()
)
_CALLED_BY = dict.fromkeys(_OF_SETUP, "SetupMixin") | {"predict_step": "EvalMixin", "configure_loggers": "LoggerMixin"}


def uncalled_hooks(cls: type[MixinHooks]) -> list[tuple[str, str]]:
    """Hooks that `cls` overrides and nothing in it calls, each with the mixin that would."""
    names = {part.__name__ for part in cls.__mro__}
    return [
        (hook, mixin)
        for hook, mixin in _CALLED_BY.items()
        if mixin not in names and not all(map(is_ours, definers(cls, hook)))
    ]


# Attributes that a mixin of another library declares.
_DECLARATIONS = {name for name in MixinHooks.__annotations__ if name.startswith("_") and name in vars(MixinHooks)}
# Hooks that a user may assign, say `self.training_step = torch.compile(self.training_step)`.
_STEPS = frozenset({"training_step", "validation_step", "predict_step", "move_batch", "batch_size"})
# Public methods that the framework itself calls for what they do: an override calls `super()`.
_CALLED_BY_US = frozenset(
    {"warn_once", "changing_weights", "callback_is_due", "settle", "close", "request_stop", "request_save"}
)


def refuse_taken_names(cls: type) -> None:
    """Refuses names, here of methods, that a user's trainer and the framework both use: one would replace the other."""
    for part in cls.__mro__:
        if not is_ours(part) and part is not object:
            for name, value in vars(part).items():
                if name in _ATTRIBUTES:
                    raise _taken(f"{part.__name__}.{name}", name, names_of_ours(cls)[name])
                _refuse_if_taken(cls, part, name, value)


def _refuse_if_taken(cls: type, part: type, name: str, value: Any) -> None:
    ours = [owner for owner in definers(cls, name) if is_ours(owner)]
    if not ours or (name.startswith("__") and name.endswith("__")) or name in _DECLARATIONS:
        return
    if not name.startswith("_"):
        is_method = callable(written(value)) and callable(vars(ours[-1])[name])
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
    if owner is None or name == "train_dataloader" or (name in _STEPS and callable(value)):
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


_ATTRIBUTES = ("config", "_runtime")  # the framework's own, of a trainer

_ADVICE = {
    "train_dataloader": "Return the loaders from configure_dataloaders(): (train, val).",
    "val_dataloaders": "Return the loaders from configure_dataloaders(): (train, val).",
    "config": "A trainer keeps the config it was built with. Build a new trainer: dataclasses.replace(config, ...).",
}
