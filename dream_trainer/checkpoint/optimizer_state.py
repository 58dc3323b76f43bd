"""Optimizers' state, keyed by the names of the parameters it belongs to.

With keys by position, as in `optimizer.state_dict()`, one added parameter would shift every state to its neighbour.
DCP's `get_optimizer_state_dict` uses names, but it steps an optimizer that never stepped, which leaves Adam's bias
correction one step off. Here nothing is stepped: tensors are read where they are, and allocated from the checkpoint's
metadata.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dream_trainer.checkpoint import typed_json
from dream_trainer.checkpoint.model_state import differing_names
from dream_trainer.distributed.outcomes import on_all_ranks
from dream_trainer.distributed.ranks import Ranks
from dream_trainer.errors import CheckpointError

OPTIMIZER_PREFIX = "optimizers."
"""Tensors of optimizers are named `optimizers.<name>.<parameter>.<key>`."""

# The parameters themselves; the names that an optimizer built from named parameters keeps for them; and which
# implementation runs: that depends on the machine, and the state is the same under each.
_NOT_OPTIONS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


def optimizer_state(
    name: str, optimizer: Optimizer, fqns: Mapping[Tensor, str], *, world: Ranks
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state: its tensors as they are, and everything else for typed JSON.

    An optimizer that never stepped has no tensors and is restored as one that never stepped. Every rank calls this.

    Args:
        name: The optimizer's name.
        optimizer: Any optimizer whose state belongs to single parameters: all of PyTorch's except LBFGS.
        fqns: Names of the parameters, from `parameter_fqns`.
        world: The ranks; state of sharded parameters that is not a DTensor is compared between them.

    Returns:
        `optimizers.<name>.<parameter>.<key>` to the state tensor, and
        `{"class", "groups": [{"parameters", "options"}], "state": {parameter: {"tensors", "values"}}}`.

    Raises:
        CheckpointError: A parameter has no name, or the state does not belong to parameters, is of a type that cannot
            be saved, or is a plain tensor that differs between ranks; the same on every rank.
    """
    task = f"save optimizer {name!r}"
    tensors, values = on_all_ranks(world, task, lambda: _collect(name, optimizer, fqns))
    plain = _plain_state_of_sharded(name, optimizer, fqns)
    differing = differing_names(plain, world=world)
    on_all_ranks(world, task, lambda: _refuse(differing))
    return tensors, values


