"""What `optimizer=` and `schedule=` may be: PyTorch's objects, what makes them, or names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch.nn as nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dream_trainer.errors import ConfigError
from dream_trainer.optim.learning_rates import ScheduleName, ScheduleParameters, build_schedules
from dream_trainer.optim.optimizer_parameters import OptimizerName, OptimizerParameters
from dream_trainer.optim.optimizers import build_optimizers
from dream_trainer.simple.nearest import nearest

GivenOptimizer = Optimizer | OptimizerName | OptimizerParameters | Callable[..., Optimizer]
Scheduler = LRScheduler | ReduceLROnPlateau
GivenSchedule = ScheduleName | ScheduleParameters | Scheduler | Callable[[Any], Scheduler]


class OptimizerPlan:
    """An optimizer that is to update a model, which may be sharded before it does.

    Args:
        given: An optimizer over the model's parameters, what makes one of them, or a name.
        lr: Learning rate; None where `given` has one, or for its default.
        model: As it is before it is sharded.

    Raises:
        ConfigError: It is no optimizer and makes none, `lr` is given twice, or the optimizer has stepped already or is
            not over the model's parameters.
    """

    def __init__(self, given: GivenOptimizer, lr: float | None, model: nn.Module) -> None:
        if isinstance(given, str):
            if given not in get_args(OptimizerName):
                raise ConfigError(f"optimizer={given!r} is not known. {nearest(given, get_args(OptimizerName))}")
        elif not isinstance(given, Optimizer | OptimizerParameters) and not callable(given):
            several = isinstance(given, list | tuple) and any(isinstance(one, Optimizer) for one in given)
            more = " Several need a class of your own: docs/several-models.md." if several else ""
            raise ConfigError(
                f"optimizer= is of type {type(given).__name__}. Give an optimizer, its class with lr=, a function of "
                f'the parameters, or a name such as "adamw".{more}'
            )
        if lr is not None and isinstance(given, Optimizer | OptimizerParameters):
            raise ConfigError(f"lr={lr} is given twice: the {type(given).__name__} has one. Leave lr= out.")
        self._given, self._lr = given, lr
        # By name, since sharding puts other parameters in their places.
        self._names: list[list[str]] = []
        if isinstance(given, Optimizer):
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            parameters = [parameter for group in given.param_groups for parameter in group["params"]]
            if any(id(parameter) not in names for parameter in parameters):
                raise ConfigError(
                    f"the {type(given).__name__} given as optimizer= updates parameters that the model does not have. "
                    "Build it over model.parameters() of the model that is trained."
                )
            self._names = [[names[id(parameter)] for parameter in group["params"]] for group in given.param_groups]

    def build(self, model: nn.Module, blocks: Sequence[nn.Module]) -> list[Optimizer]:
        """The optimizers over the parameters that `model` has now; two for "muon"."""
        given = self._given
        if isinstance(given, Optimizer):
            self._follow(given, dict(model.named_parameters()))
            return [given]
        if isinstance(given, OptimizerParameters):
            return build_optimizers(given, model, blocks=blocks)
        if isinstance(given, str):
            rate = OptimizerParameters.lr if self._lr is None else self._lr
            # pyright takes a string that could be called for possible.
            parameters = OptimizerParameters(name=given, lr=rate)  # pyright: ignore[reportArgumentType]
            return build_optimizers(parameters, model, blocks=blocks)
        trainable: Iterable[nn.Parameter] = [p for p in model.parameters() if p.requires_grad]
        built = given(trainable) if self._lr is None else given(trainable, lr=self._lr)
        if not isinstance(built, Optimizer):
            raise ConfigError(
                f"optimizer={given!r} made a {type(built).__name__}. Give an optimizer, its class with lr=, a function "
                'of the parameters, or a name such as "adamw".'
            )
        return [built]

    def _follow(self, optimizer: Optimizer, parameters: dict[str, nn.Parameter]) -> None:
        """Puts the parameters of now into the optimizer's groups, where sharding replaced them."""
        for group, names in zip(optimizer.param_groups, self._names, strict=True):
            now = [parameters[name] for name in names]
            if any(new is not old for new, old in zip(now, group["params"], strict=True)):
                if optimizer.state:
                    raise ConfigError(
                        f"the {type(optimizer).__name__} given as optimizer= has stepped already, and its state cannot "
                        "be sharded. Give one that has not, or train without shard=True."
                    )
                group["params"] = now


def check_schedule(given: GivenSchedule | None) -> None:
    """Raises ConfigError if it neither is a schedule nor could make one."""
    if isinstance(given, str):
        if given not in get_args(ScheduleName):
            raise ConfigError(f"schedule={given!r} is not known. {nearest(given, get_args(ScheduleName))}")
        return
    is_one = isinstance(given, LRScheduler | ReduceLROnPlateau | ScheduleParameters)
    if given is not None and not is_one and not callable(given):
        raise ConfigError(
            f"schedule= is of type {type(given).__name__}. Give a schedule, a function of the optimizer, or a name "
            'such as "cosine".'
        )


def build_given_schedules(
    given: GivenSchedule | None,
    optimizers: Sequence[Optimizer],
    total_steps: int | None,
    steps_per_epoch: int | None,
    better: Literal["min", "max"],
) -> list[Scheduler]:
    """The schedules over `optimizers`, one for each; a "plateau" takes whether lower or higher is `better`.

    Raises:
        ConfigError: It is neither a schedule nor makes one, or needs a length that is not known.
    """
    if given is None:
        return []
    if isinstance(given, LRScheduler | ReduceLROnPlateau):
        if given.optimizer not in optimizers:
            raise ConfigError(
                f"schedule={given!r} is of an optimizer that does not train. Make it of the one that is given as "
                "optimizer=, or give a function of the optimizer, or a name."
            )
        return [given]
    if isinstance(given, str | ScheduleParameters):
        parameters = (
            given if isinstance(given, ScheduleParameters) else ScheduleParameters(name=given)  # pyright: ignore[reportArgumentType]  # as above
        )
        if parameters.name == "plateau" and parameters.mode is None:
            parameters = replace(parameters, mode=better)
        return [*build_schedules(parameters, optimizers, total_steps=total_steps, steps_per_epoch=steps_per_epoch)]
    made = [given(optimizer) for optimizer in optimizers]
    for schedule in made:
        if not isinstance(schedule, LRScheduler | ReduceLROnPlateau):
            raise ConfigError(
                f"schedule={given!r} made a {type(schedule).__name__}. Give a schedule, a function of the optimizer, "
                'or a name such as "cosine".'
            )
    return made
