"""Optimizers' state, keyed by the names of the parameters it belongs to.

DCP's `get_optimizer_state_dict` steps an optimizer that never stepped: Adam's bias correction is then one step off.
Plain state of a sharded parameter is saved for each rank if ranks differ in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from dream_trainer.checkpoint import typed_json
from dream_trainer.checkpoint.files import content_checksum
from dream_trainer.checkpoint.model_state import value_checksum
from dream_trainer.checkpoint.typed_json import TensorPath, joined_state, parameter_in, path_text, split_state
from dream_trainer.checks import listed
from dream_trainer.compat.pytorch import is_dtensor, local_tensor, shard_dim, storage_id
from dream_trainer.distributed.ranks import Ranks, on_all_ranks
from dream_trainer.errors import CheckpointError

OPTIMIZER_PREFIX = "optimizers."  # names: `optimizers.<name>.<parameter>.<key>`

RANK_PREFIX = "ranks."  # names of per-rank state begin with `ranks.<rank>.`

NO_OWNER = ""  # the part of an optimizer's state that belongs to no single parameter


class OptimizerState(NamedTuple):
    """An optimizer's state in a checkpoint: named tensors, values for typed JSON, and this rank's own records."""

    tensors: dict[str, Tensor]  # by `optimizers.<name>.<parameter>.<key>`; this rank's own after `ranks.<rank>.`
    values: dict[str, Any]  # "class", "groups", "state", and if there is something "whole", "each_rank", "inner"
    own: dict[str, dict[str, Any]]  # by the optimizer's name and the parameter


class _Part(NamedTuple):
    """The state of one parameter, or state that belongs to none."""

    record: dict[str, Any]
    tensors: dict[TensorPath, Tensor]
    digest: str
    """Of everything that is not in DTensors; without plain tensors of plain parameters, which replicas keep equal."""


def optimizer_state(name: str, optimizer: Optimizer, fqns: Mapping[Tensor, str], *, world: Ranks) -> OptimizerState:
    """An optimizer's state: its tensors as they are, and everything else for typed JSON; every rank calls this."""
    needs_digests = world.world_size > 1
    groups, parts = on_all_ranks(
        world, f"save optimizer {name!r}", lambda: _collect(name, optimizer, fqns, needs_digests=needs_digests)
    )
    each_rank = _of_each_rank(name, groups, parts, world)
    tensors, by_name = dict[str, Tensor](), parameters_by_name(optimizer, fqns)
    own: dict[str, dict[str, Any]] = {name: {}} if each_rank else {}
    for part, (record, found, _) in parts.items():
        is_local = part in each_rank
        for path, tensor in found.items():
            prefix = f"{RANK_PREFIX}{world.rank}." if is_local and not is_dtensor(tensor) else ""
            tensors[prefix + tensor_name(name, part, path)] = tensor
        if is_local:
            own[name][part] = record | {"places": places_of(by_name, part)}
    shared = {part: of.record for part, of in parts.items() if part not in each_rank}
    values: dict[str, Any] = {"class": type(optimizer).__name__, "groups": groups}
    values["state"] = {part: record for part, record in shared.items() if part != NO_OWNER}
    values |= {"whole": shared[NO_OWNER]} if NO_OWNER in shared else {}
    values |= {"each_rank": sorted(each_rank)} if each_rank else {}
    values |= {"has_own_state_dict": True} if has_own_state_dict(optimizer) else {}
    inner = {}
    for attribute, base in _inner_to_save(optimizer, parts, world):
        of_base = optimizer_state(f"{name}/{attribute}", base, fqns, world=world)
        tensors, own, inner[attribute] = tensors | of_base.tensors, own | of_base.own, of_base.values
    return OptimizerState(tensors, values | ({"inner": inner} if inner else {}), own)


