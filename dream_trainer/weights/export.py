"""Weights in Hugging Face's layout, from a checkpoint or a live model, with one tensor in memory at a time; and pushing
them to the Hub, with a model card drawn from the checkpoint."""

from __future__ import annotations

import ast
import json
import re
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dream_trainer.checkpoint.blocks import WeightFiles, whole_box
from dream_trainer.checkpoint.manifest import Manifest, find_checkpoint, read_manifest
from dream_trainer.checkpoint.model_state import model_tensors, value_digests
from dream_trainer.checkpoint.safe_dcp import DcpTensors, read_metadata
from dream_trainer.checkpoint.store import read_shared
from dream_trainer.checks import refuse
from dream_trainer.compat.peft import Adapters
from dream_trainer.compat.pytorch import is_dtensor
from dream_trainer.distributed.ranks import Ranks, from_main_rank, on_all_ranks
from dream_trainer.errors import CheckpointError, ConfigError
from dream_trainer.stores.store_path import as_path
from dream_trainer.weights.adapters import adapters_from, merged_reader, whole_adapters
from dream_trainer.weights.weight_files import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    DTYPE_NAMES,
    FilePlan,
    TensorSpec,
    below,
    check_target,
    choose_model,
    model_names,
    open_weights,
    plan_files,
    renamer,
    write_files,
)

_WEIGHTS = re.compile(r"model|(ema|swa)(?:\.(\d+))?")
_CHUNK = 1 << 24  # elements compared at once, so that float64 copies stay small


class Options(TypedDict, total=False):
    """Options of every export."""

    dtype: torch.dtype | None
    max_shard_size: int | str
    renames: Mapping[str, str] | None  # as in `load_weights`
    merge_adapters: bool  # adds a peft model's adapters to the base, instead of writing them in peft's layout
    overwrite: bool


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    model: str | None = None,
    weights: str = "model",
    base: Path | None = None,
    **options: Unpack[Options],
) -> list[Path]:
    """Exports a model's weights from a checkpoint, in one process, as `export_model` does a live model's. All is as for
    `dream-trainer checkpoints export` (docs/cli-checkpoints.md). Where ranks had different values of an unsharded
    buffer (BatchNorm statistics), rank 0's are exported."""
    stored, shared = StoredTensors(as_path(checkpoint)), read_shared(as_path(checkpoint))
    chosen = choose_model(model_names(stored.specs, shared), model, of=stored.manifest.path)
    sources, records = _sources(stored, chosen, weights), shared.get("left_out", {})
    of_model = below(records, f"models.{chosen}.")
    left_out, read_left_out = _left_out({name: records[full] for name, full in of_model.items()}, base)
    record = shared.get("adapters", {}).get(chosen)
    plan, read, config = _content(
        Path(out),
        left_out | {name: stored.specs[source] for name, source in sources.items()},
        lambda name: stored.read(sources[name]) if name in sources else read_left_out(name),
        shared.get("model_configs", {}).get(chosen),
        None if record is None else adapters_from(record),
        options,
    )
    overwrite = options.get("overwrite", False)
    return write_files(Path(out), plan, read, config=config, overwrite=overwrite)


def _content(
    out: Path,
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], Tensor],
    config: Mapping[str, Any] | None,
    adapters: Adapters | None,
    options: Options,
) -> tuple[FilePlan, Callable[[str], Tensor], Mapping[str, Any] | None]:
    """An export's files with their tensors, a reader of these by their new names, and its config. They are the model's
    own tensors; of a model with adapters either these, or the base with them added."""
    dtype, merge_adapters = options.get("dtype"), options.get("merge_adapters", False)
    if config is not None and dtype is not None:
        config = {**config, **{key: _name(dtype) for key in ("dtype", "torch_dtype") if key in config}}
    if adapters is None:
        refuse(merge_adapters, "the model has no adapters of peft to merge. Leave merge_adapters out.", CheckpointError)
    elif merge_adapters:
        specs, read = {name: specs[source] for name, source in adapters.base.items()}, merged_reader(adapters, read)
    else:
        specs = {name: specs[source] for name, source in adapters.names.items()}
        read, config = partial(_read_as, adapters.names, read), adapters.config
    sources = renamer(options.get("renames"))(specs)
    cast = {name: _cast(specs[source], dtype) for name, source in sources.items()}
    are_adapters = adapters is not None and not merge_adapters
    plan = plan_files(out, cast, options.get("max_shard_size", "5GB"), are_adapters=are_adapters)
    return plan, partial(_read_as, sources, read), config


