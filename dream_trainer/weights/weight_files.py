"""The kinds of files that contain weights: each is opened as tensors by name, of which any block can be read.

Opening a file reads its header but no values: a rank that needs a quarter of a tensor reads about a quarter. No code in
a file is run: safetensors has none, and pickles are read by PyTorch's `weights_only` reader, which refuses anything but
tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from dream_trainer.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, read_manifest
from dream_trainer.checkpoint.safe_dcp import METADATA_NAME, MetadataUnpickler, parse_metadata
from dream_trainer.compat.pytorch import file_window
from dream_trainer.errors import CheckpointError, DamagedCheckpointError
from dream_trainer.weights.reading import Box, WeightFiles, blaming, inside, load_pickle

UNDERSTOOD = (
    "a Hugging Face directory (*.safetensors with or without an index, or pytorch_model.bin), a .safetensors file, an "
    "*.index.json, a .pt, .pth, .bin or .ckpt file with a state dict, one step_* directory of Dream Trainer, and a DCP "
    "directory"
)

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model")


def open_weights(path: Path, model_name: str | None) -> WeightFiles:
    """Opens the weights at `path`, of whatever kind they are.

    Raises:
        CheckpointError: There is nothing at `path`, or it is of an unknown kind, damaged or asks for code.
    """
    if path.is_dir():
        return _open_directory(path, model_name)
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist. Give a path on this machine (a name on a hub is not downloaded): {UNDERSTOOD}."
        )
    if path.name.endswith(".index.json"):
        return _open_index(path)
    if path.suffix == ".safetensors":
        return _SafetensorsFile(path)
    if path.suffix in _TORCH_SUFFIXES:
        return _TorchFile(path)
    raise CheckpointError(f"{path} is of no kind that weights are read from. Known kinds: {UNDERSTOOD}.")


def _open_directory(path: Path, model_name: str | None) -> WeightFiles:
    # Imported where used: DCP loads a good part of torch.distributed.
    if (path / ".metadata").exists():
        return open_checkpoint(path, model_name) if (path / MANIFEST_NAME).exists() else open_foreign(path)
    if (path / "model.safetensors").exists():
        return _SafetensorsFile(path / "model.safetensors")
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) == 1:
        return _open_index(indices[0])
    if len(indices) > 1:
        raise CheckpointError(f"{path} has several indices: {[index.name for index in indices]}. Give one of them.")
    if paths := sorted(path.glob("*.safetensors")):
        return _Shards([(name, file) for file in map(_SafetensorsFile, paths) for name in file.shapes])
    if (index := path / "pytorch_model.bin.index.json").exists():
        return _open_index(index)
    if (file := path / "pytorch_model.bin").exists():
        return _TorchFile(file)
    raise CheckpointError(f"{path} contains no weights. Known kinds: {UNDERSTOOD}.")


def _open_index(path: Path) -> WeightFiles:
    with blaming(path):
        weight_map: dict[str, str] = json.loads(path.read_bytes())["weight_map"]
        file_of_name = {name: inside(path, file) for name, file in weight_map.items()}
    for name, file in file_of_name.items():
        if file.name.endswith(".index.json"):  # it might name itself, and never end
            raise DamagedCheckpointError(f"{path} says that {name!r} is in {file.name}, which is an index itself.")
    opened = {file: open_weights(file, None) for file in sorted(set(file_of_name.values()))}
    for name, file in file_of_name.items():
        if name not in opened[file].shapes:
            raise DamagedCheckpointError(f"{path} says that {name!r} is in {file.name}, which does not contain it.")
    return _Shards([(name, opened[file]) for name, file in file_of_name.items()])


class _SafetensorsFile:
    """One safetensors file, mapped into memory. Opening it compares the header's offsets with the file's size."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self._path = path
        with blaming(path):
            self._file = safe_open(path, framework="pt", device="cpu")
            self.shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in self._file.keys()}  # noqa: SIM118

    def checksums(self, boxes: Mapping[str, Box]) -> dict[Path, FileEntry]:
        return {}

    def read(self, name: str, box: Box) -> Tensor:
        with blaming(self._path):
            block: Tensor = self._file.get_slice(name)[box]
            return block


