"""Behaviour added to a module by changing its class in place, as `fully_shard` does. Names in the state dict stay, and
a deep copy computes with its own weights."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch.nn as nn


class Changed(nn.Module):
    """Base of classes that are put before a module's own class."""


# Equal modules share a class, so that they compile once.
_classes: dict[tuple[type[Changed], type[nn.Module], Any], type[nn.Module]] = {}


def change_class(module: nn.Module, change: type[Changed], key: Any = None, **attributes: Any) -> None:
    """Puts `change` before the class of `module`, whose methods it reaches by `super()`; once for each module."""
    cls = type(module)
    if any(_classes.get((change, base, key)) in cls.__mro__ for base in cls.__mro__):
        return  # two models have it
    if (change, cls, key) not in _classes:
        body = {"__module__": cls.__module__, "__doc__": cls.__doc__} | attributes
        if change.forward is not nn.Module.forward:

            def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
                return change.forward(self, *args, **kwargs)

            forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]  # `generate` asks for it
            body["forward"] = forward
        _classes[change, cls, key] = type(f"{change.__name__}{cls.__name__}", (change, cls), body)
    module.__class__ = _classes[change, cls, key]


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that `module` was written as, before `change_class` and `fully_shard`."""
    changes: tuple[type, ...] = (Changed,)
    if "torch.distributed.fsdp" in sys.modules:
        from torch.distributed.fsdp import FSDPModule

        changes += (FSDPModule,)
    cls = type(module)
    while issubclass(cls.__bases__[0], changes):
        cls = cls.__bases__[1]
    return cls


def unwrap(model: nn.Module) -> nn.Module:
    """Takes `torch.compile`, DistributedDataParallel, DataParallel and AveragedModel off, however nested."""
    from torch.nn.parallel import DataParallel, DistributedDataParallel
    from torch.optim.swa_utils import AveragedModel

    from dream_trainer.compat.compiler import compiled_original

    while True:
        original = compiled_original(model)
        if original is not None:
            model = original
        elif isinstance(model, DistributedDataParallel | DataParallel | AveragedModel):
            model = model.module
        else:
            return model
