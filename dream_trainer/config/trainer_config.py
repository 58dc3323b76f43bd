"""The config every trainer has, the check its constructor makes of it, and the config of DreamTrainer."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self
from weakref import WeakSet

from dream_trainer.checks import check_directory, check_instance, refuse
from dream_trainer.config.checkpoint_parameters import CheckpointConfigMixin
from dream_trainer.config.device_parameters import (
    ActivationCheckpointingConfigMixin,
    CompileConfigMixin,
    ContextParallelConfigMixin,
    DeviceParameters,
    Float8ConfigMixin,
    FSDPConfigMixin,
    PipelineParallelConfigMixin,
    SetupConfigMixin,
    TensorParallelConfigMixin,
)
from dream_trainer.config.logger_parameters import LoggerConfigMixin
from dream_trainer.config.parameter_class import (
    Directory,
    NonNegativeInt,
    check_fields,
    declaring,
    is_ours,
    own_annotations,
    refuse_unknown_fields,
)
from dream_trainer.config.training_parameters import EvalConfigMixin, TrainingParameters
from dream_trainer.errors import ConfigError
from dream_trainer.events.collection import BaseCallback, CallbackCollection

RUNS_VARIABLE = "DREAM_TRAINER_RUNS"
_USERS = "_trainers"


if TYPE_CHECKING:

    class _Callbacks:
        """To a type checker: a list is accepted, and a collection is read."""

        def __get__(self, config: object, owner: object = None) -> CallbackCollection: ...

        def __set__(self, config: object, value: CallbackCollection | Sequence[BaseCallback]) -> None: ...


def script_name() -> str:
    """The name of the running program without its ending: "train" for `train.py`, "notebook" without a file."""
    file = vars(sys.modules["__main__"]).get("__file__")
    if file is None:
        return "notebook"
    path = Path(file).absolute()
    return path.parent.name if path.stem == "__main__" else path.stem


@dataclass(kw_only=True)
class BaseTrainerConfig:
    """A run's name, length, devices, callbacks and seed.

    Inherit it, together with the config mixins of the trainer's mixins, in your own dataclass::

        @dataclass
        class MyConfig(BaseTrainerConfig, SetupConfigMixin):
            learning_rate: float = 1e-3
    """

    project: DirectoryName = field(default_factory=script_name)
    """First part of the run directory: the topic of the work. Default: the script's name."""
    group: DirectoryName = "default"
    """Second part of the run directory: runs that are compared with each other."""
    experiment: DirectoryName
    """Third part of the run directory: this run. A start with the same name resumes it."""
    training_parameters: TrainingParameters = field(default_factory=TrainingParameters)
    device_parameters: DeviceParameters = field(default_factory=DeviceParameters)
    if TYPE_CHECKING:
        callbacks: _Callbacks = _Callbacks()
    else:
        callbacks: CallbackCollection = field(default_factory=CallbackCollection)
    """Callbacks of the run, in order. A list becomes a CallbackCollection. Set in code, not on the command line."""
    seed: NonNegativeInt = 42
    """Seed of initial weights, sample order and random layers. Any integer from 0 on."""
    runs_dir: Directory | None = None
    """Directory of all runs. None uses the environment variable `DREAM_TRAINER_RUNS`, or "runs" without it."""

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        refuse_unknown_fields(cls, fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.validate()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "callbacks" and isinstance(value, list | tuple):
            value = CallbackCollection(value)
        in_use = vars(self).get(_USERS, ())
        if in_use and vars(self).get(name) is not value and any(map(is_ours, declaring(type(self), name))):
            raise ConfigError(
                f"config.{name} cannot be changed to {value!r}: a trainer was built with this config, and has read "
                f"it. Close that first, or build another one with dataclasses.replace(config, {name}=...)."
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != _USERS}  # no trainer uses a copy

    def validate(self) -> None:
        """Raises ConfigError if a field of this class is invalid. An override calls `super().validate()`."""
        _check_base(self)

    @property
    def run_dir(self) -> Path:
        """Directory of the run's files: `<runs_dir>/<project>/<group>/<experiment>`."""
        runs = runs_directory() if self.runs_dir is None else Path(self.runs_dir).expanduser()
        return runs / self.project / self.group / self.experiment


def runs_directory() -> Path:
    """Default directory of runs: `DREAM_TRAINER_RUNS` in the environment, or "runs" without it."""
    return Path(os.environ.get(RUNS_VARIABLE) or "runs").expanduser()


def hold(config: BaseTrainerConfig, trainer: object) -> None:
    """`trainer` has read `config`: until `let_go` our fields of it cannot be assigned; those of the user's can."""
    vars(config).setdefault(_USERS, WeakSet()).add(trainer)


def let_go(config: BaseTrainerConfig, trainer: object) -> None:
    """`trainer` is closed, and `config` may become another one's."""
    vars(config)[_USERS].discard(trainer)


def change_training_parameters(config: BaseTrainerConfig, trainer: object, value: TrainingParameters) -> None:
    """Gives `config`, which `trainer` and no other has read, another `training_parameters`."""
    refuse(
        any(user is not trainer for user in vars(config).get(_USERS, ())),
        "the limits cannot be changed: another trainer, which is not closed, was built with the same config. "
        "Close it first, or give each its own config: dataclasses.replace(config).",
    )
    vars(config)["training_parameters"] = value


def check_config(config: Any) -> None:
    """Raises ConfigError for a config that a subclass, or an assignment after it was built, made invalid."""
    if not isinstance(config, BaseTrainerConfig):
        raise ConfigError(
            f"{config!r} is not a trainer config. Pass an instance of a dataclass that inherits BaseTrainerConfig."
        )
    for cls in type(config).__mro__:  # names that would be fields if the class were decorated, or gave them a type
        annotations = own_annotations(cls)
        refuse(
            annotations and "__dataclass_fields__" not in vars(cls) and issubclass(cls, BaseTrainerConfig),
            f"{cls.__name__} declares {', '.join(annotations)} but is not a dataclass, so they are not fields. "
            f"Put @dataclass above class {cls.__name__}.",
        )
        inherited = {f.name for base in cls.__mro__[1:] if is_dataclass(base) for f in fields(base)}
        for name in sorted(inherited & set(vars(cls)) - set(annotations)):
            raise ConfigError(
                f"{cls.__name__}.{name} is assigned without a type, so the field keeps its old default. "
                f"Write `{name}: <its type> = {vars(cls)[name]!r}`."
            )
    for f in fields(config):
        if isinstance(f.default_factory, type) and is_dataclass(f.default_factory):
            check_instance(f.name, getattr(config, f.name), f.default_factory)
    _check_base(config)
    config.validate()


def _check_base(config: BaseTrainerConfig) -> None:
    check_fields(config, BaseTrainerConfig)
    refuse(
        not isinstance(config.callbacks, CallbackCollection),
        f"callbacks={config.callbacks!r} is of type {type(config.callbacks).__name__}. Use a list: callbacks=[...].",
    )
    if config.runs_dir is None:
        check_directory(RUNS_VARIABLE, str(runs_directory()))


def _check_name(name: str, value: object, *, hint: str) -> None:
    """A name becomes a directory's."""
    is_name = isinstance(value, str) and value.strip() not in ("", ".", "..")
    refuse(
        not is_name or any(c in "/\\" or not c.isprintable() for c in str(value)),
        f"{name}={value!r} cannot be one directory's name, which it becomes in the run directory. Use a name without "
        f"path separators and control characters, such as {name}='baseline'.{hint}",
    )


DirectoryName = Annotated[str, _check_name]


@dataclass(kw_only=True)
class DreamTrainerConfig(
    BaseTrainerConfig,
    SetupConfigMixin,
    FSDPConfigMixin,
    PipelineParallelConfigMixin,
    ContextParallelConfigMixin,
    TensorParallelConfigMixin,
    Float8ConfigMixin,
    ActivationCheckpointingConfigMixin,
    CompileConfigMixin,
    EvalConfigMixin,
    CheckpointConfigMixin,
    LoggerConfigMixin,
):
    """Config of DreamTrainer: the fields of all mixins."""
