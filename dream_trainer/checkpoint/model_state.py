"""Models' named parameters and buffers, as references that a checkpoint is written from and loaded into, with digests.

Names are those of `state_dict()` under `models.<name>.`; a tied tensor is stored once, under its first name."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dream_trainer.checkpoint.blocks import Part, part_of
from dream_trainer.checkpoint.files import content_checksum
from dream_trainer.checks import listed
from dream_trainer.compat.pytorch import gathered_twins, is_dtensor, local_tensor
from dream_trainer.config.serialize import to_dict
from dream_trainer.distributed.ranks import Ranks
from dream_trainer.errors import CheckpointError
from dream_trainer.modules.metrics import parts
from dream_trainer.parallel.sharding import fsdp_modules, names_in_whole
from dream_trainer.screen import logger

EXTRA_STATE = "_extra_state"


def model_tensors(models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Parameters and persistent buffers of all models by `models.<name>.<fqn>`, detached, sharing memory with them."""
    return {name: tensor.detach() for name, tensor in _stored(models)}


def stored_in_place(model: nn.Module, called: str) -> dict[str, Tensor]:
    """The `state_dict()` of a model without extra state: its parameters and buffers themselves, under all names."""
    owned = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    state = model.state_dict(keep_vars=True)
    state = {name: value for name, value in state.items() if name.rpartition(".")[2] != EXTRA_STATE}
    for name, value in state.items():
        if id(value) not in owned:
            raise CheckpointError(
                f"state_dict() of {called} gives {name!r}, which is not one of its parameters or buffers; it cannot be "
                "loaded in place. Return such values from get_extra_state() instead."
            )
    return state


