"""Reading DCP's files without running anybody's code.

DCP pickles its `.metadata` and, for values that are no tensors, its shards; a plain reader runs whatever a stranger put
there. Here `.metadata` is unpickled by a reader that knows a short list of record types and refuses the rest by name;
only tensors are stored, so a shard that claims anything else is refused before it is opened, and PyTorch reads tensors
with `weights_only=True`. Each shard's checksum is compared in full before its first byte is used.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from dream_trainer.checkpoint.manifest import Manifest
from dream_trainer.distributed.torch_compat import dcp_metadata_globals
from dream_trainer.errors import CheckpointError

METADATA_NAME = ".metadata"

_DTYPE_NAMES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _MetadataUnpickler(pickle.Unpickler):
    """Builds DCP's metadata records and nothing else."""

    def __init__(self, content: bytes, file: Path) -> None:
        super().__init__(io.BytesIO(content))
        self._file = file
        self._allowed = dcp_metadata_globals()

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in self._allowed or (module_name == "torch" and global_name in _DTYPE_NAMES):
            return super().find_class(module_name, global_name)
        raise CheckpointError(
            f"{self._file} asks for {module_name}.{global_name}, which no checkpoint's metadata needs; loading it "
            "could run someone else's code. Do not use this checkpoint."
        )

    def persistent_load(self, pid: Any, /) -> Any:
        raise CheckpointError(f"{self._file} asks for a persistent object {pid!r}. Do not use this checkpoint.")


def parse_metadata(content: bytes, file: Path) -> Metadata:
    """DCP's metadata from the content of a `.metadata` file.

    Args:
        content: The file's bytes.
        file: Its path, for messages.

    Raises:
        CheckpointError: It refers to something that metadata does not consist of, is damaged, or lists entries that are
            no tensors.
    """
    try:
        metadata = _MetadataUnpickler(content, file).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle fails in as many ways as there are opcodes
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}.") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise CheckpointError(f"{file} holds no DCP metadata. Resume from another checkpoint.")
    for name, record in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(record, TensorStorageMetadata):
            raise CheckpointError(f"{file} lists {name!r}, which is no tensor. Only tensors are read from DCP files.")
    if not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{file} does not say where its tensors lie. Resume from another checkpoint.")
    return metadata


class VerifyingReader(FileSystemReader):
    """A DCP reader that opens the manifest's files only, each after its checksum was compared.

    Args:
        manifest: The checkpoint.
        metadata: Its parsed DCP metadata.
    """

    def __init__(self, manifest: Manifest, metadata: Metadata) -> None:
        super().__init__(manifest.path)
        self._manifest = manifest
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata given; the file is not read again."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Verifies the files that `plan` needs, then reads from them."""
        for name in sorted({self._location(item.storage_index).relative_path for item in plan.items}):
            self._manifest.verify(name)
        return super().read_data(plan, planner)

    def _location(self, index: MetadataIndex) -> Any:
        if index not in self.storage_data:
            raise CheckpointError(
                f"{self._manifest.path / METADATA_NAME} does not say where {index.fqn!r} lies. It is damaged."
            )
        location = self.storage_data[index]
        if location.transform_descriptors:
            raise CheckpointError(
                f"{self._manifest.path / METADATA_NAME} names stream transforms for {index.fqn!r}. "
                "Nothing here writes such; do not use this checkpoint."
            )
        return location


class TensorPlanner(DefaultLoadPlanner):
    """A DCP planner that loads tensors in place and refuses everything that would be unpickled."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuses: bytes entries are pickles.

        Raises:
            CheckpointError: Always.
        """
        raise CheckpointError(f"The entry {read_item.dest_index.fqn!r} is a pickle, not a tensor. It is not loaded.")


def read_tensors(manifest: Manifest, metadata: Metadata, tensors: Mapping[str, Tensor]) -> None:
    """Fills `tensors` (DTensors of any layout, or plain) in place from a checkpoint's DCP shards. No communication.

    Each rank reads the pieces that its own shards overlap. Names and shapes must be the checkpoint's.

    Raises:
        CheckpointError: A shard is missing or damaged.
    """
    planner, reader = TensorPlanner(), VerifyingReader(manifest, metadata)
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    try:
        reader.read_data(plan, planner).wait()
    except CheckpointError:
        raise
    except Exception as error:  # a shard that fits its checksum and is no tensor: made by somebody else
        raise CheckpointError(
            f"The shards of {manifest.path} cannot be read: {type(error).__name__}: {error}"
        ) from error
