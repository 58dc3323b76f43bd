"""Weights in Hugging Face's layout, from a checkpoint or a live model, with one tensor in memory at a time."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dream_trainer.checkpoint.blocks import WeightFiles, whole_box
from dream_trainer.checkpoint.digests import value_digests
from dream_trainer.checkpoint.model_state import model_tensors
from dream_trainer.checkpoint.store import read_shared
from dream_trainer.checks import refuse
from dream_trainer.compat.peft import Adapters
from dream_trainer.distributed.ranks import Ranks, on_all_ranks
from dream_trainer.errors import CheckpointError, ConfigError
from dream_trainer.stores.store_path import as_path
from dream_trainer.weights.adapters import adapters_from, merged_reader, whole_adapters
from dream_trainer.weights.export_files import (
    DTYPE_NAMES,
    FilePlan,
    TensorSpec,
    check_target,
    plan_files,
    write_files,
)
from dream_trainer.weights.weight_files import below, choose_model, model_names, open_weights, renamer

if TYPE_CHECKING:
    from torch import nn

    from dream_trainer.weights.dcp_files import StoredTensors

_WEIGHTS = re.compile(r"model|(ema|swa)(?:\.(\d+))?")


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    model: str | None = None,
    weights: str = "model",
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    renames: Mapping[str, str] | None = None,
    merge_adapters: bool = False,
    base: Path | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Exports a model's weights from a checkpoint. Needs neither an accelerator nor a process group.

    If peft has wrapped the model, its adapters are exported, in peft's layout, unless `merge_adapters` merges them.

    Checksums are verified, and no code in a checkpoint is run. Where ranks had different values of an unsharded buffer
    (BatchNorm statistics), rank 0's are exported.

    Args:
        out: A directory: `model.safetensors`, or numbered shards with an index, and `config.json` if the model has a
            config. Or a file: one that ends in .safetensors, or in .pt or .pth for `torch.load`, which needs memory
            for all tensors at once.
        weights: "model" as trained; "ema" as averaged by the EMA callback, "ema.1" by the second one; "swa" by SWA.
            Tensors that a callback does not average, such as buffers, come from the model.
        renames: Regular expressions and their replacements for `re.sub`, applied in order to each name:
            `{r"^body\\.": "model.layers."}`. A name that becomes empty is left out.

    Returns:
        The files written.

    Raises:
        CheckpointError: The checkpoint is damaged or has no such weights, or the export cannot be written there.
        ConfigError: An argument is not understood.
    """
    from dream_trainer.weights.dcp_files import StoredTensors

    stored, shared = StoredTensors(as_path(checkpoint)), read_shared(as_path(checkpoint))
    chosen = choose_model(model_names(stored.specs, shared), model, of=stored.manifest.path)
    prefix, records = f"models.{chosen}.", shared.get("left_out", {})
    left_out = LeftOutWeights({name: records[full] for name, full in below(records, prefix).items()}, base)
    sources = _sources(stored, chosen, weights)
    specs = left_out.specs | {name: stored.specs[source] for name, source in sources.items()}

    def read(name: str) -> Tensor:
        return stored.read(sources[name]) if name in sources else left_out.read(name)

    record = shared.get("adapters", {}).get(chosen)
    config = _config(shared.get("model_configs", {}).get(chosen), dtype)
    adapters = None if record is None else adapters_from(record)
    content = _content(specs, read, config, adapters, merge_adapters=merge_adapters)
    names = renamer(renames)(content.specs)
    plan = content.plan(Path(out), names, dtype, max_shard_size)
    return write_files(
        Path(out), plan, lambda name: content.read(names[name]), config=content.config, overwrite=overwrite
    )


@dataclass(frozen=True)
class _Content:
    """A model's exported tensors, before names and dtypes are changed."""

    specs: Mapping[str, TensorSpec]
    read: Callable[[str], Tensor]
    config: Mapping[str, Any] | None
    are_adapters: bool = False

    def plan(
        self, out: Path, sources: Mapping[str, str], dtype: torch.dtype | None, max_shard_size: int | str
    ) -> FilePlan:
        specs = {name: _cast(self.specs[source], dtype) for name, source in sources.items()}
        return plan_files(out, specs, max_shard_size, are_adapters=self.are_adapters)


