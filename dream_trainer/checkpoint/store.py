"""Writing a checkpoint so that it is either complete or does not exist, and reading it back.

    <run_dir>/checkpoints/
      step_00001000/
        .metadata, __0_0.distcp, __1_0.distcp     tensors, by DCP: one shard file per rank
        shared.json                               state that is the same on all ranks
        rank_00000.json, rank_00000.safetensors   state of one rank: random states, loader position, ...
        manifest.json                             written last: step, config, sizes and checksums
      .step_00002000.tmp-5f3a...                  being written, or left by a killed job

      .step_00001000.replaced-8d2c...             for a moment, while another takes its place

Everything is written to a hidden temporary directory beside the others, fsynced, and hashed meanwhile. When every rank
has reported its files' sizes and checksums, rank 0 writes the manifest and renames the directory. That is one atomic
operation: before it the checkpoint does not exist, and after it the checkpoint is complete. Nothing of an earlier
checkpoint is touched.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dream_trainer.checkpoint import typed_json
from dream_trainer.checkpoint.files import (
    make_temporary,
    publish,
    recover_replaced,
    remove_temporaries,
    remove_tree,
    step_name,
    sync_directory,
    write_file,
)
from dream_trainer.checkpoint.known_plan import KnownPlan
from dream_trainer.checkpoint.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    encode_manifest,
    read_manifest,
    verify_checkpoint,
)
from dream_trainer.checkpoint.snapshot import Snapshot
from dream_trainer.distributed.outcomes import (
    dealt_by_main_rank,
    from_all_ranks,
    from_main_rank,
    on_all_ranks,
    to_main_rank,
)
from dream_trainer.distributed.ranks import Ranks
from dream_trainer.errors import CheckpointError, DamagedCheckpointError
from dream_trainer.stores.store_path import StorePath
from dream_trainer.version import __version__

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import WriteResult

    from dream_trainer.checkpoint.dcp_writer import TensorWriter

SHARED_NAME = "shared.json"


def rank_name(rank: int) -> str:
    """The name, without ending, of one rank's files."""
    return f"rank_{rank:05d}"


def write_checkpoint(
    root: Path, snapshot: Snapshot, *, world: Ranks, replace: bool = False, known: KnownPlan | None = None
) -> Path:
    """Writes a checkpoint and publishes it. Every rank calls this; it returns when the checkpoint is on the disk.

    It may run in a thread of its own: it changes no global state, and communicates over `world` only.

    What killed jobs left under `root` is removed, so no two jobs may write to one `root`. If there is a checkpoint of
    the step already and its checksums match, its path is returned and nothing is written; a damaged one is replaced.

    Args:
        root: Directory of the run's checkpoints; created if missing. The same file system on every rank.
        snapshot: This rank's part. Nobody may change its tensors meanwhile.
        world: The ranks.
        replace: Whether an undamaged checkpoint of the step is replaced too.
        known: Kept from save to save, so that only the first one is planned; None plans this one.

    Returns:
        The checkpoint's directory, `<root>/step_<step>`.

    Raises:
        CheckpointError: Some rank could not write, or has state that cannot be written, or a newer dream_trainer wrote
            a checkpoint of that step; the same on every rank. The temporary directory was removed, and earlier
            checkpoints are unchanged.
    """
    # Imported where used: DCP loads a good part of torch.distributed.
    from dream_trainer.checkpoint.dcp_writer import TensorWriter

    final = Path(root) / step_name(snapshot.step)
    task = f"write the checkpoint of step {snapshot.step} to {root}"
    if from_main_rank(world, task, lambda: _tidy(final)) and not replace and _is_whole(final, world):
        return final
    temporary = from_main_rank(world, task, lambda: make_temporary(final.parent, snapshot.step))
    try:
        # DCP saves the value of the rank that has the least to write, so a rank with another value must not offer it.
        common = {name: tensor for name, tensor in snapshot.tensors.items() if name not in snapshot.rank_tensors}
        writer = TensorWriter(temporary, common, rank=world.rank, known=KnownPlan() if known is None else known)
        if not all(from_all_ranks(world, task, writer.knows_plan)):
            _plan(writer, world, task)

        def write() -> tuple[list[WriteResult], dict[str, FileEntry]]:
            entries = _write_small_files(temporary, snapshot, world)
            results = writer.write()
            sync_directory(temporary)
            return results, entries | writer.entries

        written = to_main_rank(world, task, write)

        def commit() -> None:
            if written is not None:
                writer.write_metadata([results for results, _ in written])
                files = writer.entries | {name: entry for _, entries in written for name, entry in entries.items()}
                write_file(temporary / MANIFEST_NAME, encode_manifest(_describe(final, snapshot, files, world)))
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


def _plan(writer: TensorWriter, world: Ranks, task: str) -> None:
    """Lets rank 0 say what each rank writes. Only it sees the plans of all: their number grows with that of ranks."""
    plans = to_main_rank(world, task, writer.plan)
    writer.take(dealt_by_main_rank(world, task, lambda: writer.merge(plans or [])))


def _tidy(final: Path) -> bool:
    """Repairs or removes what killed jobs left in the directory of checkpoints; returns whether `final` exists."""
    recover_replaced(final.parent)
    remove_temporaries(final.parent)
    return final.exists()