def inner_optimizers(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """Optimizers that are attributes of another one and have their own state."""
    for attribute, value in vars(optimizer).items():
        if isinstance(value, Optimizer) and value.state is not optimizer.state:
            yield attribute, value


def _inner_to_save(optimizer: Optimizer, parts: Mapping[str, _Part], world: Ranks) -> list[tuple[str, Optimizer]]:
    """Those whose state the optimizer's own `state_dict` does not have; a collective if there are any."""
    inner = list(inner_optimizers(optimizer))
    if not inner or not has_own_state_dict(optimizer):
        return inner
    known = {storage_id(local_tensor(tensor)) for tensor in parts[NO_OWNER].tensors.values()}
    lacking = []
    for _, base in inner:
        held = [storage_id(local_tensor(tensor)) for tensor in split_state(dict(base.state), {})[1].values()]
        lacking.append(bool(base.state) and not (held and known.issuperset(held)))
    of_ranks = world.all_gather_object(lacking)
    return [one for number, one in enumerate(inner) if any(of_rank[number] for of_rank in of_ranks)]


def _collect(
    name: str, optimizer: Optimizer, fqns: Mapping[Tensor, str], *, needs_digests: bool
) -> tuple[list[dict[str, Any]], dict[str, _Part]]:
    check_parameters(optimizer, fqns)
    by_name, parts = parameters_by_name(optimizer, fqns), {}
    ordered = list(by_name.values())
    mesh = mesh_of(ordered)
    for part, state in _states(optimizer, fqns).items():
        record, tensors = split_state(state, fqns)
        layouts, on_host = [], []
        for path, tensor in tensors.items():
            if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
                raise CheckpointError(
                    f"{tensor_name(name, part, path)} is no dense tensor with values, which cannot be saved. "
                    "Keep dense tensors in the optimizer's state."
                )
            owner = owner_of(part, path, by_name, ordered)
            layout = layout_to_note(tensor, owner, mesh)
            layouts += [[list(path), layout]] if layout is not None else []
            is_beside = tensor.device.type == "cpu" and ordered[0].device.type != "cpu" and path[-1] != "step"
            on_host += [list(path)] if is_beside else []
        record |= {"layouts": layouts} if layouts else {}
        record |= {"on_host": on_host} if on_host else {}
        record |= {"sharded": True} if part == NO_OWNER and mesh is not None else {}
        text = typed_json.dumps(record, name=f"{OPTIMIZER_PREFIX}{name}.state.{part}".rstrip("."))
        is_compared = mesh is not None if part == NO_OWNER else is_dtensor(by_name[part])
        plain = [t for t in tensors.values() if is_compared and not is_dtensor(t)] if needs_digests else []
        digest = content_checksum("\n".join([text, *map(value_checksum, plain)]).encode()) if needs_digests else ""
        # Written and read again: so it is a copy (schedulers change `lr` tensors in place), and known to be readable.
        parts[part] = _Part(typed_json.loads(text), tensors, digest)
    names = [tensor_name(name, part, path) for part, of in parts.items() for path in of.tensors]
    if len(set(names)) < len(names):
        twice = next(one for one in names if names.count(one) > 1)
        raise CheckpointError(f"two tensors of its state would both be named {twice}. Give its state other keys.")
    groups = [
        {
            "parameters": [fqns[parameter] for parameter in group["params"]],
            "options": {key: value for key, value in group.items() if key not in MACHINE_OPTIONS},
        }
        for group in optimizer.param_groups
    ]
    return typed_json.loads(typed_json.dumps(groups, name=f"{OPTIMIZER_PREFIX}{name}.groups")), parts


def _states(optimizer: Optimizer, fqns: Mapping[Tensor, str]) -> dict[str, Mapping[Any, Any]]:
    """The parts of an optimizer's state by parameter; what belongs to none, or all of it, under `NO_OWNER`."""
    if has_own_state_dict(optimizer):
        return {NO_OWNER: optimizer.state_dict()}
    states: dict[str, Mapping[Any, Any]] = {
        fqns[key]: value for key, value in optimizer.state.items() if isinstance(key, Tensor)
    }
    others = {key: value for key, value in dict(optimizer.state).items() if not isinstance(key, Tensor)}
    return states | ({NO_OWNER: others} if others else {})


def parameters_by_name(optimizer: Optimizer, fqns: Mapping[Tensor, str]) -> dict[str, nn.Parameter]:
    """By name, in the order of an optimizer's own `state_dict`."""
    return {fqns[parameter]: parameter for group in optimizer.param_groups for parameter in group["params"]}


def owner_of(
    part: str, path: TensorPath, by_name: Mapping[str, nn.Parameter], ordered: Sequence[nn.Parameter]
) -> nn.Parameter | None:
    """The parameter that a state tensor belongs to: by its name or its position in PyTorch's form of a state dict."""
    if part != NO_OWNER:
        return by_name[part]
    for before, key in pairwise(path):
        if before == "state" and type(key) is int and 0 <= key < len(ordered):
            return ordered[key]
    return by_name.get(parameter_in(path) or "")


def tensor_name(name: str, part: str, path: TensorPath) -> str:
    owner = f"{name}/state_dict" if part == NO_OWNER else f"{name}.{part}"
    return f"{OPTIMIZER_PREFIX}{owner}.{path_text(path)}"


def places_of(by_name: Mapping[str, nn.Parameter], part: str) -> dict[str, Any]:
    """Which part this rank has of each parameter that a part of the state is of: equal places have equal parts."""
    places: dict[str, Any] = {}
    for name in by_name if part == NO_OWNER else (part,):
        parameter = by_name[name]
        places[name] = None
        if is_dtensor(parameter):
            mesh, cuts = parameter.device_mesh, [str(placement) for placement in parameter.placements]
            places[name] = [list(mesh.shape), cuts, list(mesh.get_coordinate() or ())]
    return places


def _of_each_rank(name: str, groups: Sequence[Mapping[str, Any]], parts: Mapping[str, _Part], world: Ranks) -> set[str]:
    """The parts that ranks with the same parameters have otherwise; a collective."""
    if world.world_size == 1:
        return set()
    digests = {part: of.digest for part, of in parts.items()}
    same = content_checksum(f"{name} {[group['parameters'] for group in groups]}".encode())
    of_ranks = world.all_gather_object((same, content_checksum(repr(sorted(digests.items())).encode())))
    differing = {NO_OWNER} if world.stages > 1 and NO_OWNER in parts else set()
    if len(set(of_ranks)) > len({of_rank for of_rank, _ in of_ranks}):
        of_same = [d for of_rank, d in world.all_gather_object((same, digests)) if of_rank == same]
        differing |= {part for part in set().union(*of_same) if len({d.get(part) for d in of_same}) > 1}
    return differing


def check_parameters(optimizer: Optimizer, fqns: Mapping[Tensor, str]) -> None:
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in fqns:
                raise CheckpointError(
                    f"Parameter group {index} of {type(optimizer).__name__} has a parameter of shape "
                    f"{tuple(parameter.shape)} that belongs to no model. Assign its module to the trainer in "
                    "configure_models."
                )
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    strangers = [key for key in optimizer.state if isinstance(key, Tensor) and key not in known]
    if strangers and not has_own_state_dict(optimizer):
        raise CheckpointError(
            f"{type(optimizer).__name__} holds state of a tensor of shape {tuple(strangers[0].shape)} that is in none "
            "of its groups. Keep state per parameter, so that it can be restored."
        )


def of_all_stages(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins one optimizer's values from all stages of a model."""
    if len({len(of_rank["groups"]) for of_rank in values}) > 1:
        raise CheckpointError(
            "the stages have different numbers of parameter groups in one optimizer. Make the same groups on each, an "
            "empty one where a stage has no such parameters."
        )
    groups = [dict(group) for group in values[0]["groups"]]
    for number, group in enumerate(groups):
        names = (name for of_rank in values for name in of_rank["groups"][number]["parameters"])
        group["parameters"] = list(dict.fromkeys(names))
    state = {name: of for of_rank in values for name, of in of_rank["state"].items()}
    each_rank = sorted({part for of_rank in values for part in of_rank.get("each_rank", ())})
    inner = {name: of_all_stages([of_rank["inner"][name] for of_rank in values]) for name in values[0].get("inner", ())}
    return {**values[0], "groups": groups, "state": state, "each_rank": each_rank, "inner": inner}


def of_one_stage(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The part of an optimizer's values that belongs to the parameters `names`; the rest is other stages'."""
    each_rank = [part for part in values.get("each_rank", ()) if part in (NO_OWNER, *names)]
    groups = values["groups"]
    if NO_OWNER in each_rank or not values.get("has_own_state_dict"):  # else its positions are those of one stage
        groups = [group | {"parameters": [name for name in group["parameters"] if name in names]} for group in groups]
    state = {name: of for name, of in values["state"].items() if name in names}
    inner = {name: of_one_stage(of, names) for name, of in values.get("inner", {}).items()}
    return {**values, "groups": groups, "state": state, "each_rank": each_rank, "inner": inner}


def has_own_of_ranks(values: Mapping[str, Any]) -> bool:
    return bool(values.get("each_rank")) or any(map(has_own_of_ranks, values.get("inner", {}).values()))


Layout = str | dict[str, int | None]
# `PLAIN`, or which dimension of the tensor each dimension of the mesh cuts; None for none.

PLAIN = "plain"


def mesh_of(parameters: Sequence[nn.Parameter]) -> DeviceMesh | None:
    return next((parameter.device_mesh for parameter in parameters if is_dtensor(parameter)), None)


def layout_to_note(tensor: Tensor, parameter: nn.Parameter | None, mesh: DeviceMesh | None) -> Layout | None:
    """A state tensor's layout, if it does not follow from its parameter."""
    has_its_shape = parameter is not None and tensor.shape == parameter.shape
    if not is_dtensor(tensor):
        return PLAIN if has_its_shape and tensor.ndim and is_dtensor(parameter) else None
    if has_its_shape and is_dtensor(parameter) and tensor.placements == parameter.placements:
        return None
    if tensor.device_mesh != mesh or any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"a DTensor with {tensor.placements} on {tensor.device_mesh} cannot be saved. Keep state on the mesh of "
            "the optimizer's parameters, as Shard or Replicate."
        )
    return {name: shard_dim(placement) for name, placement in zip(_names(mesh), tensor.placements, strict=True)}


def _names(mesh: DeviceMesh | None) -> tuple[str, ...]:
    assert mesh is not None
    return mesh.mesh_dim_names or tuple(str(number) for number in range(mesh.ndim))


# -- Loading, on any mesh. State is found by the names of parameters and replaces that of the optimizer.


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
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Restores an optimizer's groups and allocates its state, all or nothing. Returns the allocated tensors by name,
    for `load_tensors`, and a function to call when they are filled. State of the parameter's shape gets its layout and
    device; other state lies as `load_state_dict` places it."""
    check_parameters(optimizer, fqns)
    saved_class, here_class = values.get("class"), type(optimizer).__name__
    if saved_class not in (None, here_class):  # options and state mean something else to it, even under the same names
        raise CheckpointError(
            f"Optimizer {name!r} was of class {saved_class} and is {here_class} now: it would continue with the "
            f"other's learning rate, decay and state. Use {saved_class} again, or begin another experiment from the "
            'checkpoint with branch=BranchParameters(optimizer="new"), or only from its weights, '
            "CheckpointParameters(init_from=<its path>)."
        )
    is_whole = values.get("has_own_state_dict", False)
    options = _options_by_group(name, optimizer, fqns, values["groups"], by_position=is_whole)
    by_name = parameters_by_name(optimizer, fqns)
    local = _own_records(name, values, by_name, own or {})
    records = values["state"] | ({NO_OWNER: values["whole"]} if "whole" in values else {}) | local
    template = split_state(optimizer.state_dict(), fqns)[1] if is_whole else {}
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    ordered, allocated, found = list(by_name.values()), dict[str, Tensor](), dict[str, dict[TensorPath, Tensor]]()
    mesh = mesh_of(ordered)
    for part, record in records.items():
        layouts = {tuple(path): layout for path, layout in record.get("layouts", ())}
        on_host = {tuple(path) for path in record.get("on_host", ())}
        tensors = found[part] = {}
        for path in [*((key,) for key in record["tensors"]), *map(tuple, record.get("nested", ()))]:
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
            layout = layouts.get(path)
            if isinstance(layout, Mapping) and mesh is not None:
                from torch.distributed.tensor import Replicate, Shard, empty

                dims = [layout.get(dimension) for dimension in _names(mesh)]
                placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
                tensor = empty(shape, dtype=dtype, device_mesh=mesh, placements=placements).to(device)
            elif layout is None and like is not None and like.shape == shape:
                tensor = torch.empty_like(like, dtype=dtype, device=device, requires_grad=False)
            else:
                tensor = torch.empty(shape, dtype=dtype, device=device)
            tensors[path] = allocated[full_name] = tensor

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
            optimizer.state.update(state_of(part) if part == NO_OWNER else {by_name[part]: state_of(part)})

    def finish() -> None:
        if is_whole:
            load_own_state(name, optimizer, partial(state_of, NO_OWNER), with_options=with_options)
        for _, finish_base in inner:
            finish_base()

    for allocated_for_base, _ in inner:
        allocated |= allocated_for_base
    return allocated, finish


def _own_records(
    name: str, values: Mapping[str, Any], by_name: Mapping[str, nn.Parameter], own: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Any]:
    """The records of this rank, if it has the part of the parameters that the one that saved them had."""
    each_rank = values.get("each_rank")
    if not each_rank:
        return {}
    records = own.get(name)
    if records is None or any(record["places"] != places_of(by_name, part) for part, record in records.items()):
        parts = [part or "state_dict()" for part in each_rank]
        raise CheckpointError(
            f"each rank has separate state in optimizer {name!r} ({listed(parts, 5)}), which cannot be divided among "
            "other ranks, and this mesh has other parts of the parameters than the one that saved it. Resume on that "
            'mesh, or begin another experiment from this checkpoint with branch=BranchParameters(optimizer="new").'
        )
    return records


def _device(path: TensorPath, parameter: nn.Parameter, group: Mapping[str, Any]) -> torch.device:
    if path[-1] == "step" and not (group.get("fused") or group.get("capturable")):
        return torch.device("cpu")
    return parameter.device


def _options_by_group(
    name: str, optimizer: Optimizer, fqns: Mapping[Tensor, str], saved: list[dict[str, Any]], *, by_position: bool
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
    if by_position and current_groups != [group["parameters"] for group in saved]:
        raise CheckpointError(
            f"{type(optimizer).__name__} has its own state_dict, which identifies parameters by their position, and "
            f"optimizer {name!r} has them in another order or other groups than the checkpoint. Give it the parameters "
            "in the checkpoint's order."
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


# -- Optimizers whose class defines `state_dict`: its result is restored by the class's `load_state_dict`.
#
# The optimizer's state afterwards is compared with it, since casts and forgetful methods raise no error.


MACHINE_OPTIONS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Options of groups that checkpoints leave out: parameters, their names, and the machine's implementation."""

_GROUPS = "param_groups"
_NOTHING = object()


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Whether its class overrides `state_dict` or `load_state_dict`."""
    kind = type(optimizer)
    return kind.state_dict is not Optimizer.state_dict or kind.load_state_dict is not Optimizer.load_state_dict


@torch.no_grad()
def load_own_state(name: str, optimizer: Optimizer, make: Callable[[], dict[str, Any]], *, with_options: bool) -> None:
    """Restores an optimizer's own `state_dict`, with the parameters of this process."""
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
    where = _first_difference(given, optimizer.state_dict())
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


def _first_difference(given: Any, found: Any, path: TensorPath = ()) -> TensorPath | None:
    """The path of the first value in `given` that `found` has otherwise, outside groups; None if there is none."""
    if isinstance(given, list | tuple) and isinstance(found, list | tuple):
        given, found = dict(enumerate(given)), dict(enumerate(found))
    if isinstance(given, Mapping) and isinstance(found, Mapping):
        pairs = ((key, given.get(key, _NOTHING), found.get(key, _NOTHING)) for key in {**given, **found})
        different = (_first_difference(a, b, (*path, key)) for key, a, b in pairs if key != _GROUPS)
        return next((where for where in different if where is not None), None)
    if type(given) is not type(found):
        is_same = False
    elif isinstance(given, Tensor):
        parts = local_tensor(given), local_tensor(found)
        is_same = given.shape == found.shape and value_checksum(parts[0]) == value_checksum(parts[1])
    else:
        is_same = repr(given) == repr(found)
    return None if is_same else path
