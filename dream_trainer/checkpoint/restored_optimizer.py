"""Restores optimizers' state: by the names of parameters, on any mesh, replacing their present state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dream_trainer.checkpoint.nested_state import TensorPath, joined_state, load_own_state, paths_in, split_state
from dream_trainer.checkpoint.optimizer_state import (
    RANK_PREFIX,
    WHOLE,
    allocate,
    check_parameters,
    inner_optimizers,
    mesh_of,
    owner_of,
    parameters_by_name,
    places_of,
    tensor_name,
)
from dream_trainer.checks import listed
from dream_trainer.errors import CheckpointError


class Prepared(NamedTuple):
    tensors: dict[str, Tensor]  # allocated, with names, for `load_tensors`
    finish: Callable[[], None]  # called when they are filled


def prepare_optimizer_state(
    name: str,
    optimizer: Optimizer,
    fqns: Mapping[Tensor, str],
    values: Mapping[str, Any],
    metadata: Mapping[str, tuple[torch.Size, torch.dtype]],
    *,
    with_options: bool = True,
    own: Mapping[str, Mapping[str, Any]] | None = None,
    rank: int = 0,
) -> Prepared:
    """Restores an optimizer's groups and allocates its state, which `load_tensors` then fills; all or nothing.

    State of the parameter's shape gets its layout and device; other state lies as `load_state_dict` places it."""
    check_parameters(optimizer, fqns)
    saved_class, here_class = values.get("class"), type(optimizer).__name__
    if saved_class not in (None, here_class):  # options and state mean something else to it, even under the same names
        raise CheckpointError(
            f"Optimizer {name!r} was of class {saved_class} and is {here_class} now: it would continue with the "
            f"other's learning rate, decay and state. Use {saved_class} again, or begin another experiment from the "
            'checkpoint with branch=BranchParameters(optimizer="new"), or only from its weights, '
            "CheckpointParameters(init_from=<its path>)."
        )
    options = _options_by_group(name, optimizer, fqns, values["groups"])
    by_name = parameters_by_name(optimizer, fqns)
    local = _own_records(name, values, by_name, own)
    records = values["state"] | ({WHOLE: values["whole"]} if "whole" in values else {}) | local
    is_whole = values.get("has_own_state_dict", False)
    if is_whole:
        _refuse_another_order(name, optimizer, fqns, values["groups"])
    template = split_state(optimizer.state_dict(), fqns)[1] if is_whole else {}
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    ordered, allocated, found = list(by_name.values()), dict[str, Tensor](), dict[str, dict[TensorPath, Tensor]]()
    mesh = mesh_of(ordered)
    for part, record in records.items():
        layouts = {tuple(path): layout for path, layout in record.get("layouts", ())}
        on_host = {tuple(path) for path in record.get("on_host", ())}
        tensors = found[part] = {}
        for path in paths_in(record):
            full_name = tensor_name(name, part, path)
            if part in local and f"{RANK_PREFIX}{rank}.{full_name}" in metadata:
                full_name = f"{RANK_PREFIX}{rank}.{full_name}"
            if full_name not in metadata:
                raise CheckpointError(f"The checkpoint has no tensor {full_name}, which its state names.")
            shape, dtype = metadata[full_name]
            owner = owner_of(part, path, by_name, ordered)
            like = template.get(path, owner)
            if like is None and mesh is not None and not record.get("sharded") and len(shape):
                raise CheckpointError(
                    f"{full_name} was saved where no parameter was sharded, and how it is cut into shards is not "
                    "known. Resume without shards (dp_shard=1), or have the optimizer keep it in self.state[parameter]."
                )
            device = ordered[0].device if owner is None else _device(path, owner, groups[id(owner)])
            device = torch.device("cpu") if path in on_host else device
            tensors[path] = allocated[full_name] = allocate(shape, dtype, device, layouts.get(path), like, mesh)

    def state_of(part: str) -> dict[Any, Any]:
        return joined_state(records[part], found[part], by_name)

    inner = [
        prepare_optimizer_state(
            f"{name}/{attribute}", base, fqns, of_base, metadata, with_options=with_options, own=own, rank=rank
        )
        for attribute, base in inner_optimizers(optimizer)
        if (of_base := values.get("inner", {}).get(attribute)) is not None
    ]
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        _restore_options(group, saved if with_options else {})
    if not is_whole:
        optimizer.state.clear()
        for part in records:
            optimizer.state.update(state_of(part) if part == WHOLE else {by_name[part]: state_of(part)})

    def finish() -> None:
        if is_whole:
            load_own_state(name, optimizer, partial(state_of, WHOLE), with_options=with_options)
        for base in inner:
            base.finish()

    return Prepared(
        {key: t for one in (allocated, *(base.tensors for base in inner)) for key, t in one.items()}, finish
    )


