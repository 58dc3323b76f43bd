"""Optimizers whose class has a `state_dict` of its own: what it gave goes back through its `load_state_dict`.

What the optimizer has afterwards is compared with that, since casts and forgetful methods raise no error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dream_trainer.checkpoint.nested_state import first_difference, path_text
from dream_trainer.errors import CheckpointError

MACHINE_OPTIONS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Options of groups that checkpoints leave out: parameters, their names, and the machine's implementation."""

_GROUPS = "param_groups"


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Whether its class overrides `state_dict` or `load_state_dict`."""
    kind = type(optimizer)
    return kind.state_dict is not Optimizer.state_dict or kind.load_state_dict is not Optimizer.load_state_dict


@torch.no_grad()
def load_own_state(name: str, optimizer: Optimizer, make: Callable[[], dict[str, Any]], *, with_options: bool) -> None:
    """Gives an optimizer the state that its `state_dict` gave, with the parameters of this process."""
    before, here = optimizer.param_groups, optimizer.state_dict()
    given, taken = make(), make()
    for state in (given, taken):
        _take_parameters_of(here, state, with_options=with_options)
    optimizer.load_state_dict(taken)
    for former, group in zip(before, optimizer.param_groups, strict=True):
        for key, value in group.items():
            kept = former.get(key)
            if isinstance(value, Tensor) and isinstance(kept, Tensor) and kept.shape == value.shape:
                group[key] = kept.copy_(value)  # a scheduler or a compiled step may refer to this tensor
    _take_types_back(given, optimizer.state_dict())
    where = first_difference(given, optimizer.state_dict(), _GROUPS)
    if where is not None:
        raise CheckpointError(
            f"load_state_dict() of {type(optimizer).__name__} (optimizer {name!r}) did not bring back "
            f"{path_text(where) or 'its state'}, which state_dict() had saved. Have load_state_dict take back all that "
            "state_dict gives, by positions or parameters: the ids of objects are other ones in each process."
        )


def _take_parameters_of(here: Any, state: Any, *, with_options: bool) -> None:
    """Groups in `state` get the parameters of `here`, and its choice of implementation."""
    if isinstance(here, list | tuple) and isinstance(state, list | tuple):
        for one, other in zip(here, state, strict=False):
            _take_parameters_of(one, other, with_options=with_options)
    if not isinstance(here, dict) or not isinstance(state, dict):
        return
    for key, value in state.items():
        if key == _GROUPS:
            state[key] = [
                (group if with_options else {})
                | {option: v for option, v in now.items() if not with_options or option in MACHINE_OPTIONS}
                for group, now in zip(value, here.get(key) or value, strict=True)
            ]
        else:
            _take_parameters_of(here.get(key), value, with_options=with_options)


def _take_types_back(given: Any, now: Any) -> None:
    """Tensors in dicts that have another type now are those that were given."""
    if isinstance(given, dict) and isinstance(now, dict):
        for key, value in given.items():
            found = now.get(key)
            if isinstance(value, Tensor) and isinstance(found, Tensor) and found.dtype != value.dtype:
                now[key] = value
            else:
                _take_types_back(value, found)
    elif isinstance(given, list | tuple) and isinstance(now, list | tuple):
        for one, other in zip(given, now, strict=False):
            _take_types_back(one, other)
