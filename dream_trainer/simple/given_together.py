"""Arguments that need each other, or exclude each other."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, Literal

import torch.nn as nn
from torch import Tensor

from dream_trainer.checks import spell
from dream_trainer.config.checkpoint_parameters import CheckpointParameters
from dream_trainer.errors import ConfigError
from dream_trainer.simple.nearest import nearest

DEFAULT_MONITOR = "val/loss"


def refuse_no_model(model: object) -> None:
    """Raises ConfigError unless `model` is a module."""
    if isinstance(model, type):
        raise ConfigError(f"the model is the class {model.__name__}. Give an object of it: {model.__name__}(...).")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model is a {type(model).__name__}. Give a torch.nn.Module.")


def refuse_no_value(name: str | None, lr: Any, **limits: Any) -> None:
    """Raises ConfigError for an empty name, a learning rate that is no number, and limits that let nothing train."""
    if name == "":
        raise ConfigError(
            "name='' is empty. Give the run a name, such as name='baseline', or None, which keeps no files."
        )
    if lr is not None and not isinstance(lr, Tensor) and (not isinstance(lr, Real) or not 0 <= float(lr) < math.inf):
        raise ConfigError(f"lr={lr!r} is no learning rate. Give a number of at least 0, such as lr=1e-3.")
    for limit, value in limits.items():
        if isinstance(value, Integral) and value < 1:
            raise ConfigError(
                f"{limit}={value} trains nothing. Give at least 1; evaluate(), predict() and save() need no fit()."
            )


def refuse_both(loss: object, step: object, val_step: object, metrics: object) -> None:
    """Raises ConfigError where two arguments say the same."""
    if step is not None and loss is not None:
        raise ConfigError("loss= and step= both say what the loss is. Give one of them.")
    if metrics and (step is not None or val_step is not None):
        name = "step" if val_step is None else "val_step"
        raise ConfigError(
            f"metrics= with {name}=, which knows the outputs and targets alone. Return the values from {name}, in a "
            "dict beside the loss."
        )


def refuse_wrong_function(name: str, function: Any, *arguments: str) -> None:
    """Raises ConfigError unless `function` is None or can be called with `arguments`."""
    if function is None:
        return
    if isinstance(function, type) or not callable(function):
        raise ConfigError(f"{name}={function!r} is no function. Give one of ({', '.join(arguments)}).")
    try:
        signature = inspect.signature(function)
    except ValueError:  # of C functions nobody knows
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{name}= is called with ({', '.join(arguments)}), and the function given takes {signature}: {error}."
        ) from error


def refuse_without_name(name: str | None, **given: object) -> None:
    """Raises ConfigError for what a run without a name does not keep."""
    needs = [argument for argument, value in given.items() if value]
    if name is None and needs:
        raise ConfigError(f"{needs[0]}= needs a run to keep it in. Give the run a name: name='baseline'.")


def refuse_without_validation(patience: int | None, monitor: str, val_every: int | None) -> None:
    """Raises ConfigError for what goes by validations where there are none."""
    if patience is not None:
        raise ConfigError(f"patience={patience} counts validations, and there are none. Give val=.")
    if val_every is not None:
        raise ConfigError(f"val_every={val_every} is how often to validate, and there is no data for it. Give val=.")
    if monitor != DEFAULT_MONITOR:
        raise ConfigError(f"monitor={monitor!r} is a metric of validations, and there are none. Give val=.")


def monitored(monitor: str, loaders: Any, metrics: Iterable[str], *, are_all: bool, is_needed: bool) -> str | None:
    """The metric of a validation over `loaders` that a run goes by; None if it goes by none.

    Args:
        monitor: As it was given. With several loaders there is no "val/loss", and the default names nothing.
        loaders: A loader, or a dict of them.
        metrics: What is measured beside the loss.
        are_all: Whether these are all that a validation gives; else the first one tells.
        is_needed: Whether something goes by it.

    Raises:
        ConfigError: There is no such metric.
    """
    prefixes = [f"val/{name}/" for name in loaders] if isinstance(loaders, dict) else ["val/"]
    if monitor == DEFAULT_MONITOR and isinstance(loaders, dict) and not is_needed:
        return None
    if are_all:
        refuse_unknown_monitor(monitor, [prefix + name for prefix in prefixes for name in ("loss", *metrics)])
    return monitor


def refuse_unknown_monitor(monitor: str, names: Iterable[str]) -> None:
    """Raises ConfigError if `monitor` is none of the validation's metrics."""
    names = sorted(names)
    if monitor not in names:
        of_several = [name for name in names if name.rpartition("/")[2] == monitor.rpartition("/")[2]]
        advice = f"Use {spell(map(repr, of_several))}." if len(of_several) > 1 else nearest(monitor, names)
        raise ConfigError(f"monitor={monitor!r} is not among the validation's metrics. {advice}")


def what_to_keep(
    name: str | None, given: CheckpointParameters | None, monitor: str | None, mode: Literal["min", "max"]
) -> CheckpointParameters:
    """When to save and which to keep: nothing of a run without a name, else what was given, or the newest and best."""
    if given is not None:
        return given
    if name is None:
        return CheckpointParameters(save_every_n_epochs=None, save_at_end=False)
    if monitor is None:
        return CheckpointParameters(keep_last=1)
    return CheckpointParameters(keep_last=1, keep_best=1, save_on_best=True, best_metric=monitor, best_mode=mode)