def _own_records(
    name: str,
    values: Mapping[str, Any],
    by_name: Mapping[str, nn.Parameter],
    own: Mapping[str, Mapping[str, Any]] | None,
) -> Mapping[str, Any]:
    """The records of this rank, if it has the part of the parameters that the one that saved them had."""
    each_rank = values.get("each_rank")
    if not each_rank:
        return {}
    records = None if own is None else own.get(name)
    if records is None or any(record["places"] != places_of(by_name, part) for part, record in records.items()):
        parts = [part or "state_dict()" for part in each_rank]
        raise CheckpointError(
            f"each rank has separate state in optimizer {name!r} ({listed(parts, 5)}), which cannot be divided among "
            "other ranks, and this mesh has other parts of the parameters than the one that saved it. Resume on that "
            'mesh, or begin another experiment from this checkpoint with branch=BranchParameters(optimizer="new").'
        )
    return records


def _refuse_another_order(
    name: str, optimizer: Optimizer, fqns: Mapping[Tensor, str], saved: Sequence[Mapping[str, Any]]
) -> None:
    here = [[fqns[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    then = [group["parameters"] for group in saved]
    if here != then:
        raise CheckpointError(
            f"{type(optimizer).__name__} has its own state_dict, which identifies parameters by their position, and "
            f"optimizer {name!r} has them in another order or other groups than the checkpoint. Give it the parameters "
            "in the checkpoint's order."
        )


def _device(path: TensorPath, parameter: nn.Parameter, group: Mapping[str, Any]) -> torch.device:
    if path[-1] == "step" and not (group.get("fused") or group.get("capturable")):
        return torch.device("cpu")
    return parameter.device


def _options_by_group(
    name: str, optimizer: Optimizer, fqns: Mapping[Tensor, str], saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """For each group of `optimizer`, the saved options of its parameters' group."""
    owner = {fqn: index for index, group in enumerate(saved) for fqn in group["parameters"]}
    current_groups = [[fqns[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    known = {fqn for group in current_groups for fqn in group}
    only_saved, only_here = sorted(set(owner) - known), sorted(known - set(owner))
    if only_saved or only_here:
        differences = [f"only in the checkpoint: {', '.join(only_saved[:20])}"] if only_saved else []
        differences += [f"only here: {', '.join(only_here[:20])}"] if only_here else []
        raise CheckpointError(
            f"Optimizer {name!r} has other parameters than the checkpoint's ({'; '.join(differences)}). "
            "Was a layer added, removed, renamed or frozen since?"
        )
    chosen = []
    for index, group in enumerate(current_groups):
        owners = {owner[fqn] for fqn in group}
        if len(owners) > 1:
            raise CheckpointError(
                f"Parameter group {index} of optimizer {name!r} joins parameters of the checkpoint's groups "
                f"{sorted(owners)}, whose options may differ. Group them as they were saved."
            )
        if not owners and len(saved) == len(current_groups):
            owners = {index}
        chosen.append(saved[owners.pop()]["options"] if owners else {})
    return chosen


@torch.no_grad()
def _restore_options(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    if "lr" in saved and "initial_lr" not in saved:
        group.pop("initial_lr", None)  # there was no scheduler, and this one's base is not the saved rate's
    for key, value in saved.items():
        current = group.get(key)
        if isinstance(current, Tensor) and isinstance(value, Tensor) and current.shape == value.shape:
            current.copy_(value)  # a scheduler or a compiled step may refer to this tensor
        else:
            group[key] = value.clone() if isinstance(value, Tensor) else value
