"""What forwards change of modules beside gradients: buffers, in place or by others in their stead, and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn


class ForwardState:
    """As it is now, to be put back.

    Args:
        models: Modules, with all that is in them.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        modules = list(dict.fromkeys(module for model in models for module in model.modules()))
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in modules
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._numbers = [
            (module, {name: value for name, value in vars(module).items() if isinstance(value, int | float)})
            for module in modules
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restores everything; may be called several times."""
        for module, name, buffer, value in self._buffers:
            setattr(module, name, buffer.copy_(value))
        for module, values in self._numbers:
            vars(module).update(values)


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Puts back at the end what forwards inside change."""
    state = ForwardState([model])
    yield
    state.put_back()