def _read_as(sources: Mapping[str, str], read: Callable[[str], Tensor], name: str) -> Tensor:
    return read(sources[name])


def export_model(
    model: nn.Module,
    out: Path,
    *,
    world: Ranks | None = None,
    config: Mapping[str, Any] | None = None,
    **options: Unpack[Options],
) -> list[Path]:
    """Exports a live model, sharded or not. Every rank of `world`, as in `load_weights`, calls this; rank 0 writes."""
    out, task, world = Path(out), f"export to {out}", world or Ranks.of_default_group()
    tensors = {name.removeprefix("models.model."): tensor for name, tensor in model_tensors({"model": model}).items()}

    overwrite = options.get("overwrite", False)
    before = None if options.get("merge_adapters") else options.get("dtype")  # merging is in the model's own type
    own = on_all_ranks(world, task, lambda: {name: _cast(_spec(tensor), before) for name, tensor in tensors.items()})
    specs, read = _of_all_stages(own, lambda name: _whole(tensors[name], before), world)
    adapters = whole_adapters({"model": model}, world).get("model")

    def prepare() -> tuple[FilePlan, Callable[[str], Tensor], Mapping[str, Any] | None]:
        if world.is_main:
            check_target(out, overwrite=overwrite)
        return _content(out, specs, read, config, adapters, options)

    plan, read_new, of_export = on_all_ranks(world, task, prepare)
    if any(of_rank != plan for of_rank in world.all_gather_object(plan)):
        raise CheckpointError(f"Could not {task}: the ranks have different tensors. Save a checkpoint and export that.")
    names = (name for specs in plan.values() for name in specs)

    def gather(_: str) -> Tensor:
        return read_new(next(names))

    def work() -> list[Path]:
        # Gathering is a collective: rank 0 takes part until the end, even if writing fails before.
        try:
            if not world.is_main:
                return []
            return write_files(out, plan, gather, config=of_export, overwrite=overwrite)
        finally:
            for name in names:
                read_new(name)

    written: list[Path] = world.all_gather_object(on_all_ranks(world, task, work))[0]
    return written


# -- A checkpoint's tensors one at a time, by one process without a process group or an accelerator.


class StoredTensors:
    """The named tensors of one checkpoint, assembled from the shards of all ranks."""

    def __init__(self, path: Path) -> None:
        self.manifest, metadata = read_metadata(path)
        self._files = DcpTensors(path, metadata, self.manifest)
        records = self._files.records.items()
        self.specs = {name: TensorSpec(tuple(record.size), record.properties.dtype) for name, record in records}
        self._verify = cache(self.manifest.verify)

    def read(self, name: str) -> Tensor:
        """The full tensor on the CPU. A shard file's checksum is compared before its first tensor is read."""
        box = whole_box(self.specs[name].shape)
        for file in self._files.checksums({name: box}):
            self._verify(file.name)
        return self._files.read(name, box)


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


def difference_of_tensors(first: StoredTensors, second: StoredTensors, *, values: bool) -> dict[str, Any]:
    """The tensors that only one checkpoint has, that differ in shape or dtype, and that differ in value."""
    common = [name for name in first.specs if name in second.specs]
    alike = [name for name in common if first.specs[name] == second.specs[name]]
    distances = {name: max_difference(first.read(name), second.read(name)) for name in alike if values}
    changed = {name: distance for name, distance in distances.items() if distance is not None}
    other = [name for name in common if name not in alike]
    return {
        "only_in_a": [name for name in first.specs if name not in second.specs],
        "only_in_b": [name for name in second.specs if name not in first.specs],
        "other_kind": {
            name: [f"{[*spec.shape]} {_name(spec.dtype)}" for spec in (first.specs[name], second.specs[name])]
            for name in other
        },
        "same_kind": len(alike),
        "equal": len(alike) - len(changed) if values else None,
        "max_difference": changed if values else None,
    }