def _content(
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], Tensor],
    config: Mapping[str, Any] | None,
    adapters: Adapters | None,
    *,
    merge_adapters: bool,
) -> _Content:
    """The model's own tensors; of a model with adapters either these, or the base with them added."""
    if adapters is None:
        refuse(merge_adapters, "the model has no adapters of peft to merge. Leave merge_adapters out.", CheckpointError)
        return _Content(specs, read, config)
    if merge_adapters:
        merged = {name: specs[source] for name, source in adapters.base.items()}
        return _Content(merged, merged_reader(adapters, read), config)
    own = {name: specs[source] for name, source in adapters.names.items()}
    return _Content(own, lambda name: read(adapters.names[name]), adapters.config, are_adapters=True)


def export_model(
    model: nn.Module,
    out: Path,
    *,
    world: Ranks | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    config: Mapping[str, Any] | None = None,
    renames: Mapping[str, str] | None = None,
    merge_adapters: bool = False,
    overwrite: bool = False,
) -> list[Path]:
    """Exports a live model, sharded or not. Every rank of `world`, as in `load_weights`, calls this; rank 0 writes.

    If peft has wrapped the model, its adapters are exported, in peft's layout, unless `merge_adapters` merges them.

    Args:
        renames: Regular expressions and their replacements for `re.sub`, applied in order to each name:
            `{r"^body\\.": "model.layers."}`. A name that becomes empty is left out.

    Returns:
        The files written, on every rank.

    Raises:
        CheckpointError: The export cannot be written there, or an argument is not understood; the same on every rank.
    """
    out, task, world = Path(out), f"export to {out}", world or Ranks.of_default_group()
    tensors = {name.removeprefix("models.model."): tensor for name, tensor in model_tensors({"model": model}).items()}

    before = None if merge_adapters else dtype  # merging is in the model's own type
    own = on_all_ranks(world, task, lambda: {name: _cast(_spec(tensor), before) for name, tensor in tensors.items()})
    stored = StageTensors(own, lambda name: _whole(tensors[name], before), world)
    adapters = whole_adapters({"model": model}, world).get("model")

    def prepare() -> tuple[_Content, dict[str, str], FilePlan]:
        content = _content(stored.specs, stored.read, _config(config, dtype), adapters, merge_adapters=merge_adapters)
        sources = renamer(renames)(content.specs)
        if world.is_main:
            check_target(out, overwrite=overwrite)
        return content, sources, content.plan(out, sources, dtype, max_shard_size)

    content, sources, plan = on_all_ranks(world, task, prepare)
    if any(other != plan for other in world.all_gather_object(plan)):
        raise CheckpointError(f"Could not {task}: the ranks have different tensors. Save a checkpoint and export that.")
    names = (name for specs in plan.values() for name in specs)

    def gather(name: str) -> Tensor:
        return content.read(sources[name])

    def work() -> list[Path]:
        # Gathering is a collective: rank 0 takes part until the end, even if writing fails before.
        try:
            if not world.is_main:
                return []
            return write_files(out, plan, lambda _: gather(next(names)), config=content.config, overwrite=overwrite)
        finally:
            for name in names:
                gather(name)

    written: list[Path] = world.all_gather_object(on_all_ranks(world, task, work))[0]
    return written


def tensors_by_owner(stored: StoredTensors, shared: Mapping[str, Any]) -> dict[str, dict[str, TensorSpec]]:
    """A checkpoint's tensors by owner: `model net`, `optimizer adam`, `callback EMA 0`."""
    owners = {f"models.{name}.": f"model {name}" for name in model_names(stored.specs, shared)}
    for name in shared.get("optimizers", {}):  # with "/", its state that is not a parameter's
        owners |= {f"optimizers.{name}.": f"optimizer {name}", f"optimizers.{name}/": f"optimizer {name}"}
    groups: dict[str, dict[str, TensorSpec]] = {}
    for name, spec in stored.specs.items():
        callback = re.match(r"callbacks\.(\w+)\.(\d+)\.", name)
        shared_name = re.sub(r"^ranks\.\d+\.", "", name)
        known = next((owner for prefix, owner in owners.items() if shared_name.startswith(prefix)), "other")
        owner = f"callback {callback[1]} {callback[2]}" if callback else known
        groups.setdefault(owner, {})[name] = spec
    return groups


def _sources(stored: StoredTensors, model: str, weights: str) -> dict[str, str]:
    """The name within the model to the tensor's name in the checkpoint."""
    match = _WEIGHTS.fullmatch(weights)
    if match is None:
        raise ConfigError(
            f'weights={weights!r} is not understood. Use "model", "ema" or "swa", or "ema.1" for the second EMA.'
        )
    sources = below(stored.specs, f"models.{model}.")
    if weights == "model":
        return sources
    kind = match[1].upper()
    averaged = below(stored.specs, f"callbacks.{kind}.{match[2] or 0}.{model}.")
    if not averaged:
        numbers = sorted({name.split(".")[2] for name in stored.specs if name.startswith(f"callbacks.{kind}.")})
        available = (
            f"It has {kind} callbacks {', '.join(numbers)}" if numbers else f"It was saved without an {kind} callback"
        )
        raise CheckpointError(
            f'{stored.manifest.path} has no {kind} of model {model!r} for weights="{weights}". {available}; '
            'weights="model" exports what was trained.'
        )
    return {fqn: averaged.get(fqn, source) for fqn, source in sources.items()}


