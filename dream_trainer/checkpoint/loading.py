"""Reading a checkpoint back: its tensors into those of any mesh, and the states of all ranks or of one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dream_trainer.checkpoint import typed_json
from dream_trainer.checkpoint.files import SHARED_NAME, rank_name
from dream_trainer.checkpoint.manifest import Manifest, own_share, read_manifest
from dream_trainer.checks import listed
from dream_trainer.distributed.ranks import Ranks, from_all_ranks, on_all_ranks
from dream_trainer.errors import CheckpointError, DamagedCheckpointError
from dream_trainer.stores.store_path import StorePath

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


_LISTED = 20


def tensor_metadata(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Maps the names of a checkpoint's tensors to their global shapes and dtypes."""
    from dream_trainer.checkpoint.safe_dcp import read_metadata

    _, metadata = read_metadata(path)
    return {name: _kind(record) for name, record in metadata.state_dict_metadata.items()}


def _kind(record: Any) -> tuple[torch.Size, torch.dtype]:
    return record.size, record.properties.dtype


def load_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, world: Ranks, optional_prefix: str | tuple[str, ...] = ()
) -> None:
    """Fills tensors in place, by each rank, from shards of any mesh; names, shapes and dtypes are compared before.

    One of the ranks hashes each complete shard file. Damage leaves the tensors' values undefined."""
    from dream_trainer.checkpoint.safe_dcp import read_and_verify, read_from_store, read_metadata

    task = f"load {path}"
    manifest, metadata = on_all_ranks(world, task, lambda: read_metadata(path))
    unused = from_all_ranks(world, task, lambda: _compare(metadata, tensors))
    # With stages no rank has all names: only what no rank asks for is left over.
    left_over = {name for name in set.intersection(*unused) if not name.startswith(optional_prefix)}
    if left_over:
        raise CheckpointError(
            f"Could not {task}: it contains {listed(sorted(left_over), _LISTED)}, which this run does not have. "
            "Was a layer or an optimizer removed, renamed or frozen since?"
        )
    shards = own_share(manifest.shards, manifest.path, world)
    read = read_from_store if isinstance(manifest.path, StorePath) else read_and_verify
    on_all_ranks(world, task, lambda: read(manifest, metadata, tensors, shards))


def _compare(metadata: Metadata, tensors: Mapping[str, Tensor]) -> set[str]:
    """Compares saved tensors with the tensors to load into; returns the saved names that are not among them."""
    records = metadata.state_dict_metadata
    missing = set(tensors) - set(records)
    if missing:
        raise CheckpointError(
            f"the checkpoint has no {listed(sorted(missing), _LISTED)}. Was a layer or an optimizer added, renamed or "
            "unfrozen since?"
        )
    different = []
    for name, tensor in tensors.items():
        shape, dtype = _kind(records[name])
        if shape != tensor.shape or dtype != tensor.dtype:
            different.append(f"{name} (saved {tuple(shape)} {dtype}, here {tuple(tensor.shape)} {tensor.dtype})")
    if different:
        raise CheckpointError(
            f"shapes or dtypes differ: {listed(sorted(different), _LISTED)}. Nothing is cast or cut to fit."
        )
    return set(records) - set(tensors)


def read_shared(path: Path) -> dict[str, Any]:
    return _read_json(read_manifest(path), SHARED_NAME)


def read_rank(path: Path, rank: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    manifest = read_manifest(path)
    if not 0 <= rank < manifest.world_size:
        raise CheckpointError(
            f"{path} was written by {manifest.world_size} ranks and has no state of rank {rank}. "
            "Reseed what belongs to a rank when the layout changed."
        )
    state = _read_json(manifest, f"{rank_name(rank)}.json")
    name = f"{rank_name(rank)}.safetensors"
    try:
        return state, load(manifest.read(name))
    except (SafetensorError, KeyError) as error:
        raise DamagedCheckpointError(f"{manifest.path / name} is not a safetensors file: {error}.") from error


def _read_json(manifest: Manifest, name: str) -> dict[str, Any]:
    content = manifest.read(name)
    try:
        state = typed_json.loads(content)
        if not isinstance(state, dict):
            raise ValueError(f"it contains an object of type {type(state).__name__} where a dict was written")
    except ValueError as error:
        raise DamagedCheckpointError(f"{manifest.path / name} is damaged: {error}.") from error
    return state
