"""Where models' experts lie on the ranks, once `apply_expert_parallel` has split them: over ep, and over fsdp."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from dream_trainer.errors import ConfigError
from dream_trainer.modules.class_change import Changed, change_class
from dream_trainer.parallel.expert_exchange import ExpertExchange, is_shared_by_experts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def modules_of_experts(models: Iterable[nn.Module]) -> dict[nn.Module, list[str]]:
    """The modules whose own parameters ranks share by experts, with the names of these."""
    parts = dict.fromkeys(part for model in models for part in model.modules())
    found = {p: [n for n, w in p.named_parameters(recurse=False) if is_shared_by_experts(w)] for p in parts}
    return {part: names for part, names in found.items() if names}


def divide_rows(models: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Has the ranks of `mesh`, which share layers and so have the same rows, send a part of them each."""
    for module in modules_of_experts(models):
        exchange = vars(module)["exchange"]
        assert isinstance(exchange, ExpertExchange)  # set by `split_experts`
        exchange.divide_rows(mesh)


def keep_out_of_graphs(models: Iterable[nn.Module]) -> None:
    """Keeps shared experts out of compiled graphs: the sizes of their exchange change in each forward."""
    for module in modules_of_experts(models):
        forward = torch.compiler.disable(type(module).forward)
        change_class(module, Changed, key="out of graphs", forward=forward)


def shard_experts(models: Mapping[str, nn.Module], mesh: DeviceMesh, config: dict[str, Any]) -> None:
    """Wraps experts that are to be sharded beyond the ranks that share them, in groups of their own."""
    from torch.distributed.fsdp import fully_shard

    shards = mesh["dp_shard"].size()
    if shards == 1:  # left out of `fully_shard`: `step` averages what copies there are
        return
    dims = ("dp_replicate", "dp_shard") if mesh["dp_replicate"].size() > 1 else ("dp_shard",)
    for module in modules_of_experts(models.values()):
        placement = partial(_placement, shards=shards, owner=type(module).__name__)
        fully_shard(module, mesh=mesh[dims], shard_placement_fn=placement, **config)


def _placement(parameter: nn.Parameter, *, shards: int, owner: str) -> Any:
    """Along a dimension that can be shared evenly; the first is that of the experts."""
    from torch.distributed.tensor import Shard

    for dim in range(1, parameter.ndim):
        if parameter.shape[dim] % shards == 0:
            return Shard(dim)
    raise ConfigError(
        f"a weight {list(parameter.shape)} of {owner} cannot be sharded evenly over {shards} ranks, beside its experts "
        "over expert_parallel. Use a width that they divide, or another dp_shard."
    )
