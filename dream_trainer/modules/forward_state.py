"""Changes of modules by forwards, except gradients (buffers, plain attributes), and the mode that they run in."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer.compat.pytorch import has_hooks
from dream_trainer.errors import HookError


class ForwardState(AbstractContextManager[None]):
    """As a context it undoes the changes of forwards inside at its end."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._contents, tensors = noted(dict.fromkeys(module for model in models for module in model.modules()))
        unique = {id(tensor): tensor for _, tensor in tensors}
        self._values = [(tensor, tensor.detach().clone()) for tensor in unique.values()]

    def __exit__(self, *raised: object) -> None:
        self.put_back()

    @torch.no_grad()
    def put_back(self) -> None:
        for tensor, value in self._values:
            tensor.detach().copy_(value)
        put_back(self._contents)


Key = tuple[int, str]  # the place of a module among others, and the name of an attribute or a buffer


def noted(modules: Iterable[nn.Module]) -> tuple[list[tuple[Any, Any]], list[tuple[Key, Tensor]]]:
    """The containers that forwards of `modules` may change, each with its content, and the tensors in them by place."""
    contents: list[tuple[Any, Any]] = []
    tensors: list[tuple[Key, Tensor]] = []
    for index, module in enumerate(modules):
        own = module._buffers if isinstance(module._buffers, dict) else None  # as of a torch.jit.ScriptModule
        buffers: Any = dict(module.named_buffers(recurse=False)) if own is None else own
        for attributes in (vars(module), buffers):
            content = content_of(attributes)
            contents.append((attributes, content))
            for name, value in content.items():
                if isinstance(value, Tensor | list | dict | tuple | set | deque):
                    contents += [(container, content_of(container)) for container in containers_in(value)]
                    tensors += [((index, name), tensor) for tensor in tensors_in(value)]
    return contents, tensors


# Internals of `nn.Module`, including parameters, which a second run uses as they are then.
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


def put_back(before: list[tuple[Any, Any]]) -> None:
    for container, content in before:
        fill(container, content)


def containers_in(tree: Any) -> Iterator[Any]:
    """The lists, dicts, sets and deques in `tree`, from the outermost."""
    if isinstance(tree, list | dict | set | deque):
        yield tree
    if isinstance(tree, list | tuple | dict | deque):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from containers_in(child)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in `tree` that a forward may write numbers into: no parameters."""
    if isinstance(tree, Tensor):
        if not isinstance(tree, nn.Parameter) and not tree.is_inference() and not tree.is_meta:
            yield tree
    elif isinstance(tree, list | tuple | dict | deque):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(child)


def content_of(container: Any) -> Any:
    """A flat copy; of a module's attributes without those of `nn.Module`."""
    if isinstance(container, dict):
        if "_modules" in container:
            return {name: value for name, value in container.items() if name not in _OF_MODULES}
        return dict(container)
    return set(container) if isinstance(container, set) else list(container)


def fill(container: Any, content: Any) -> None:
    """Makes a container hold what `content` does; one that does already is not touched."""
    if isinstance(container, set):
        if container != content:
            container.clear()
            container.update(content)
    elif isinstance(container, dict):
        now = content_of(container)
        for name in now.keys() - content.keys():
            del container[name]
        for name, value in content.items():
            if name not in now or now[name] is not value:
                container[name] = value
    elif not any(isinstance(value, nn.Parameter) for value in container):
        is_same = len(container) == len(content) and all(map(operator.is_, container, content))
        if not is_same:
            container.clear()
            container.extend(content)


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


# -- Users' attributes of parameters and hooks on gradients, if a model is cut over ranks: the new parameters get the
# attributes. A hook would need whole gradients, so it is an error.


class ParameterMarks:
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
