"""Changes of modules by forwards, except gradients (buffers, plain attributes), and the mode that they run in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer.compat.pytorch import has_hooks
from dream_trainer.errors import HookError


class ForwardState:
    """As it is now, to be put back."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        modules = dict.fromkeys(module for model in models for module in model.modules())
        self._buffers = [(module, dict(module.named_buffers(recurse=False))) for module in modules]
        self._attributes = [(module, _plain(module)) for module in modules]
        tensors = [value for _, values in (*self._buffers, *self._attributes) for value in values.values()]
        self._values = [
            (value, value.detach().clone())
            for value in tensors
            if isinstance(value, Tensor) and not value.is_inference()  # these cannot be written to
        ]
        of_modules = [value for _, values in self._attributes for value in values.values()]
        self._lists = [(value, list(value)) for value in of_modules if isinstance(value, list)]
        self._dicts = [(value, dict(value)) for value in of_modules if isinstance(value, dict)]

    @torch.no_grad()
    def put_back(self) -> None:
        for tensor, value in self._values:
            tensor.detach().copy_(value)
        for module, buffers in self._buffers:
            for name, buffer in buffers.items():
                setattr(module, name, buffer)
        for module, attributes in self._attributes:
            for name in _plain(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
        for entries, before in self._lists:
            entries[:] = before
        for mapping, items in self._dicts:
            mapping.clear()
            mapping.update(items)


def _plain(module: nn.Module) -> dict[str, Any]:
    """Attributes set on it, except those that `nn.Module` and similar classes keep under private names."""
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


@contextmanager
def in_evaluation(models: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, all modules of `models` evaluate; at the end each has its own mode again."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def as_before(*models: nn.Module) -> Iterator[None]:
    """Undoes at the end the changes of forwards inside."""
    state = ForwardState(models)
    try:
        yield
    finally:
        state.put_back()


# -- Users' attributes of parameters and hooks on gradients, if a model is cut over ranks: the new parameters get the
# attributes. A hook would need whole gradients, so it is an error.


class ParameterMarks:
    """Those of whole models."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        # Subclasses keep their own data there, such as quantised weights.
        plain = [(name, parameter) for name, parameter in _parameters(models) if type(parameter) is nn.Parameter]
        self._attributes = {name: dict(vars(parameter)) for name, parameter in plain}
        self._hooked = {name for name, parameter in _parameters(models) if has_hooks(parameter)}

    def put_back(self, models: Mapping[str, nn.Module]) -> None:
        """Restores missing attributes of parameters with these names, and remembers their present ones."""
        for name, parameter in _parameters(models):
            now = vars(parameter)
            now.update({key: value for key, value in self._attributes.get(name, {}).items() if key not in now})
            self._attributes[name] = dict(now)

    def refuse_lost_hooks(self, models: Mapping[str, nn.Module]) -> None:
        if not self._hooked:
            return
        lost = next((name for name, one in _parameters(models) if name in self._hooked and not has_hooks(one)), None)
        if lost is not None:
            raise HookError(
                f"{lost} has a hook on its gradient, set in configure_models, and was replaced when the model was cut "
                "over ranks: it would never be called. Change its grad, which is this rank's part, in "
                "pre_optimizer_step, or by register_post_accumulate_grad_hook in configure_optimizers."
            )


def _parameters(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """With all names, which may differ in a part of a model."""
    for name, model in models.items():
        yield from model.named_parameters(f"self.{name}", remove_duplicate=False)