class _TorchFile:
    """One file of `torch.save`, mapped into memory: a state dict, or a dict with one inside."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with blaming(path), path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        if not is_zip:
            raise DamagedCheckpointError(
                f"{path} is not an archive of the kind that torch.save writes since 1.6; it was not opened. If it is "
                "an older one, save it again: torch.save(torch.load(path, weights_only=True), path)."
            )
        self._tensors = _state_dict(load_pickle(path, path, mmap=True), path)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def checksums(self, boxes: Mapping[str, Box]) -> dict[Path, FileEntry]:
        return {}

    def read(self, name: str, box: Box) -> Tensor:
        return self._tensors[name][box]


def _state_dict(content: Any, path: Path) -> dict[str, Tensor]:
    while isinstance(content, Mapping):
        key = next((key for key in _STATE_DICT_KEYS if isinstance(content.get(key), Mapping)), None)
        if key is None:
            break
        content = content[key]
    tensors = {}
    if isinstance(content, Mapping):
        tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        what = f"a dict with {list(content)[:20]}" if isinstance(content, Mapping) else type(content).__name__
        raise CheckpointError(
            f"{path} holds {what}, in which no state dict was found (there, or under {', '.join(_STATE_DICT_KEYS)}). "
            "Save the state dict alone."
        )
    for name, value in tensors.items():
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided or value.is_quantized:
            raise CheckpointError(
                f"{name} in {path} is of type {type(value).__name__} and layout {value.layout}, of which blocks cannot "
                "be read. Save plain dense tensors; sharded ones with torch.distributed.checkpoint."
            )
    return {name: value.detach() for name, value in tensors.items()}


class _Shards:
    """Tensors in several files."""

    def __init__(self, files: list[tuple[str, WeightFiles]]) -> None:
        self._file_of_name = dict(files)
        if len(self._file_of_name) < len(files):
            names = [name for name, _ in files]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise CheckpointError(f"several files contain {twice[:20]}. Give the one file or index to load.")
        self.shapes = {name: file.shapes[name] for name, file in files}

    def checksums(self, boxes: Mapping[str, Box]) -> dict[Path, FileEntry]:
        return {}

    def read(self, name: str, box: Box) -> Tensor:
        return self._file_of_name[name].read(name, box)


_OWN_PREFIX = "models."


def open_checkpoint(path: Path, model_name: str | None) -> DcpFiles:
    """The weights of one model in a Dream Trainer checkpoint.

    Raises:
        CheckpointError: The manifest or DCP's metadata is missing or damaged, or there is no such model.
    """
    manifest = read_manifest(path)
    metadata = parse_metadata(manifest.read(METADATA_NAME), path / METADATA_NAME)
    names = [name for name in metadata.state_dict_metadata if name.startswith(_OWN_PREFIX)]
    models = sorted({name.split(".")[1] for name in names})
    if model_name is None and len(models) != 1:
        raise CheckpointError(f"{path} holds the models {models}. Say which with model_name.")
    prefix = f"{_OWN_PREFIX}{model_name or models[0]}."
    chosen = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    if not chosen:
        raise CheckpointError(f"{path} holds no model {model_name!r}; it holds {models}. Give one as model_name.")
    return DcpFiles(path, metadata, chosen, manifest)


def open_foreign(path: Path) -> DcpFiles:
    """All tensors of a DCP directory that somebody else wrote, under the names they have there.

    Raises:
        CheckpointError: The metadata is damaged or asks for code.
    """
    metadata = _foreign_metadata(path / METADATA_NAME)
    records = metadata.state_dict_metadata
    tensors = {name: name for name, record in records.items() if isinstance(record, TensorStorageMetadata)}
    return DcpFiles(path, metadata, tensors, None)


class _ForeignUnpickler(MetadataUnpickler):
    """Also builds the record of an entry that is not a tensor; the record itself is empty."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == (BytesStorageMetadata.__module__, BytesStorageMetadata.__name__):
            return BytesStorageMetadata
        return super().find_class(module_name, global_name)


