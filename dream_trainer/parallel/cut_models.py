"""What is known of a model that was cut into pipeline stages, and of the parameters that several of them share.

Every trainer imports this, so it needs nothing of PyTorch's pipelines.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.nn as nn


@dataclass(frozen=True)
class Tie:
    names: tuple[str, ...]  # all names in the whole model; checkpoints have the first
    ranks: tuple[int, ...]  # those that have a copy, in the order of their first name
    own_name: str | None  # what the copy of this rank is called in its part of the model; None without one


_ties: WeakKeyDictionary[nn.Module, Sequence[Tie]] = WeakKeyDictionary()


def is_held(name: str, names: Collection[str]) -> bool:
    """Whether `names` has `name`, or a part around it."""
    return any(name == held or name.startswith(f"{held}.") for held in names)


def ties_of(model: nn.Module, stages: Sequence[Collection[str]], ranks: Sequence[int], own_rank: int) -> list[Tie]:
    """The parameters of `model`, which is still whole, that more than one rank will have."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    ties = []
    for of_one in names.values():
        holders: dict[int, str] = {}
        for name in of_one:
            rank = next(rank for rank, held in zip(ranks, stages, strict=True) if is_held(name, held))
            holders.setdefault(rank, name)
        if len(holders) > 1:
            ties.append(Tie(tuple(of_one), tuple(holders), holders.get(own_rank)))
    return ties


def remember_ties(model: nn.Module, ties: Sequence[Tie]) -> None:
    """From now on `names_in_whole` knows what `model`, a part, calls otherwise than the whole does."""
    _ties[model] = ties


def is_cut(model: nn.Module) -> bool:
    """Whether this rank has the layers of some stages alone of `model`; else all."""
    return model in _ties


def ties_in(model: nn.Module) -> Sequence[Tie]:
    """What `remember_ties` was told, in an order that all ranks share; empty but of stages."""
    return _ties.get(model, ())


def names_in_whole(model: nn.Module) -> Mapping[str, tuple[str, ...]]:
    """All names in the whole model of what others have copies of, by that which `model` has; empty but of stages."""
    return {tie.own_name: tie.names for tie in ties_in(model) if tie.own_name is not None}
