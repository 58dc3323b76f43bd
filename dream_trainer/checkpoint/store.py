"""Writing a checkpoint so that it is either complete or does not exist, and reading it back.

<run_dir>/checkpoints/
  step_00001000/
    .metadata, __0_0.distcp, __1_0.distcp     tensors, by DCP: one shard file per rank
    shared.json                               state that is the same on all ranks
    rank_00000.json, rank_00000.safetensors   state of one rank: random states, loader position, ...
    manifest.json                             written last: step, config, sizes and checksums
  .step_00002000.tmp-5f3a...                  being written, or left by a killed job
  .step_00001000.replaced-8d2c...             for a moment, while another takes its place
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dream_trainer.checkpoint import typed_json
from dream_trainer.checkpoint.files import (
    SHARED_NAME,
    TEMPORARY_NAME,
    FileEntry,
    blaming,
    make_temporary,
    publish,
    rank_name,
    recover_replaced,
    remove_tree,
    step_name,
    sync_directory,
    within,
    write_file,
)
from dream_trainer.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    encode_manifest,
    own_share,
    read_manifest,
    verify_checkpoint,
)
from dream_trainer.checks import listed
from dream_trainer.distributed.ranks import Ranks, from_all_ranks, from_main_rank, on_all_ranks
from dream_trainer.errors import CheckpointError, DamagedCheckpointError
from dream_trainer.version import __version__

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.storage import WriteResult


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One rank's part of a checkpoint, taken at one moment. State other than tensors is already serialised."""

    step: int  # optimizer steps completed
    tensors: Mapping[str, Tensor]
    # Sharded (DTensor), or the same on all ranks (plain): of those any one rank's is saved. Ranks may differ in names.
    shared: bytes  # state that is the same on all ranks, as typed JSON; rank 0's is written
    rank_state: bytes  # state that only this rank has, as typed JSON
    rank_tensors: Mapping[str, Tensor]
    # Plain tensors that only this rank has, and those that differ from rank 0's, under their name in `tensors`.
    description: Mapping[str, Any]
    # The fields `epoch`, `samples_seen`, `mesh_shape`, `config`, `metrics` and `parent` of the manifest.


@dataclass
class KnownPlan:
    """The last save's plan on one rank, so that the same tensors are not planned again (tools/bench/planning.py)."""

    layout: dict[str, tuple[Any, ...]] | None = None  # maps names to tensors' layouts
    plan: SavePlan | None = None
    metadata: Metadata | None = None  # on rank 0, of all tensors