def _stored(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor that is stored, as the module holds it, under its first name."""
    for model_name, model in models.items():
        seen: set[int] = set()
        whole = names_in_whole(model)
        for fqn, value in stored_in_place(model, f"model {model_name!r}").items():
            if id(value) in seen:
                continue
            seen.add(id(value))
            yield f"models.{model_name}.{whole[fqn][0] if fqn in whole else fqn}", value


def model_buffers(models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Those of `model_tensors` that are not parameters, so that a forward may change them."""
    return {name: tensor for name, tensor in _stored(models) if not isinstance(tensor, nn.Parameter)}


def model_parameters(models: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Those of `model_tensors` that are parameters: the parameters themselves."""
    return {name: tensor for name, tensor in _stored(models) if isinstance(tensor, nn.Parameter)}


def model_configs(models: Mapping[str, nn.Module]) -> dict[str, dict[str, Any]]:
    """Each model's `config` as a dict, if it is a dataclass or has a `to_dict()`: saved for exports."""
    configs: dict[str, dict[str, Any]] = {}
    for name, model in models.items():
        config: Any = getattr(model, "config", None)
        with suppress(TypeError, ValueError):  # a config of some other kind: exports are made without it
            if hasattr(config, "to_dict"):
                values = config.to_dict()
            elif is_dataclass(config) and not isinstance(config, type):
                values = to_dict(config)
            else:
                continue
            json.dumps(values)
            configs[name] = values
    return configs


def parameter_fqns(models: Mapping[str, nn.Module]) -> dict[Tensor, str]:
    """Each parameter's name as `<model>.<fqn>`, the key of optimizer state. A tied one has its first name."""
    names: dict[Tensor, str] = {}
    for name, parameter in model_parameters(models).items():
        names.setdefault(parameter, name.removeprefix("models."))
    return names


def model_extra_state(models: Mapping[str, nn.Module]) -> dict[str, dict[str, Any]]:
    """Results of the modules' `get_extra_state()`, as `{model: {module fqn: value}}`; for typed JSON."""
    return {
        name: {
            fqn: module.get_extra_state()
            for fqn, module in model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        for name, model in models.items()
    }


def load_model_extra_state(models: Mapping[str, nn.Module], extra_state: Mapping[str, Mapping[str, Any]]) -> None:
    current = {(name, fqn) for name, values in model_extra_state(models).items() for fqn in values}
    saved = {(name, fqn) for name, values in extra_state.items() for fqn in values}
    if current != saved:
        raise CheckpointError(
            f"Modules with extra state differ: only in the checkpoint {sorted(saved - current)}, only here "
            f"{sorted(current - saved)}. Was a layer added, removed or renamed since?"
        )
    for name, values in extra_state.items():
        for fqn, value in values.items():
            models[name].get_submodule(fqn).set_extra_state(value)


def rank_buffers(models: Mapping[str, nn.Module], *, world: Ranks) -> dict[str, Tensor]:
    """The unsharded tensors whose values on this rank differ from rank 0's, as BatchNorm's, or as FSDP2's
    `ignored_params`, which nothing synchronises; one collective."""
    if world.world_size == 1:
        return {}
    candidates = _unsharded(models)
    checksums = {name: value_checksum(tensor) for name, tensor in candidates.items()}
    of_rank_0 = world.all_gather_object(checksums if world.is_main else None)[0]
    return {name: candidates[name] for name, value in checksums.items() if of_rank_0.get(name) not in (None, value)}


def _unsharded(models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    unsharded = {}
    for name, model in models.items():
        sharded = any(is_dtensor(parameter) for parameter in model.parameters())
        for key, tensor in _stored({name: model}):
            if not is_dtensor(tensor) and (sharded or not isinstance(tensor, nn.Parameter)):
                unsharded[key] = tensor.detach()
    return unsharded


def value_checksum(tensor: Tensor) -> str:
    """A text that is equal for plain tensors of one shape, type and value."""
    values = tensor.detach().cpu().contiguous().reshape(-1)
    content = content_checksum(values.view(torch.uint8).numpy().tobytes() if values.numel() else b"")
    return f"{tuple(tensor.shape)} {tensor.dtype} {content}"


@torch.no_grad()
def load_rank_buffers(
    models: Mapping[str, nn.Module], buffers: Mapping[str, Tensor], reshaped: Collection[str] = ()
) -> None:
    """Restores on this rank what `rank_buffers` returned, after the common values were loaded."""
    saved = {name: value for name, value in buffers.items() if name.startswith("models.")}
    take_shapes(models, reshaped, {name: value.shape for name, value in saved.items()})
    targets = _unsharded(models)
    for name, value in saved.items():
        target = targets.get(name)
        if target is None or value.shape != target.shape or value.dtype != target.dtype:
            raise CheckpointError(
                f"This rank's {name} ({tuple(value.shape)} {value.dtype}) does not fit the model. "
                "Was the layer removed, renamed or changed since?"
            )
        target.copy_(value)


@torch.no_grad()
def take_shapes(models: Mapping[str, nn.Module], names: Collection[str], shapes: Mapping[str, torch.Size]) -> None:
    """Gives buffers the shapes that they are loaded in; the tensors stay the ones that others hold."""
    for name, buffer in model_buffers(models).items():
        if name in names and name in shapes and buffer.shape != shapes[name]:
            buffer.data = torch.empty(shapes[name], dtype=buffer.dtype, device=buffer.device)


# -- Changes to models in training other than values: which parameters learn, modes of modules, shapes of buffers.


class ModelForm:
    """The form of a run's models, compared with that of its setup."""

    def __init__(self) -> None:
        self._of_setup: dict[str, dict[str, Any]] = {}

    def note(self, models: Mapping[str, nn.Module]) -> None:
        """The setup is over, and nothing is resumed yet."""
        self._of_setup = _form(models)

    def state(self, models: Mapping[str, nn.Module], world: Ranks) -> dict[str, Any]:
        """The form, and its changes since the setup, as lists of names for a checkpoint; a collective."""
        now = _form(models) | ({"switched": {}} if world.stages > 1 else {})
        own = {
            "frozen": [name for name, learns in now["thawed"].items() if not learns],
            "evaluating": [name for name, trains in now["switched"].items() if not trains],
            **self._changed(now),
        }
        if world.stages > 1:  # each stage only knows its own modules
            of_ranks = world.all_gather_object(own)
            return {key: sorted({name for of_rank in of_ranks for name in of_rank[key]}) for key in own}
        return own | {"reshaped": sorted(set().union(*world.all_gather_object(own["reshaped"])))}

    def reshaped(self, models: Mapping[str, nn.Module], saved: Mapping[str, Any]) -> set[str]:
        """The buffers that training has given another shape, here or in the run that wrote `saved`."""
        return {*saved.get("reshaped", ()), *self._changed(_form(models))["reshaped"]}

    def restore(self, models: Mapping[str, nn.Module], saved: Mapping[str, Any], world: Ranks) -> None:
        if not saved:
            return
        parameters, modules = model_parameters(models), _modules(models) if world.stages == 1 else {}
        frozen, evaluating = set(saved["frozen"]), set(saved["evaluating"])
        here = self._changed(_form(models))
        for name in parameters.keys() & {*saved["thawed"], *here["thawed"]}:
            parameters[name].requires_grad_(name not in frozen)
        for module in (wrapped for model in models.values() for wrapped in fsdp_modules(model)):
            for sharded, gathered in gathered_twins(module):
                gathered.requires_grad_(sharded.requires_grad)
        for name in modules.keys() & {*saved["switched"], *here["switched"]}:
            modules[name].training = name not in evaluating
        left = [name.removeprefix("models.") for name, p in parameters.items() if p.requires_grad is (name in frozen)]
        if left and world.is_main:
            logger.warning(
                "requires_grad of %s is as this run's setup has it, and was not so in the checkpoint", listed(left, 5)
            )

    def _changed(self, now: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
        """The names that have another value than after the setup, of each kind."""
        return {
            kind: [name for name, one in of.items() if self._of_setup.get(kind, {}).get(name, one) != one]
            for kind, of in now.items()
        }


def _form(models: Mapping[str, nn.Module]) -> dict[str, dict[str, Any]]:
    """Which parameters learn, the modes of modules and the shapes of buffers, by what a change of them is called."""
    return {
        "thawed": {name: parameter.requires_grad for name, parameter in model_parameters(models).items()},
        "switched": {name: module.training for name, module in _modules(models).items()},
        "reshaped": {name: buffer.shape for name, buffer in model_buffers(models).items() if not is_dtensor(buffer)},
    }


def _modules(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {
        f"models.{model_name}.{name}".rstrip("."): module
        for model_name, model in models.items()
        for name, module in model.named_modules()
    }


# -- Metrics that training updates: each rank saves its own.


PREFIX = "metrics."
"""Tensor names are `metrics.<metric>.<number of the part>.<state>`; entries of a list state `....<state>.<number>`."""

State = tuple[dict[str, Any], Mapping[str, Tensor]]


def metric_state(metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """The record of this rank's metrics, copies of their tensors, and names that are left out, having others' state."""
    described: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    left_out = []
    for name, metric in metrics.items():
        if isinstance(metric, sys.modules["torchmetrics"].MetricCollection):
            list(metric.values(copy_state=False))  # members that share a state get it only when asked for
        found, record = dict[str, Any](), []
        for number, part in enumerate(parts(metric)):
            state, prefix = part.metric_state, f"{PREFIX}{name}.{number}."
            lengths = {key: len(value) if isinstance(value, list) else None for key, value in state.items()}
            record.append({"updates": part.update_count, "states": lengths})
            for key, value in state.items():
                entries = {f"{prefix}{key}": value}
                if isinstance(value, list):
                    entries = {f"{prefix}{key}.{index}": entry for index, entry in enumerate(value)}
                found |= entries
        if all(isinstance(entry, Tensor) for entry in found.values()):
            described[name] = record
            tensors |= {key: entry.detach().clone() for key, entry in found.items()}
        else:
            left_out.append(name)
    return described, tensors, left_out


def load_metric_state(metrics: Mapping[str, Any], saved: list[State]) -> list[str]:
    """Loads the combined state of former ranks; returns the names of metrics that start from zero instead."""
    lost = {name for described, _ in saved for name in described} - metrics.keys()
    for name, metric in metrics.items():
        states = [(described[name], tensors) for described, tensors in saved if name in described]
        metric_parts = parts(metric)
        fits = all(
            [entry["states"].keys() for entry in described] == [part.metric_state.keys() for part in metric_parts]
            for described, _ in states
        )
        joins = len(states) == 1 or all(
            part._reductions[key] in _ways() for part in metric_parts for key in part.metric_state
        )
        if states and not (fits and joins):
            lost.add(name)
            continue
        for number, part in enumerate(metric_parts if states else ()):
            _load_part(part, f"{PREFIX}{name}.{number}.", [(entry[number], tensors) for entry, tensors in states])
    return sorted(lost)


def _load_part(part: Any, prefix: str, states: list[State]) -> None:
    part.reset()
    for key in part.metric_state:
        values: list[Any] = []
        for described, tensors in states:
            length = described["states"][key]
            if length is None:
                values.append(tensors[f"{prefix}{key}"].to(part.device))
            else:
                values.append([tensors[f"{prefix}{key}.{index}"].to(part.device) for index in range(length)])
        value = values[0]
        for other in values[1:]:
            value = _ways()[part._reductions[key]](value, other)
        setattr(part, key, value)
    part._update_count = sum(described["updates"] for described, _ in states)


def _ways() -> dict[Any, Callable[[Any, Any], Any]]:
    """Maps a metric's reduction functions to functions that combine two ranks' states."""
    utilities = sys.modules["torchmetrics"].utilities.data
    return {
        utilities.dim_zero_sum: torch.add,
        utilities.dim_zero_max: torch.maximum,
        utilities.dim_zero_min: torch.minimum,
        utilities.dim_zero_cat: lambda one, other: (
            one + other if isinstance(one, list) else torch.cat([torch.atleast_1d(one), torch.atleast_1d(other)])
        ),
    }


# -- Digests of tensors' values, the same however they are sharded: sums modulo 2^64 of bits mixed with positions.
#
# They find accidents, such as another file or dtype, and do not protect against tampering.

_CHUNK = 1 << 20  # elements: temporaries stay in the processor's cache, and are small compared with a model on a device
_MASK = (1 << 64) - 1
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # of splitmix64, as signed numbers

# First row, last row and number of rows of each dimension: ranks with equal ones hold copies of one shard.
_Shard = tuple[tuple[int, int, int], ...]


@torch.no_grad()
def value_digests(tensors: Mapping[str, Tensor], *, world: Ranks) -> dict[str, str]:
    """A text for each tensor, `"float32 (8, 8) 03f1..."`, equal where dtype, shape and all bits are; one collective."""
    own = {name: _sum_of_shard(tensor) for name, tensor in tensors.items()}
    kinds = {name: f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for name, t in tensors.items()}
    shards: dict[str, dict[_Shard, int]] = {}
    for sums, kinds_there in world.all_gather_object((own, kinds)):
        kinds |= kinds_there
        for name, (shard, total) in sums.items():
            shards.setdefault(name, {}).setdefault(shard, total)
    return {name: f"{kinds[name]} {sum(totals.values()) & _MASK:016x}" for name, totals in shards.items()}


def _sum_of_shard(tensor: Tensor) -> tuple[_Shard, int]:
    """Which part of the tensor this rank has, and the sum over it."""
    local = local_tensor(tensor.detach())
    if not local.numel():
        return (), 0
    part = part_of(tensor)
    shard = tuple((cut.start, cut.stop - 1, size) for cut, size in zip(part.box, local.shape, strict=True))
    rows = {dim: of_dim.to(local.device) for dim, of_dim in part.rows.items()}
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for start, bits in _bits(local):
        positions = torch.arange(start, start + len(bits), device=local.device)
        if local.shape != tensor.shape:
            positions = _in_whole(positions, local.shape, tensor.shape, Part(part.box, rows))
        total += _mixed(positions, bits).sum()
    return shard, int(total) & _MASK


def _bits(local: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The elements in chunks, as integers, each with the place of its first."""
    flat = local.resolve_conj().resolve_neg().reshape(-1)
    for start in range(0, len(flat), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        if chunk.element_size() == 16:
            real, imaginary = torch.view_as_real(chunk).unbind(-1)
            yield start, real.view(torch.int64) * _FACTORS[1] + imaginary.view(torch.int64)
        else:
            yield start, chunk.view(_INTEGERS[chunk.element_size()]).to(torch.int64)


def _in_whole(positions: Tensor, local: torch.Size, whole: torch.Size, part: Part) -> Tensor:
    """Places in a shard's memory as places in the whole tensor's."""
    if not part.rows and local[1:] == whole[1:]:  # as fully_shard cuts: one piece of the whole
        return positions + int(part.box[0].start) * math.prod(local[1:])
    result = torch.zeros_like(positions)
    stride = 1
    for dim in reversed(range(len(local))):
        index = positions % local[dim]
        positions = positions // local[dim]
        result += (part.box[dim].start + (part.rows[dim][index] if dim in part.rows else index)) * stride
        stride *= whole[dim]
    return result


def _mixed(positions: Tensor, bits: Tensor) -> Tensor:
    """A number of 64 bits for each pair, in whose sums no two pairs cancel by their form."""
    first, second, third = _FACTORS
    mixed = positions.mul_(first).add_(bits)
    mixed = _shifted(mixed, 30).mul_(second)
    mixed = _shifted(mixed, 27).mul_(third)
    return _shifted(mixed, 31)


def _shifted(value: Tensor, bits: int) -> Tensor:
    # A right shift brings the sign bit in, which is masked out again.
    return value.bitwise_xor_((value >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def frozen_digests(models: Mapping[str, nn.Module], world: Ranks) -> dict[str, str]:
    """The digests of the parameters that are frozen now, by the names that checkpoints have; a collective."""
    return value_digests({name: p for name, p in model_parameters(models).items() if not p.requires_grad}, world=world)


def refuse_other_weights(
    path: Path, models: Mapping[str, nn.Module], left_out: Mapping[str, Mapping[str, str]], *, world: Ranks
) -> None:
    """Compares the weights that a checkpoint left out with those that are there; a collective."""
    here = {name: p for name, p in model_parameters(models).items() if name in left_out}
    digests = value_digests(here, world=world)
    different = [
        f"{name} ({about['digest']} then, {digests.get(name, 'not here')} now)"
        for name, about in left_out.items()
        if digests.get(name) != about["digest"]
    ]
    if not different:
        return
    paths = sorted({about["path"] for about in left_out.values() if "path" in about})
    raise CheckpointError(
        f"Could not load {path}: it was saved without the frozen weights, and {len(different)} of those "
        f"{len(left_out)} are not what this run has: {listed(different, 5)}. "
        "Load the same ones in load_pretrained" + (f"; they came from {', '.join(paths)}." if paths else ".")
    )