def max_difference(a: Tensor, b: Tensor) -> float | None:
    """The largest absolute difference of tensors of one kind, NaN for NaN and a number; None if they are equal."""
    a, b = a.reshape(-1), b.reshape(-1)
    if a.numel() == 0 or torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return None
    kind = torch.complex128 if a.is_complex() else torch.float64
    largest = []
    for x, y in zip(a.split(_CHUNK), b.split(_CHUNK), strict=True):
        x, y = x.to(kind), y.to(kind)
        same = (x == y) | (x.isnan() & y.isnan())
        largest.append(torch.where(same, 0.0, (x - y).abs()).max())
    return float(torch.stack(largest).max())


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
    cast = tensor.to(_cast(_spec(tensor), dtype).dtype)  # before it is communicated
    return cast.full_tensor() if is_dtensor(cast) else cast


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_DTYPES = {_name(dtype): dtype for dtype in DTYPE_NAMES}
_DIGEST = re.compile(r"(\w+) (\(.*\)) [0-9a-f]{16}")


def _left_out(
    records: Mapping[str, Mapping[str, str]], base: Path | None
) -> tuple[dict[str, TensorSpec], Callable[[str], Tensor]]:
    """Tensors that the checkpoint left out, by the names that it would have for them, and their reader."""
    opened = cache(lambda path: open_weights(path, None))
    specs = {
        name: TensorSpec(tuple(ast.literal_eval(match[2])), _DTYPES[match[1]])
        for name, record in records.items()
        if (match := _DIGEST.fullmatch(record["digest"])) and match[1] in _DTYPES
    }

    def read(name: str) -> Tensor:
        record, spec = records[name], specs[name]
        if "path" not in record:
            raise CheckpointError(
                f"the checkpoint has no {name}, which was frozen, and does not know where it came from, since it was "
                "not loaded by load_weights. Export from the trainer instead: trainer.export(...)."
            )
        path = base or Path(record["path"])
        files: WeightFiles = opened(path)
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

    return specs, read


def _of_all_stages(
    own: Mapping[str, TensorSpec], read: Callable[[str], Tensor], world: Ranks
) -> tuple[Mapping[str, TensorSpec], Callable[[str], Tensor]]:
    """The tensors of all stages, and a function that brings one to rank 0, called by every rank in the same order."""
    if world.stages == 1:
        return own, read
    specs, holders = dict[str, TensorSpec](), dict[str, int]()
    for rank, of_rank in enumerate(world.all_gather_object(dict(own))):
        specs |= of_rank
        holders = dict.fromkeys(of_rank, rank) | holders

    def bring(name: str) -> Tensor:
        value, holder = read(name) if name in own else torch.empty(0), holders[name]
        if holder == 0 or world.rank not in (0, holder):
            return value
        # Bytes, since not every backend sends every type.
        if world.rank == holder:
            sent = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            dist.send(sent, group=world.cpu_group, group_dst=0)
            return value
        received = torch.empty(specs[name].shape, dtype=specs[name].dtype)
        dist.recv(received.reshape(-1).view(torch.uint8), group=world.cpu_group, group_src=holder)
        return received

    return specs, bring


# -- The Hub.


_TOLD = ("max_steps", "n_epochs", "global_batch_size", "gradient_clip_norm", "max_tokens")