def _is_whole(final: Path, world: Ranks) -> bool:
    """Whether there is an undamaged checkpoint of the step, checksums included. One of a newer schema is an error."""
    try:
        verify_checkpoint(final, world=world)
    except DamagedCheckpointError:
        return False
    return True


def _write_small_files(directory: Path, snapshot: Snapshot, world: Ranks) -> dict[str, FileEntry]:
    from safetensors.torch import save

    copies = {  # safetensors accepts neither views nor shared memory
        key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for key, tensor in snapshot.rank_tensors.items()
    }
    name = rank_name(world.rank)
    contents = {f"{name}.json": snapshot.rank_state, f"{name}.safetensors": save(copies)}
    if world.is_main:
        contents[SHARED_NAME] = snapshot.shared
    return {
        name: FileEntry(size=len(content), xxh3=write_file(directory / name, content))
        for name, content in contents.items()
    }


def _describe(final: Path, snapshot: Snapshot, files: dict[str, FileEntry], world: Ranks) -> Manifest:
    return Manifest(
        **snapshot.description,
        path=final,
        step=snapshot.step,
        world_size=world.world_size,
        versions={"torch": str(torch.__version__), "dream_trainer": __version__},
        wall_time=time.time(),
        files=files,
    )


def tensor_metadata(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Global shape and dtype of each tensor in a checkpoint, by name.

    Raises:
        DamagedCheckpointError: The manifest or DCP's metadata is missing, damaged or asks for code.
    """
    _, metadata = _open(path)
    return {name: _kind(record) for name, record in metadata.state_dict_metadata.items()}


def _kind(record: Any) -> tuple[torch.Size, torch.dtype]:
    return record.size, record.properties.dtype


def _open(path: Path) -> tuple[Manifest, Metadata]:
    from dream_trainer.checkpoint.safe_dcp import METADATA_NAME, parse_metadata

    manifest = read_manifest(path)
    return manifest, parse_metadata(manifest.read(METADATA_NAME), manifest.path / METADATA_NAME)


def load_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, world: Ranks, optional_prefix: str | tuple[str, ...] = ()
) -> None:
    """Fills tensors in place, whatever mesh and world size they were saved from. Every rank calls this.

    Names, shapes and dtypes are compared on all ranks before anything is written. Each rank reads the shard files that
    its own shards overlap. In addition one of the ranks hashes each complete shard file.

    Args:
        path: The checkpoint's directory.
        tensors: Where to load to, by name: DTensors of any layout, or plain. Together the ranks must have every name of
            the checkpoint and no other.
        world: The ranks.
        optional_prefix: Names of the checkpoint that begin with it, or with one of several, may be left out.

    Raises:
        DamagedCheckpointError: A file is missing, damaged or asks for code; the same on every rank. If it is a shard,
            the tensors' values are undefined: load another checkpoint into them, or stop.
        CheckpointError: Names are missing on either side, or shapes or dtypes differ (none is cast), listed by name;
            the same on every rank, and nothing was written.
    """
    from dream_trainer.checkpoint.safe_dcp import read_and_verify
    from dream_trainer.checkpoint.store_reader import read_from_store

    task = f"load {path}"
    manifest, metadata = on_all_ranks(world, task, lambda: _open(path))
    unused = from_all_ranks(world, task, lambda: _compare(metadata, tensors))
    # Under a pipeline no rank has all names: only what no rank asks for is left over.
    left_over = {name for name in set.intersection(*unused) if not name.startswith(optional_prefix)}
    if left_over:
        raise CheckpointError(
            f"Could not {task}: it contains {_listed(left_over)}, which this run does not have. "
            "Was a layer or an optimizer removed, renamed or frozen since?"
        )
    shards = manifest.shards[world.rank :: world.world_size]
    read = read_from_store if isinstance(manifest.path, StorePath) else read_and_verify
    on_all_ranks(world, task, lambda: read(manifest, metadata, tensors, shards))


def _compare(metadata: Metadata, tensors: Mapping[str, Tensor]) -> set[str]:
    """Compares what was saved with the tensors to load it into; returns the saved names that are not among them."""
    records = metadata.state_dict_metadata
    missing = set(tensors) - set(records)
    if missing:
        raise CheckpointError(
            f"the checkpoint has no {_listed(missing)}. Was a layer or an optimizer added, renamed or unfrozen since?"
        )
    different = []
    for name, tensor in tensors.items():
        shape, dtype = _kind(records[name])
        if shape != tensor.shape or dtype != tensor.dtype:
            different.append(f"{name} (saved {tuple(shape)} {dtype}, here {tuple(tensor.shape)} {tensor.dtype})")
    if different:
        raise CheckpointError(f"shapes or dtypes differ: {_listed(different)}. Nothing is cast or cut to fit.")
    return set(records) - set(tensors)


def _listed(names: Iterable[str], limit: int = 20) -> str:
    ordered = sorted(names)
    rest = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + rest


def read_shared(path: Path) -> dict[str, Any]:
    """The state that was the same on all ranks.

    Raises:
        DamagedCheckpointError: The manifest or the file is missing or damaged.
    """
    return _read_json(read_manifest(path), SHARED_NAME)


def read_rank(path: Path, rank: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state that only rank `rank` had: its JSON state and its tensors, on the CPU.

    Raises:
        DamagedCheckpointError: The manifest or a file is missing or damaged.
        CheckpointError: Fewer ranks wrote the checkpoint.
    """
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