def _cast(spec: TensorSpec, dtype: torch.dtype | None) -> TensorSpec:
    if dtype is None or not spec.dtype.is_floating_point:
        return spec
    if not dtype.is_floating_point:
        raise ConfigError(f"dtype={dtype} is not a floating-point type, which weights are cast to. Use torch.bfloat16.")
    return TensorSpec(spec.shape, dtype)


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def _whole(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    from torch.distributed.tensor import DTensor

    cast = tensor.to(_cast(_spec(tensor), dtype).dtype)  # before it is communicated
    return cast.full_tensor() if isinstance(cast, DTensor) else cast


def _config(config: Mapping[str, Any] | None, dtype: torch.dtype | None) -> dict[str, Any] | None:
    """The model's config, its dtype being that of the export."""
    if config is None:
        return None
    if dtype is None:
        return dict(config)
    cast = str(dtype).removeprefix("torch.")
    return {**config, **{key: cast for key in ("dtype", "torch_dtype") if key in config}}


_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}
_DIGEST = re.compile(r"(\w+) (\(.*\)) [0-9a-f]{16}")


class LeftOutWeights:
    """Tensors that the checkpoint left out, by the names that it would have for them."""

    def __init__(self, records: Mapping[str, Mapping[str, str]], base: Path | None) -> None:
        self._records, self._base = records, base
        self._files: dict[Path, WeightFiles] = {}
        self.specs: dict[str, TensorSpec] = {}
        for name, record in records.items():
            match = _DIGEST.fullmatch(record["digest"])
            if match is not None and match[1] in _DTYPES:
                self.specs[name] = TensorSpec(tuple(ast.literal_eval(match[2])), _DTYPES[match[1]])

    def read(self, name: str) -> Tensor:
        """The whole tensor on the CPU, its digest compared."""
        record, spec = self._records[name], self.specs[name]
        if "path" not in record:
            raise CheckpointError(
                f"the checkpoint has no {name}, which was frozen, and does not know where it came from, since it was "
                "not loaded by load_weights. Export from the trainer instead: trainer.export(...)."
            )
        path = self._base or Path(record["path"])
        if path not in self._files:
            self._files[path] = open_weights(path, None)
        files = self._files[path]
        if files.shapes.get(record["name"]) != spec.shape:
            raise CheckpointError(
                f"{path} has no {record['name']!r} of shape {spec.shape}, which {name} was loaded from."
            )
        tensor = files.read(record["name"], whole_box(spec.shape)).to(spec.dtype)
        if value_digests({name: tensor}, world=Ranks.alone())[name] != record["digest"]:
            raise CheckpointError(
                f"{record['name']!r} in {path} is not what {name} was when the checkpoint was saved. Give the file or "
                "directory that the run loaded (base=, --base)."
            )
        return tensor


class StageTensors:
    """Brings tensors to rank 0, one at a time. Making one is a collective where there are several stages."""

    def __init__(self, own: Mapping[str, TensorSpec], read: Callable[[str], Tensor], world: Ranks) -> None:
        self._own, self._read, self._world = own, read, world
        self.specs = dict(own)
        self._holders: dict[str, int] = {}
        if world.stages == 1:
            return
        for rank, specs in enumerate(world.all_gather_object(dict(own))):
            for name in specs:
                self._holders.setdefault(name, rank)
            self.specs = {**specs, **self.specs} if rank == 0 else self.specs | specs

    def read(self, name: str) -> Tensor:
        """A tensor, in whole, on rank 0; elsewhere whatever is there. Every rank calls this, in the same order."""
        value = self._read(name) if name in self._own else torch.empty(0)
        holder = self._holders.get(name, 0)
        if holder == 0 or self._world.rank not in (0, holder):
            return value
        # Bytes, since not every backend sends every type.
        if self._world.rank == holder:
            sent = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            dist.send(sent, group=self._world.cpu_group, group_dst=0)
            return value
        spec = self.specs[name]
        received = torch.empty(spec.shape, dtype=spec.dtype)
        dist.recv(received.reshape(-1).view(torch.uint8), group=self._world.cpu_group, group_src=holder)
        return received
