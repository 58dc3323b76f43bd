"""Registry: the models, optimizers and so on of a trainer, which are its attributes by type, in order of assignment."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.nn as nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dream_trainer.errors import HookError, StepError
from dream_trainer.modules.metrics import is_metric

Scheduler = LRScheduler | ReduceLROnPlateau


def parameters_of(*optimizers: Optimizer) -> Iterator[nn.Parameter]:
    return (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])


class Registry:
    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._attributes = attributes

    def models(self) -> dict[str, nn.Module]:
        """Modules with parameters or buffers assigned to the trainer, save metrics and parts of an earlier one."""
        models: dict[str, nn.Module] = {}
        seen: set[int] = set()
        for name, module in self._candidates():
            if id(module) in seen or not _has_state(module):
                continue
            models[name] = module
            seen.update(id(part) for part in module.modules())
        return models

    def trainable_models(self) -> list[nn.Module]:
        return [model for model in self.models().values() if any(p.requires_grad for p in model.parameters())]

    def parameterised_models(self) -> list[nn.Module]:
        return [model for model in self.models().values() if next(model.parameters(), None) is not None]

    def parameter_names(self) -> dict[int, str]:
        """Names of the models' parameters, by their `id`."""
        return {id(p): path for name, model in self.models().items() for path, p in model.named_parameters(name)}

    def optimizers(self) -> dict[str, Optimizer]:
        """Optimizers by attribute name; those in lists and dicts as `name.key`."""
        return self._named_by_type(Optimizer)

    def schedulers(self) -> dict[str, Scheduler]:
        """Learning rate schedulers by attribute name; those in lists and dicts as `name.key`."""
        return self._named_by_type(Scheduler)

    def metrics(self, *, also_private: bool = False) -> dict[str, Any]:
        """torchmetrics objects by attribute name; those in lists and dicts, modules or not, as `name.key`."""
        torchmetrics = sys.modules.get("torchmetrics")
        if torchmetrics is None:
            return {}
        return self._named_by_type((torchmetrics.Metric, torchmetrics.MetricCollection), also_private=also_private)

    def optimizers_of(self, model: nn.Module) -> list[Optimizer]:
        parameters = {id(parameter) for parameter in model.parameters()}
        return [one for one in self.optimizers().values() if any(id(p) in parameters for p in parameters_of(one))]

    def refuse_another_model(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Raises StepError if others update `model`, and these, not being of an absent stage, update none of it."""
        own = self.optimizers_of(model)
        given = [one for one in optimizers if next(parameters_of(one), None) is not None]
        if own and given and set(own).isdisjoint(given):
            named = next((f"self.{name}" for name, one in self.models().items() if one is model), type(model).__name__)
            raise StepError(
                f"step() was given {named}, and an optimizer that updates none of its parameters. Pass the model and "
                "the optimizer that belong together."
            )

    def refuse_strangers(self) -> None:
        """Checks that every parameter that an optimizer updates is one of the trainer's models'."""
        known = {id(parameter) for model in self.models().values() for parameter in model.parameters()}
        for name, optimizer in self.optimizers().items():
            for parameter in parameters_of(optimizer):
                if id(parameter) not in known:
                    raise HookError(
                        f"self.{name} updates a parameter of shape {tuple(parameter.shape)} that belongs to no model "
                        "of the trainer. Put it into a module that configure_models() assigns to self, and collect "
                        "parameters in configure_optimizers(): before, they are not yet the trained ones."
                    )

    def _candidates(self) -> Iterator[tuple[str, nn.Module]]:
        for name, value in self._public_attributes():
            if is_metric(value):
                continue
            if isinstance(value, nn.ModuleList | nn.ModuleDict):
                children = value.items() if isinstance(value, nn.ModuleDict) else enumerate(value)
                yield from ((f"{name}.{key}", child) for key, child in children if not is_metric(child))
            elif isinstance(value, nn.Module):
                yield name, value
            elif isinstance(value, list | tuple | set | dict):
                for item in value.values() if isinstance(value, dict) else value:
                    if isinstance(item, nn.Module) and not is_metric(item) and _has_state(item):
                        kind = "nn.ModuleDict" if isinstance(value, dict) else "nn.ModuleList"
                        raise HookError(
                            f"self.{name} is a plain {type(value).__name__} that holds a module "
                            f"({type(item).__name__}): the trainer would neither shard nor save it. Use {kind}."
                        )

    def _named_by_type(self, kinds: Any, *, also_private: bool = False) -> dict[str, Any]:
        """Objects of `kinds`, keyed by first name: an object with two names is one object, saved once."""
        found: dict[str, Any] = {}
        for name, value in self._attributes.items() if also_private else self._public_attributes():
            if isinstance(value, kinds):
                found[name] = value
            elif isinstance(value, Mapping) or type(value) is nn.ModuleDict:
                found.update({f"{name}.{key}": item for key, item in value.items() if isinstance(item, kinds)})
            elif isinstance(value, list | tuple) or type(value) is nn.ModuleList:
                found.update({f"{name}.{index}": item for index, item in enumerate(value) if isinstance(item, kinds)})
        first = {id(value): name for name, value in reversed(found.items())}
        return {name: value for name, value in found.items() if first[id(value)] == name}

    def _public_attributes(self) -> Iterator[tuple[str, Any]]:
        return ((name, value) for name, value in list(self._attributes.items()) if not name.startswith("_"))


def _has_state(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def refuse_private_models(attributes: Mapping[str, Any]) -> None:
    """Raises HookError if a module with state has a private name, under which no registry finds it."""
    for name, value in attributes.items():
        if name.startswith("_") and isinstance(value, nn.Module) and not is_metric(value) and _has_state(value):
            raise HookError(
                f"self.{name} holds a module ({type(value).__name__}): under a private name the trainer would neither "
                f"shard nor save it. Call it self.{name.lstrip('_')}."
            )