def write_checkpoint(
    root: Path,
    snapshot: Snapshot,
    *,
    world: Ranks,
    replace: bool = False,
    known: KnownPlan | None = None,
    job: Ranks | None = None,
) -> Path:
    """Writes a checkpoint and publishes it; every rank calls this, and `world` may be a host's of `job`. A whole one of
    the step is left as it is. An error removes the temporary directory and nothing else."""
    from safetensors.torch import save

    # Imported where used: DCP loads a good part of torch.distributed.
    from dream_trainer.checkpoint.dcp_writer import TensorWriter

    final = Path(root) / step_name(snapshot.step)
    task = f"write the checkpoint of step {snapshot.step} to {root}"

    def exists() -> bool:
        recover_replaced(final.parent)
        for entry in within(final.parent):
            if TEMPORARY_NAME.fullmatch(entry.name):  # left by a killed job
                remove_tree(entry)
        return final.exists()

    if from_main_rank(world, task, exists) and not replace:
        with suppress(DamagedCheckpointError):
            return verify_checkpoint(final, world=world).path
    temporary = from_main_rank(world, task, lambda: make_temporary(final.parent, snapshot.step))
    try:
        writer = TensorWriter(
            temporary, _offered(snapshot, world), rank=world.rank, known=known or KnownPlan(), is_whole=job is None
        )
        if not all(from_all_ranks(world, task, writer.knows_plan)):
            # Only rank 0 sees the plans of all: their number grows with that of ranks.
            plans = world.gather_object(on_all_ranks(world, task, writer.plan))
            merged = on_all_ranks(world, task, lambda: None if plans is None else writer.merge(plans))
            writer.take(world.scatter_object(merged))

        def write() -> tuple[list[WriteResult], dict[str, FileEntry]]:
            name = rank_name((job or world).rank)
            copies = {  # safetensors accepts neither views nor shared memory
                key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
                for key, tensor in snapshot.rank_tensors.items()
            }
            contents = {f"{name}.json": snapshot.rank_state, f"{name}.safetensors": save(copies)}
            if world.is_main:
                contents[SHARED_NAME] = snapshot.shared
            entries = {name: write_file(temporary / name, content) for name, content in contents.items()}
            results = writer.write()
            sync_directory(temporary)
            return results, entries | writer.entries

        written = world.gather_object(on_all_ranks(world, task, write))

        def commit() -> None:
            if written is not None:
                writer.write_metadata([results for results, _ in written])
                files = writer.entries | {name: entry for _, entries in written for name, entry in entries.items()}
                manifest = Manifest(
                    **snapshot.description,
                    path=final,
                    step=snapshot.step,
                    world_size=(job or world).world_size,
                    versions={"torch": str(torch.__version__), "dream_trainer": __version__},
                    wall_time=time.time(),
                    files=files,
                )
                write_file(temporary / MANIFEST_NAME, encode_manifest(manifest))
                publish(temporary, final)

        on_all_ranks(world, task, commit)
    except CheckpointError:
        # All ranks get here, so none writes any more. A killed rank does not raise CheckpointError: the others then
        # cannot know who still writes, and the next save removes what is left.
        if world.is_main:
            remove_tree(temporary)
        world.all_gather_object(None)  # so that it is gone on every rank
        raise
    return final


def _offered(snapshot: Snapshot, world: Ranks) -> dict[str, Tensor]:
    """The plan of what this rank could write for all; a collective."""
    own = {name for name in snapshot.tensors if name in snapshot.rank_tensors}
    of_some = set().union(*world.all_gather_object(own))
    if of_some:
        offered = set().union(*world.all_gather_object({name for name in snapshot.tensors if name in of_some - own}))
        own &= offered
    return {name: tensor for name, tensor in snapshot.tensors.items() if name not in own}


# -- Reading a checkpoint back: its tensors into those of any mesh, and the states of all ranks or of one.


_LISTED = 20


def tensor_metadata(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Maps the names of a checkpoint's tensors to their global shapes and dtypes."""
    from dream_trainer.checkpoint.safe_dcp import read_metadata

    _, metadata = read_metadata(path)
    records: dict[str, Any] = metadata.state_dict_metadata
    return {name: (record.size, record.properties.dtype) for name, record in records.items()}


def load_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, world: Ranks, optional_prefix: str | tuple[str, ...] = ()
) -> None:
    """Fills tensors in place, by each rank, from shards of any mesh; names, shapes and dtypes are compared before. One
    of the ranks hashes each complete shard file. Damage leaves the tensors' values undefined."""
    from dream_trainer.checkpoint.safe_dcp import read_metadata, read_tensors

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
    on_all_ranks(world, task, lambda: read_tensors(manifest, metadata, tensors, shards))


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
        record: Any = records[name]
        shape, dtype = record.size, record.properties.dtype
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
    from safetensors.torch import load

    manifest, name = read_manifest(path), f"{rank_name(rank)}.safetensors"
    with blaming(manifest.path / name):
        return _read_json(manifest, f"{rank_name(rank)}.json"), load(manifest.read(name))


def _read_json(manifest: Manifest, name: str) -> dict[str, Any]:
    with blaming(manifest.path / name):
        return dict(typed_json.loads(manifest.read(name)))
