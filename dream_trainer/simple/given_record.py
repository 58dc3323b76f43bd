"""GivenObjects: what a trainer without a class was made of, in words, for `config.json` and for checkpoints.

Objects have no plain form, so names and numbers stand for them: enough to tell two runs apart, not to build one again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch.nn as nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from dream_trainer.config.dream_trainer_config import DreamTrainerConfig
from dream_trainer.data.loader import DistributedDataLoader
from dream_trainer.optim.learning_rates import ScheduleParameters
from dream_trainer.simple.described import described

_NOT_RECORDED = frozenset({"params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable"})

# Fields of a config by the argument that sets them.
_ARGUMENTS = {
    "training_parameters.gradient_accumulation_steps": "accumulate",
    "training_parameters.gradient_clip_val": "clip",
    "training_parameters.val_every_n_steps": "val_every",
    "training_parameters.train_batch_size": "batch_size",
    "training_parameters.val_batch_size": "val_batch_size",
    "device_parameters.precision": "precision",
    "device_parameters.device": "device",
    "device_parameters.compile": "compile",
}
_OF_OBJECTS = "given_objects."
# A run is trained further, saved and printed otherwise without being another one, and a branch has a name of its own.
_FREE = (
    "project: ",
    "group: ",
    "experiment: ",
    "checkpoint_parameters.",
    "training_parameters.n_epochs: ",
    "training_parameters.max_steps: ",
    "training_parameters.num_sanity_val_steps: ",
    "callbacks.EpochRows.",
)


@dataclass(kw_only=True)
class GivenObjects:
    """What was given, in words."""

    model: str = ""
    """Class of the model, its number of parameters, and a digest of the layers that it prints."""
    loss: str | None = None
    """The loss, or the function that has it; None where the model has its own."""
    loss_options: str = ""
    """What the loss was built with, as far as it tells."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Classes of the optimizer, as "name", and the numbers of its first group; once the trainer is set up."""
    lr: float | None = None
    """Learning rate of the first group before any schedule."""
    schedule: Any = None
    """Name or fields of the schedule; None keeps the rate."""
    metrics: list[str] = field(default_factory=list)
    """Names of what is measured in validations."""
    shuffle: bool = True
    """Whether samples have another order in each epoch."""
    train: str = ""
    """Kind and size of the training data."""
    val: str | None = None
    """The same of the validation's."""
    train_values: str | None = None
    """Digest of a sample of the training data's values; None of a dataset with code of its own."""
    val_values: str | None = None
    """The same of the validation's."""


@dataclass(kw_only=True)
class ObjectsConfig(DreamTrainerConfig):
    """Config of a trainer without a class."""

    given_objects: GivenObjects = field(default_factory=GivenObjects)
    """What was given, in words."""


def model_in_words(model: nn.Module) -> str:
    """`Sequential of 90 parameters (layers 3f2a9c11)`; other layers have another digest."""
    layers = re.sub(r"0x[0-9a-f]+", "", repr(model))
    digest = hashlib.sha256(layers.encode()).hexdigest()[:8]
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__} of {count:,} parameters (layers {digest})"


def function_in_words(function: Any) -> str | None:
    """A name as it is, a function by its own, an object by its class."""
    if function is None or isinstance(function, str):
        return function
    if isinstance(function, nn.Module):
        return " ".join(repr(function).split())
    has_a_name = isinstance(function, type | FunctionType | BuiltinFunctionType | MethodType)
    return str((function if has_a_name else type(function)).__qualname__)


def schedule_in_words(schedule: Any) -> Any:
    """Fields of `ScheduleParameters`, else a name."""
    return schedule if isinstance(schedule, ScheduleParameters) else function_in_words(schedule)


def optimizers_in_words(optimizers: Iterable[Optimizer]) -> tuple[dict[str, Any], float]:
    """Their classes and the plain numbers of the first one's first group, and its learning rate."""
    optimizers = [*optimizers]
    group: Mapping[str, Any] = optimizers[0].param_groups[0]
    numbers = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in group.items()
        if key not in _NOT_RECORDED and isinstance(value, int | float | tuple)
    }
    names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    return {"name": names} | numbers, float(group.get("initial_lr", group["lr"]))


def data_in_words(loader: Any) -> str:
    """What a loader reads: the shapes of arrays, else the kind of a dataset and its length."""
    if isinstance(loader, Mapping):
        return ", ".join(f"{name}: {data_in_words(one)}" for name, one in loader.items())
    dataset = loader.dataset if isinstance(loader, DataLoader | DistributedDataLoader) else loader
    if isinstance(dataset, TensorDataset):
        return described(dataset.tensors)
    size = ""
    if isinstance(loader, DistributedDataLoader):
        size = f" of {len(loader.dataset)}"
    elif isinstance(dataset, list | tuple):
        size = f" of {len(dataset)}"
    return f"{type(dataset).__name__}{size}"


def batch_size_of(loader: Any, otherwise: int) -> int:
    """Samples in a batch of one rank, as far as its loader says."""
    found = loader.batch_size if isinstance(loader, DataLoader | DistributedDataLoader) else None
    return otherwise if found is None else found


def in_arguments(changed: Iterable[str]) -> list[str]:
    """Lines `field: old -> new` in words of the arguments, without what was not recorded by an older version."""
    lines: list[str] = []
    for line in changed:
        name, _, values = line.partition(": ")
        is_newer = values.startswith("(absent)") and not name.startswith("callbacks.")  # a field that there was not
        if line.startswith(_FREE) or is_newer:
            continue
        if name.startswith(_OF_OBJECTS):
            argument = name.removeprefix(_OF_OBJECTS)
            data = argument.removesuffix("_values")
            if any(line.startswith(f"{data}= ") for line in lines):
                continue
            is_digest = data != argument
            lines.append(f"{argument}= {values}" if not is_digest else f"{data}= has other values, of the same shapes")
        else:
            lines.append(f"{_ARGUMENTS[name]}= {values}" if name in _ARGUMENTS else line)
    return lines