def _foreign_metadata(file: Path) -> Metadata:
    with blaming(file):
        metadata = _ForeignUnpickler(file.read_bytes(), file).load()
    if not (
        isinstance(metadata, Metadata)
        and isinstance(metadata.state_dict_metadata, dict)
        and isinstance(metadata.storage_data, dict)
    ):
        raise DamagedCheckpointError(f"{file} contains no DCP metadata.")
    return metadata


class DcpFiles:
    """Tensors of a DCP directory."""

    def __init__(self, path: Path, metadata: Metadata, names: Mapping[str, str], manifest: Manifest | None) -> None:
        self._path = path
        self._names = names
        self._manifest = manifest
        self._storage: dict[Any, Any] = metadata.storage_data
        with blaming(path / METADATA_NAME):
            self._records = {name: _tensor_record(metadata, stored_name) for name, stored_name in names.items()}
            self.shapes = {name: tuple(record.size) for name, record in self._records.items()}

    def checksums(self, boxes: Mapping[str, Box]) -> dict[Path, FileEntry]:
        """See `WeightFiles.checksums`."""
        if self._manifest is None:
            return {}
        files = {
            self._location(name, chunk)[0]
            for name, box in boxes.items()
            for chunk in self._records[name].chunks
            if _overlap(box, chunk) is not None
        }
        return {file: self._manifest.entry(file.name) for file in files}

    def read(self, name: str, box: Box) -> Tensor:
        """See `WeightFiles.read`."""
        block = torch.empty([cut.stop - cut.start for cut in box], dtype=self._records[name].properties.dtype)
        filled = 0
        for chunk in self._records[name].chunks:
            common = _overlap(box, chunk)
            if common is None:
                continue
            target = block[_shifted(common, [cut.start for cut in box])]
            target.copy_(self._chunk(name, chunk)[_shifted(common, chunk.offsets)])
            filled += target.numel()
        if filled < block.numel():
            raise DamagedCheckpointError(f"{self._path} contains only a part of {name!r}. Was a rank's file left out?")
        return block

    def _chunk(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        file, location = self._location(name, chunk)
        with blaming(file), file.open("rb") as stream:
            saved = load_pickle(file_window(stream, location.offset, location.length), file, mmap=False)
        if not isinstance(saved, Tensor) or saved.shape != chunk.sizes:
            raise DamagedCheckpointError(f"{file} contains something else where {name!r} should be.")
        return saved

    def _location(self, name: str, chunk: ChunkStorageMetadata) -> tuple[Path, Any]:
        metadata_file = self._path / METADATA_NAME
        location = self._storage.get(MetadataIndex(self._names[name], chunk.offsets))
        if location is None:
            raise DamagedCheckpointError(f"{metadata_file} does not say where {name!r} is.")
        with blaming(metadata_file):
            if location.transform_descriptors:
                raise CheckpointError(f"{metadata_file} names stream transforms for {name!r}, which are not applied.")
            return inside(metadata_file, location.relative_path), location


def _tensor_record(metadata: Metadata, name: str) -> TensorStorageMetadata:
    record = metadata.state_dict_metadata[name]
    if not isinstance(record, TensorStorageMetadata):
        raise TypeError(f"{name!r} is not a tensor")
    if any(len(chunk.offsets) != len(record.size) or len(chunk.sizes) != len(record.size) for chunk in record.chunks):
        raise ValueError(f"a chunk of {name!r} has another number of dimensions")
    return record


def _overlap(box: Box, chunk: ChunkStorageMetadata) -> Box | None:
    """The overlap of a block and a chunk, in the full tensor's coordinates; None if they do not overlap."""
    common = tuple(
        slice(max(cut.start, offset), min(cut.stop, offset + size))
        for cut, offset, size in zip(box, chunk.offsets, chunk.sizes, strict=True)
    )
    return common if all(cut.start < cut.stop for cut in common) else None


def _shifted(box: Box, origin: Any) -> Box:
    return tuple(slice(cut.start - at, cut.stop - at) for cut, at in zip(box, origin, strict=True))