def push_to_hub(
    source: str | Path,
    repo: str,
    *,
    step: int | None = None,
    model: str | None = None,
    weights: str = "model",
    merge_adapters: bool = False,
    base: Path | None = None,
    base_model: str | None = None,
    private: bool = True,
    message: str | None = None,
    world: Ranks | None = None,
) -> str:
    """Exports a checkpoint and uploads it to the Hugging Face Hub, with a model card drawn from it.

    Called by every rank of a job whose process group is there, as it is in a trainer's `with`: rank 0 works, and the
    others wait. `dream-trainer checkpoints push` does the same.

    Args:
        source: A run's directory (`trainer.run_dir`) or one of its checkpoints.
        repo: `owner/name` on the hub; created if there is none. The token is the one that `hf auth login` saved, or
            that of `HF_TOKEN`.
        step: Which checkpoint of a run; None for its newest whole one.
        model: The model, if there are several, as for `checkpoints export`.
        weights: "model" as trained, "ema" or "swa" as averaged by that callback.
        merge_adapters: Push the base with its adapters added, rather than the adapters.
        base: Present location of frozen weights that the checkpoint left out, if the run loaded them from elsewhere.
        base_model: The base's name on the hub, for the card and for `adapter_config.json`. Without it, the latter has
            the path on this machine.
        private: Whether a new repository is private.
        message: Message of the commit; by default the step.
        world: The ranks. Default: those of the default process group, or only this process without one.

    Returns:
        The address of the commit, on every rank.

    Raises:
        ConfigError: `huggingface_hub` is not installed, or `repo` is not a name of a repository.
        CheckpointError: There is no such checkpoint, the hub refused, or it was not reached. On several ranks, either
            as this, the same on all.
    """

    def push() -> str:
        try:
            from httpx import HTTPError
            from huggingface_hub import HfApi
            from huggingface_hub.errors import HfHubHTTPError, HFValidationError
        except ImportError as error:
            raise ConfigError("pushing needs huggingface_hub. Run pip install huggingface_hub.") from error
        checkpoint = find_checkpoint(as_path(source), step)
        manifest, api = read_manifest(checkpoint), HfApi(library_name="dream_trainer")
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "export"
            export_checkpoint(checkpoint, out, model=model, weights=weights, merge_adapters=merge_adapters, base=base)
            adapters = out / ADAPTER_CONFIG_NAME
            if base_model is not None and adapters.exists():
                config = json.loads(adapters.read_text()) | {"base_model_name_or_path": base_model}
                adapters.write_text(json.dumps(config, indent=2))
            (out / "README.md").write_text(_model_card(out, repo, manifest, base_model))
            words = message or f"Step {manifest.step}"
            try:
                api.create_repo(repo, private=private, exist_ok=True)
                commit = api.upload_folder(repo_id=repo, folder_path=out, commit_message=words)
            except HFValidationError as error:
                raise ConfigError(f"repo={repo!r} is not the name of a repository: {error}") from error
            except (HfHubHTTPError, HTTPError, OSError) as error:
                raise CheckpointError(f"could not push {checkpoint} to {repo}: {error}") from error
        return str(commit.commit_url)

    ranks = world or Ranks.of_default_group()
    return push() if ranks.world_size == 1 else from_main_rank(ranks, f"push {source} to {repo}", push)


def _model_card(directory: Path, repo: str, manifest: Manifest, base_model: str | None) -> str:
    """A model card: the files, their training and validation, and no path of this machine."""
    from huggingface_hub import ModelCardData

    config = directory / CONFIG_NAME
    library: str | None = None
    use = "Weights as safetensors, under the names of the model's `state_dict()`."
    if (directory / ADAPTER_CONFIG_NAME).exists():
        library, use = "peft", f'Adapters: `PeftModel.from_pretrained(base, "{repo}")`.'
    elif config.exists() and "model_type" in json.loads(config.read_text()):
        library, use = "transformers", f'`AutoModel.from_pretrained("{repo}")`, or the class of its task.'
    front = ModelCardData(library_name=library, base_model=base_model, tags=["dream-trainer"]).to_yaml()
    training: dict[str, Any] = manifest.config.get("training_parameters", {})
    told = {name: training[name] for name in _TOLD if training.get(name) is not None}
    rows = {
        "step": manifest.step,
        "epoch": manifest.epoch,
        "samples seen": manifest.samples_seen,
        **told,
        "seed": manifest.config.get("seed"),
        "ranks": manifest.world_size,
        **{f"{name} version": version for name, version in manifest.versions.items()},
    }
    parts = [f"---\n{front}\n---", f"# {repo.rpartition('/')[2]}", use, "## Training", _table(rows)]
    if manifest.metrics:
        parts += ["## Validation", _table({name: f"{value:.6g}" for name, value in manifest.metrics.items()})]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(rows: dict[str, Any]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())])