def _collect(name: str, optimizer: Optimizer, fqns: Mapping[Tensor, str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    _check(optimizer, fqns)
    tensors: dict[str, Tensor] = {}
    state: dict[str, dict[str, Any]] = {}
    for parameter, parameter_state in optimizer.state.items():
        fqn = fqns[parameter]
        state_tensors = {key: value for key, value in parameter_state.items() if isinstance(value, Tensor)}
        tensors |= {_tensor_name(name, fqn, key): value.detach() for key, value in state_tensors.items()}
        state[fqn] = {
            "tensors": sorted(state_tensors),
            "values": {key: value for key, value in parameter_state.items() if key not in state_tensors},
        }
    groups = [
        {
            "parameters": [fqns[parameter] for parameter in group["params"]],
            "options": {key: value for key, value in group.items() if key not in _NOT_OPTIONS},
        }
        for group in optimizer.param_groups
    ]
    values = {"class": type(optimizer).__name__, "groups": groups, "state": state}
    # Written and read again: so it is a copy (schedulers change `lr` tensors in place), and known to be readable.
    return tensors, typed_json.loads(typed_json.dumps(values, name=f"optimizers.{name}"))


def _tensor_name(name: str, fqn: str, key: str) -> str:
    return f"{OPTIMIZER_PREFIX}{name}.{fqn}.{key}"


def _check(optimizer: Optimizer, fqns: Mapping[Tensor, str]) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise CheckpointError(
            "LBFGS keeps the history of all parameters in the state of the first, which cannot be sharded or keyed by "
            "name. Use another optimizer, or leave this one out of the checkpoint."
        )
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in fqns:
                raise CheckpointError(
                    f"Parameter group {index} of {type(optimizer).__name__} has a parameter of shape "
                    f"{tuple(parameter.shape)} that belongs to no model. Assign its module to the trainer in "
                    "configure_models."
                )
    strangers = [key for key in optimizer.state if key not in fqns]
    if strangers:
        raise CheckpointError(
            f"{type(optimizer).__name__} holds state under {type(strangers[0]).__name__} keys that are not parameters. "
            "Keep state per parameter, so that it can be restored by name."
        )


def _plain_state_of_sharded(name: str, optimizer: Optimizer, fqns: Mapping[Tensor, str]) -> dict[str, Tensor]:
    from torch.distributed.tensor import DTensor

    return {
        _tensor_name(name, fqns[parameter], key): value
        for parameter, parameter_state in optimizer.state.items()
        if isinstance(parameter, DTensor)
        for key, value in parameter_state.items()
        if isinstance(value, Tensor) and not isinstance(value, DTensor)
    }


def _refuse(differing: set[str]) -> None:
    if differing:
        raise CheckpointError(
            f"{', '.join(sorted(differing)[:20])}: plain tensors that differ from rank 0's, though their parameters "
            "are sharded; one rank's would be kept for all. Make them DTensors with the parameter's placement."
        )


def of_all_stages(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One optimizer's values of what the stages of a pipeline have: the second results of `optimizer_state` by rank.

    Raises:
        CheckpointError: The stages have different numbers of parameter groups; the same on every rank.
    """
    counts = {len(of_rank["groups"]) for of_rank in values}
    if len(counts) > 1:
        raise CheckpointError(
            f"the stages of the pipeline have {sorted(counts)} parameter groups in one optimizer. Make the same groups "
            "on each, an empty one where a stage has no such parameters."
        )
    groups = [dict(group) for group in values[0]["groups"]]
    for number, group in enumerate(groups):
        names = (name for of_rank in values for name in of_rank["groups"][number]["parameters"])
        group["parameters"] = list(dict.fromkeys(names))
    state = {name: of for of_rank in values for name, of in of_rank["state"].items()}
    return {"class": values[0]["class"], "groups": groups, "state": state}


def of_one_stage(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """What of an optimizer's values belongs to the parameters `names`; the rest is other stages'."""
    groups = [
        group | {"parameters": [name for name in group["parameters"] if name in names]} for group in values["groups"]
    ]
    state = {name: of for name, of in values["state"].items() if name in names}
    return {**values, "groups": groups, "state": state}


def prepare_optimizer_state(
    name: str,
    optimizer: Optimizer,
    fqns: Mapping[Tensor, str],
    values: Mapping[str, Any],
    metadata: Mapping[str, tuple[torch.Size, torch.dtype]],
    *,
    with_options: bool = True,
) -> dict[str, Tensor]:
    """Restores an optimizer's groups and allocates its state, which `load_tensors` then fills.

    State the optimizer already has is dropped. State of the parameter's shape gets its layout (DTensor) and device;
    other state is a plain tensor, placed as PyTorch's own `load_state_dict` would.

    Args:
        name: The optimizer's name when it was saved.
        optimizer: A new one, over parameters of any layout.
        fqns: Names of its parameters.
        values: The second result of `optimizer_state`.
        metadata: From `tensor_metadata`.
        with_options: Whether learning rate, decay and the like become those of the checkpoint.

    Returns:
        The allocated tensors by name, to be passed to `load_tensors`.

    Raises:
        CheckpointError: The optimizer's class, parameters or their grouping are not those of the checkpoint, listed by
            name, or the checkpoint lacks a state tensor; nothing was changed.
    """
    _check(optimizer, fqns)
    _refuse_other_class(name, optimizer, values)
    options = _options_by_group(name, optimizer, fqns, values["groups"])
    by_name = {fqns[parameter]: (parameter, group) for group in optimizer.param_groups for parameter in group["params"]}
    absent = [
        tensor_name
        for fqn, saved_state in values["state"].items()
        for key in saved_state["tensors"]
        if (tensor_name := _tensor_name(name, fqn, key)) not in metadata
    ]
    if absent:
        raise CheckpointError(f"The checkpoint has no tensors {', '.join(absent[:20])}, which its state names.")
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        _restore_options(group, saved if with_options else {})
    optimizer.state.clear()
    tensors: dict[str, Tensor] = {}
    for fqn, saved_state in values["state"].items():
        parameter, group = by_name[fqn]
        state = dict(saved_state["values"])
        for key in saved_state["tensors"]:
            tensor_name = _tensor_name(name, fqn, key)
            state[key] = tensors[tensor_name] = _allocate(parameter, group, key, *metadata[tensor_name])
        optimizer.state[parameter] = state
    return tensors


def _refuse_other_class(name: str, optimizer: Optimizer, values: Mapping[str, Any]) -> None:
    """Options and state mean something else to an optimizer of another class, even under the same names."""
    saved, current = values.get("class"), type(optimizer).__name__
    if saved not in (None, current):
        raise CheckpointError(
            f"Optimizer {name!r} was of class {saved} and is {current} now: it would go on with the other's learning "
            f"rate, decay and state. Use {saved} again, or begin another experiment from the checkpoint: with "
            'branch=BranchParameters(optimizer="new"), or from its weights alone, CheckpointParameters(init_from=<its '
            "path>)."
        )


def _options_by_group(
    name: str, optimizer: Optimizer, fqns: Mapping[Tensor, str], saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """For each group of `optimizer`, the saved options of its parameters' group; of a group without any, as stages of a
    pipeline have, those of the group in its place."""
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


def _allocate(
    parameter: nn.Parameter, group: Mapping[str, Any], key: str, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    if key == "step":
        on_device = group.get("fused") or group.get("capturable")
        return torch.empty(shape, dtype=dtype, device=parameter.device if on_device else "cpu")
    if shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=parameter.device)
