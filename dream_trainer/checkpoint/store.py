"""Writing a checkpoint so that it exists as a whole or not at all, and reading it back.

    <run_dir>/checkpoints/
      step_00001000/
        .metadata, __0_0.distcp, __1_0.distcp     tensors, by DCP: one shard file per rank
        shared.json                               what all ranks hold alike
        rank_00000.json, rank_00000.safetensors   what one rank holds: random states, loader position, ...
        manifest.json                             written last: step, config, sizes and checksums
      .step_00002000.tmp-5f3a...                  being written, or left by a killed job

Everything is written and fsynced in a hidden temporary directory beside the others. When every rank has reported its
files' sizes and checksums, rank 0 writes the manifest and renames the directory: one atomic operation, before which the
checkpoint does not exist and after which it is whole. Nothing of an earlier checkpoint is touched.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dream_trainer.checkpoint import typed_json
from dream_trainer.checkpoint.files import (
    checksum,
    make_temporary,
    publish,
    remove_temporaries,
    remove_tree,
    step_name,
    sync_directory,
    write_file,
)
from dream_trainer.checkpoint.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    encode_manifest,
    read_manifest,
    verify_checkpoint,
)
from dream_trainer.checkpoint.world import Alone, CheckpointWorld, on_all_ranks
from dream_trainer.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

SHARED_NAME = "shared.json"


def rank_name(rank: int) -> str:
    """The name, without ending, of one rank's files."""
    return f"rank_{rank:05d}"


def write_checkpoint(
    root: Path,
    step: int,
    *,
    tensors: Mapping[str, Tensor],
    shared: Mapping[str, Any],
    rank_state: Mapping[str, Any],
    rank_tensors: Mapping[str, Tensor],
    manifest: Mapping[str, Any],
    world: CheckpointWorld,
) -> Path:
    """Writes a checkpoint and publishes it. Every rank calls this; it returns when the checkpoint is on the disk.

    Temporary directories that killed jobs left under `root` are removed, so no two jobs may write to one `root`. If
    the step has a whole checkpoint already, checksums included, that one is returned and nothing is written; a damaged
    one is replaced.

    Args:
        root: Directory of the run's checkpoints; created if missing. The same file system on every rank.
        step: Optimizer steps completed.
        tensors: State that is sharded (DTensor) or the same on all ranks (plain), by name, on any device. Ranks may
            hold different names. Of a plain tensor any one rank's value is kept.
        shared: What all ranks hold alike, as typed JSON; rank 0's is written.
        rank_state: What this rank alone holds, as typed JSON.
        rank_tensors: Plain tensors that this rank alone holds; also those that it holds with another value than rank 0,
            under their name in `tensors` (see `rank_buffers`).
        manifest: The fields `epoch`, `samples_seen`, `mesh_shape`, `config` and `metrics` of `Manifest`.
        world: The ranks.

    Returns:
        The checkpoint's directory, `<root>/step_<step>`.

    Raises:
        CheckpointError: Some rank could not write, or was given what cannot be written; the same on every rank. The
            temporary directory is gone by then, and earlier checkpoints are as they were.
    """
    # Imported where used: DCP loads a good part of torch.distributed.
    from dream_trainer.checkpoint.dcp_writer import write_tensors

    final = Path(root) / step_name(step)
    task = f"write the checkpoint of step {step} to {root}"
    begun = on_all_ranks(world, task, lambda: _begin(final, step) if world.is_main else None)
    temporary = world.all_gather_object(begun)[0]
    if temporary is None:
        return final
    try:
        on_all_ranks(world, task, lambda: _write_json(temporary, shared, rank_state, rank_tensors, world))
        # DCP keeps the value of whichever rank has least to write, so a rank with another one must not offer it.
        common = {name: tensor for name, tensor in tensors.items() if name not in rank_tensors}
        write_tensors(temporary, common, task=task, world=world)
        files = world.all_gather_object(on_all_ranks(world, task, lambda: _report(temporary, world.rank)))

        def commit() -> None:
            if world.is_main:
                description = _describe(final, step, manifest, files, world)
                write_file(temporary / MANIFEST_NAME, encode_manifest(description))
                publish(temporary, final)

        on_all_ranks(world, task, commit)
    except CheckpointError:
        # All ranks are here, so none writes any more. A rank that was killed is no CheckpointError: then the others
        # cannot know who still writes, and the next save removes what is left.
        if world.is_main:
            remove_tree(temporary)
        world.all_gather_object(None)  # so that it is gone on every rank
        raise
    return final


def _begin(final: Path, step: int) -> Path | None:
    """On rank 0: the temporary directory to write to, or None if the checkpoint exists and is whole."""
    remove_temporaries(final.parent)
    if final.exists():
        try:
            verify_checkpoint(final, world=Alone())
        except CheckpointError:
            pass
        else:
            return None
    return make_temporary(final.parent, step)


