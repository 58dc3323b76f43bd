"""The kinds of files that contain weights: opening one reads its header, and any block of a tensor can be read.

No code in a file is run: pickles are read by PyTorch's `weights_only` reader."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dream_trainer.checkpoint.blocks import Box, WeightFiles, blaming, inside, load_pickle
from dream_trainer.checkpoint.manifest import MANIFEST_NAME
from dream_trainer.checkpoint.store import read_shared
from dream_trainer.errors import CheckpointError, ConfigError, DamagedCheckpointError

UNDERSTOOD = (
    "a Hugging Face directory (*.safetensors with or without an index, or pytorch_model.bin), a .safetensors file, an "
    "*.index.json, a .pt, .pth, .bin or .ckpt file with a state dict, one step_* directory of Dream Trainer, and a DCP "
    "directory"
)

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model")


def open_weights(path: Path, model_name: str | None) -> WeightFiles:
    if path.is_dir():
        return _open_directory(path, model_name)
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist. Give a path on this machine (a name on a hub is not downloaded): {UNDERSTOOD}."
        )
    if path.name.endswith(".index.json"):
        return _open_index(path)
    if path.suffix == ".safetensors":
        return _safetensors(path)
    if path.suffix in _TORCH_SUFFIXES:
        return _torch_file(path)
    raise CheckpointError(f"{path} is of no kind that weights are read from. Known kinds: {UNDERSTOOD}.")


def _open_directory(path: Path, model_name: str | None) -> WeightFiles:
    if (path / ".metadata").exists():
        return _open_dcp(path, model_name)
    if (path / "model.safetensors").exists():
        return _safetensors(path / "model.safetensors")
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) == 1:
        return _open_index(indices[0])
    if len(indices) > 1:
        raise CheckpointError(f"{path} has several indices: {[index.name for index in indices]}. Give one of them.")
    if paths := sorted(path.glob("*.safetensors")):
        return _shards([(name, file) for file in map(_safetensors, paths) for name in file.shapes])
    if (index := path / "pytorch_model.bin.index.json").exists():
        return _open_index(index)
    if (file := path / "pytorch_model.bin").exists():
        return _torch_file(file)
    raise CheckpointError(f"{path} contains no weights. Known kinds: {UNDERSTOOD}.")


def _open_dcp(path: Path, model_name: str | None) -> WeightFiles:
    """One model's weights in a checkpoint of a run; of another program's directory all tensors."""
    # Imported where used: DCP loads a good part of torch.distributed.
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from dream_trainer.checkpoint.safe_dcp import DcpTensors, parse_metadata, read_metadata

    if (path / MANIFEST_NAME).exists():
        manifest, metadata = read_metadata(path)
        tensors = metadata.state_dict_metadata
        chosen = choose_model(model_names(tensors, read_shared(path)), model_name, of=path)
        return DcpTensors(path, metadata, manifest, below(tensors, f"models.{chosen}.")).as_files()
    file = path / ".metadata"
    with blaming(file):
        metadata = parse_metadata(file.read_bytes(), file, has_others=True)
    records = metadata.state_dict_metadata
    names = {name: name for name, record in records.items() if isinstance(record, TensorStorageMetadata)}
    return DcpTensors(path, metadata, None, names).as_files()


def model_names(tensors: Collection[str], shared: Mapping[str, Any]) -> list[str]:
    """The names of the models in a checkpoint, of whose tensors and shared state these are."""
    first_parts = (name.split(".")[1] for name in tensors if name.startswith("models."))
    known = shared.get("extra_state") or dict.fromkeys(first_parts)  # a model's name may have dots itself
    return [name for name in known if any(tensor.startswith(f"models.{name}.") for tensor in tensors)]


def choose_model(models: Collection[str], asked: str | None, *, of: object = "the trainer") -> str:
    """The name of a model: that which was asked for, or the only one."""
    if asked in models or (asked is None and len(models) == 1):
        return asked or next(iter(models))
    wrong = f"has no model {asked!r}" if asked is not None else "does not have exactly one model"
    raise CheckpointError(f"{of} {wrong}. It has {', '.join(map(repr, models)) or 'none'}. Name one of them.")


def below(names: Iterable[str], prefix: str) -> dict[str, str]:
    """The names that begin with `prefix`, by what follows it."""
    return {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}


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
    return _shards([(name, opened[file]) for name, file in file_of_name.items()])


def _safetensors(path: Path) -> WeightFiles:
    """One safetensors file, mapped into memory. Opening it compares the header's offsets with the file's size."""
    from safetensors import safe_open

    with blaming(path):
        file = safe_open(path, framework="pt", device="cpu")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118

    def read(name: str, box: Box) -> Tensor:
        with blaming(path):
            block: Tensor = file.get_slice(name)[box]
            return block

    return WeightFiles(shapes, read)


def _torch_file(path: Path) -> WeightFiles:
    """One file of `torch.save`, mapped into memory: a state dict, or a dict with one inside."""
    tensors = _state_dict(load_pickle(path, path, mmap=True), path)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return WeightFiles(shapes, lambda name, box: tensors[name][box])


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
            f"{path} holds {what}, without a state dict (there, or under {', '.join(_STATE_DICT_KEYS)}). "
            "Only save the state dict."
        )
    for name, value in tensors.items():
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided or value.is_quantized:
            raise CheckpointError(
                f"{name} in {path} is of type {type(value).__name__} and layout {value.layout}, which cannot be read "
                "in blocks. Save plain dense tensors; sharded ones with torch.distributed.checkpoint."
            )
    return {name: value.detach() for name, value in tensors.items()}


def _shards(files: list[tuple[str, WeightFiles]]) -> WeightFiles:
    """Tensors in several files."""
    file_of_name = dict(files)
    if len(file_of_name) < len(files):
        names = [name for name, _ in files]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise CheckpointError(f"several files contain {twice[:20]}. Give the one file or index to load.")
    shapes = {name: file.shapes[name] for name, file in files}
    return WeightFiles(shapes, lambda name, box: file_of_name[name].read(name, box))


def renamer(renames: Mapping[str, str] | None) -> Callable[[Iterable[str]], dict[str, str]]:
    """Makes a function from names to a dict of new to given names, which replaces the expressions in order.

    A name that becomes empty is left out."""
    patterns = []
    for pattern, replacement in (renames or {}).items():
        try:
            compiled = re.compile(pattern)
            compiled.sub(replacement, "")  # a faulty replacement fails here, matched or not
        except (re.error, IndexError) as error:
            raise ConfigError(
                f"renames={{{pattern!r}: {replacement!r}}} is not a regular expression and its replacement: {error}. "
                'Write a dot of a name as r"\\.".'
            ) from error
        patterns.append((compiled, replacement))

    def renamed(names: Iterable[str]) -> dict[str, str]:
        sources: dict[str, str] = {}
        for name in names:
            new = name
            for pattern, replacement in patterns:
                new = pattern.sub(replacement, new)
            if new in sources:
                raise CheckpointError(
                    f"the renames make {new!r} of both {sources[new]!r} and {name!r}. Make them differ."
                )
            if new:
                sources[new] = name
        return sources

    return renamed
