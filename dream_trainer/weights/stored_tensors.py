"""A checkpoint's tensors read one at a time, by one process without a process group or an accelerator."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dream_trainer.checkpoint.manifest import read_manifest
from dream_trainer.checkpoint.safe_dcp import METADATA_NAME, VerifyingReader, parse_metadata, read_tensors
from dream_trainer.weights.safetensors_file import TensorSpec


class StoredTensors:
    """The tensors of one checkpoint by name, assembled from the shards of all ranks.

    Attributes:
        manifest: The checkpoint's manifest.
        specs: Global shape and dtype of each tensor.
    """

    def __init__(self, path: Path) -> None:
        """Reads the manifest and DCP's metadata.

        Args:
            path: The checkpoint's directory.

        Raises:
            CheckpointError: One of them is missing, damaged or refused.
        """
        self.manifest = read_manifest(path)
        file = self.manifest.path / METADATA_NAME
        self._metadata = parse_metadata(self.manifest.read(METADATA_NAME), file)
        self._reader = VerifyingReader(self.manifest, self._metadata)
        self.specs = {
            name: TensorSpec(tuple(record.size), record.properties.dtype)
            for name, record in self._metadata.state_dict_metadata.items()
            if isinstance(record, TensorStorageMetadata)  # parse_metadata has refused the rest
        }

    def read(self, name: str) -> Tensor:
        """The full tensor on the CPU. A shard file's checksum is compared before its first tensor is read.

        Raises:
            CheckpointError: A shard is missing or damaged.
        """
        shape, dtype = self.specs[name]
        tensor = torch.empty(shape, dtype=dtype)
        read_tensors(self.manifest, self._metadata, {name: tensor}, self._reader)
        return tensor