def _write_json(
    directory: Path,
    shared: Mapping[str, Any],
    rank_state: Mapping[str, Any],
    rank_tensors: Mapping[str, Tensor],
    world: CheckpointWorld,
) -> None:
    from safetensors.torch import save

    if world.is_main:
        write_file(directory / SHARED_NAME, typed_json.dumps(dict(shared)).encode())
    name = rank_name(world.rank)
    write_file(directory / f"{name}.json", typed_json.dumps(dict(rank_state)).encode())
    copies = {
        key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for key, tensor in rank_tensors.items()
    }
    write_file(directory / f"{name}.safetensors", save(copies))


def _report(directory: Path, rank: int) -> dict[str, FileEntry]:
    """Sizes and checksums of the files that this rank wrote, after its directory entries are on the disk."""
    sync_directory(directory)
    patterns = [f"__{rank}_*.distcp", f"{rank_name(rank)}.*", *([".metadata", SHARED_NAME] if rank == 0 else [])]
    report = {}
    for path in (path for pattern in patterns for path in sorted(directory.glob(pattern))):
        size, xxh3 = checksum(path)
        report[path.name] = FileEntry(size=size, xxh3=xxh3)
    return report


def _describe(
    final: Path, step: int, given: Mapping[str, Any], files: list[dict[str, FileEntry]], world: CheckpointWorld
) -> Manifest:
    return Manifest(
        **given,
        path=final,
        step=step,
        world_size=world.world_size,
        versions={"torch": str(torch.__version__), "dream_trainer": _package_version()},
        wall_time=time.time(),
        files={name: entry for report in files for name, entry in report.items()},
    )


def _package_version() -> str:
    try:
        return version("dream-trainer")
    except PackageNotFoundError:
        return "not installed"


def tensor_metadata(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Global shape and dtype of each tensor in a checkpoint, by name.

    Raises:
        CheckpointError: The manifest or DCP's metadata is missing, damaged or refused.
    """
    _, metadata = _open(path)
    return {name: _kind(record) for name, record in metadata.state_dict_metadata.items()}


def _kind(record: Any) -> tuple[torch.Size, torch.dtype]:
    return record.size, record.properties.dtype


def _open(path: Path) -> tuple[Manifest, Metadata]:
    from dream_trainer.checkpoint.safe_dcp import METADATA_NAME, parse_metadata

    manifest = read_manifest(Path(path))
    return manifest, parse_metadata(manifest.read(METADATA_NAME), manifest.path / METADATA_NAME)


def load_tensors(path: Path, tensors: Mapping[str, Tensor], *, world: CheckpointWorld) -> None:
    """Fills tensors in place, whatever mesh and world size they were saved from. Every rank calls this.

    Names, shapes and dtypes are compared on all ranks before anything is written. Each rank reads the shard files that
    its own pieces overlap, and hashes each of them in full (in 8 MiB chunks) before reading from it.

    Args:
        path: The checkpoint's directory.
        tensors: Where to load to, by name: DTensors of any layout, or plain. Together the ranks must hold every name of
            the checkpoint and no other.
        world: The ranks.

    Raises:
        CheckpointError: Names are missing on either side, or shapes or dtypes differ (none is cast), listed by name;
            then nothing was written. Or a shard is missing or damaged; then some tensors may hold the new values. The
            same on every rank.
    """
    from dream_trainer.checkpoint.safe_dcp import read_tensors

    task = f"load {path}"
    manifest, metadata = on_all_ranks(world, task, lambda: _open(path))
    on_all_ranks(world, task, lambda: _compare(metadata, tensors))
    # Under a pipeline no rank holds all names: left over is only what no rank asks for.
    unused = set.intersection(*world.all_gather_object(set(metadata.state_dict_metadata) - set(tensors)))
    if unused:
        raise CheckpointError(
            f"Could not {task}: it holds {_listed(unused)}, which this run does not have. "
            "Was a layer or an optimizer removed, renamed or frozen since?"
        )
    on_all_ranks(world, task, lambda: read_tensors(manifest, metadata, tensors))


def _compare(metadata: Metadata, tensors: Mapping[str, Tensor]) -> None:
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


def _listed(names: Iterable[str], limit: int = 20) -> str:
    ordered = sorted(names)
    rest = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + rest


def read_shared(path: Path) -> dict[str, Any]:
    """What all ranks held alike.

    Raises:
        CheckpointError: The manifest or the file is missing or damaged.
    """
    return _read_json(read_manifest(Path(path)), SHARED_NAME)


def read_rank(path: Path, rank: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What rank `rank` alone held: its JSON state and its tensors, on the CPU.

    Raises:
        CheckpointError: The manifest or a file is missing or damaged, or fewer ranks wrote the checkpoint.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    manifest = read_manifest(Path(path))
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
        raise CheckpointError(f"{manifest.path / name} is no safetensors file: {error}.") from error


def _read_json(manifest: Manifest, name: str) -> dict[str, Any]:
    content = manifest.read(name)
    try:
        state = typed_json.loads(content)
        if not isinstance(state, dict):
            raise ValueError(f"it holds a {type(state).__name__} where a dict was written")
    except ValueError as error:
        raise CheckpointError(f"{manifest.path / name} is damaged: {error}.") from error
    return state
