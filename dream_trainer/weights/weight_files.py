"""The kinds of files that contain weights. Opening one reads its header, and any block of a tensor can be read; no code
in a file is run. Files of an export appear complete or not at all."""

from __future__ import annotations

import json
import math
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dream_trainer.checkpoint.blocks import Box, WeightFiles, inside, load_pickle
from dream_trainer.checkpoint.files import (
    NewFile,
    blaming,
    named_step,
    publish,
    remove_tree,
    step_directories,
    sync_directory,
    write_file,
)
from dream_trainer.checkpoint.manifest import MANIFEST_NAME
from dream_trainer.checkpoint.run_directory import LOCK_NAME
from dream_trainer.checkpoint.store import read_shared
from dream_trainer.checks import listed
from dream_trainer.errors import CheckpointError, ConfigError, DamagedCheckpointError

UNDERSTOOD = (
    "a Hugging Face directory (*.safetensors with or without an index, or pytorch_model.bin), a .safetensors file, an "
    "*.index.json, a .pt, .pth, .bin or .ckpt file with a state dict, one step_* directory of Dream Trainer, and a DCP "
    "directory"
)

_STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model")


def open_weights(path: Path, model_name: str | None) -> WeightFiles:
    if path.is_dir():
        return _open_directory(path, model_name)
    return _open_index(path) if path.name.endswith(".index.json") and path.exists() else _open_file(path)


def _open_file(path: Path) -> WeightFiles:
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist. Give a path on this machine (a name on a hub is not downloaded): {UNDERSTOOD}."
        )
    if path.suffix == ".safetensors":
        return _safetensors(path)
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
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
        files = DcpTensors(path, metadata, manifest, below(tensors, f"models.{chosen}."))
    else:
        file = path / ".metadata"
        with blaming(file):
            metadata = parse_metadata(file.read_bytes(), file, has_others=True)
        records = metadata.state_dict_metadata
        names = {name: name for name, record in records.items() if isinstance(record, TensorStorageMetadata)}
        files = DcpTensors(path, metadata, None, names)
    return WeightFiles(files.shapes, files.read, files.checksums)


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
    opened = {file: _open_file(file) for file in sorted(set(file_of_name.values()))}
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
    content = load_pickle(path, path, mmap=True)
    state: Mapping[Any, Any] = content if isinstance(content, Mapping) else {}
    while inner := [state[key] for key in _STATE_DICT_KEYS if isinstance(state.get(key), Mapping)]:
        state = inner[0]
    tensors = {name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        what = f"a dict with {list(state)[:20]}" if isinstance(content, Mapping) else type(content).__name__
        raise CheckpointError(
            f"{path} holds {what}, without a state dict (there, or under {', '.join(_STATE_DICT_KEYS)}). "
            "Only save the state dict."
        )
    for name, value in tensors.items():
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized:
            raise CheckpointError(
                f"{name} in {path} is of type {type(value).__name__} and layout {value.layout}, which cannot be read "
                "in blocks. Save plain dense tensors; sharded ones with torch.distributed.checkpoint."
            )
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return WeightFiles(shapes, lambda name, box: tensors[name][box])


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
    """A function from names to a dict of new to given names, by the expressions in order; an empty one is left out."""
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


# -- Writing.


INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
ADAPTERS_NAME = "adapter_model.safetensors"
ADAPTER_CONFIG_NAME = "adapter_config.json"

_WRITTEN_SUFFIXES = (".pt", ".pth")
_OWN_NAME = re.compile(
    rf"model(-\d{{5}}-of-\d{{5}})?\.safetensors|{re.escape(INDEX_NAME)}|adapter_(model\.safetensors|config\.json)"
)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", re.IGNORECASE)

DTYPE_NAMES = {  # the format's name of each dtype that it supports
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


FilePlan = dict[str, dict[str, TensorSpec]]  # file name to its tensors, both in writing order


def plan_files(
    out: Path, specs: Mapping[str, TensorSpec], max_shard_size: int | str, *, are_adapters: bool = False
) -> FilePlan:
    """Divides tensors among files, in order: each is filled up to the limit; a larger tensor has its own."""
    limit = parse_size(max_shard_size)
    if out.suffix in _WRITTEN_SUFFIXES:
        return {out.name: dict(specs)}
    unknown = [f"{name} ({spec.dtype})" for name, spec in specs.items() if spec.dtype not in DTYPE_NAMES]
    if unknown:
        raise CheckpointError(
            f"safetensors cannot store {listed(unknown, 20)}. Export to a file that ends in .pt instead."
        )
    if out.suffix == ".safetensors":
        return {out.name: file_order(specs)}
    if are_adapters:
        return {ADAPTERS_NAME: file_order(specs)}
    shards: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, spec in specs.items():
        if shards[-1] and filled + spec.nbytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = spec
        filled += spec.nbytes
    if len(shards) == 1:
        return {"model.safetensors": file_order(shards[0])}
    return {
        f"model-{index:05d}-of-{len(shards):05d}.safetensors": file_order(shard)
        for index, shard in enumerate(shards, start=1)
    }


def parse_size(size: int | str) -> int:
    """Bytes of "5GB" (10^9 each), "5GiB" (2^30 each) or a number."""
    if isinstance(size, str) and (match := _SIZE.fullmatch(size.strip())):
        number, unit, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.upper()])
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f'{size!r} is not a size. Use a number of bytes, or a text such as "5GB" or "500MiB".')
    return size


def check_target(out: Path, *, overwrite: bool) -> None:
    is_one_file, place = _is_one_file(out), out.resolve()
    present = sorted(out.iterdir()) if out.is_dir() else []
    directories = [entry.name for entry in present if entry.is_dir()]
    of_run = next((directory for directory in (place, *place.parents) if _holds_checkpoints(directory)), None)
    if of_run is not None:
        wrong = f"is in {of_run}, which belongs to a run's checkpoints. Export to another directory"
    elif is_one_file and out.is_dir():
        wrong = "is a directory, and its name asks for a file. Choose another name"
    elif not is_one_file and out.exists() and not out.is_dir():
        wrong = "is a file, and a directory is to be written. Choose another name"
    elif not overwrite and (present or (is_one_file and out.exists())):
        wrong = "exists already. Choose another name, or overwrite it (overwrite=True, --overwrite)"
    elif directories:
        wrong = (
            f"contains the directories {listed(directories, 5)}, which no export wrote. Move them away, or choose "
            "another directory"
        )
    else:
        return
    raise CheckpointError(f"{out} {wrong}.")


def _is_one_file(out: Path) -> bool:
    return out.suffix in (*_WRITTEN_SUFFIXES, ".safetensors")


def _holds_checkpoints(directory: Path) -> bool:
    if directory.name == "checkpoints":
        return (directory.parent / LOCK_NAME).exists() or bool(step_directories(directory))
    return named_step(directory) is not None and (directory / MANIFEST_NAME).exists()


def write_files(
    out: Path, plan: FilePlan, read: Callable[[str], Tensor], *, config: Mapping[str, Any] | None, overwrite: bool
) -> list[Path]:
    """Writes an export under a temporary name next to `out` and renames it when all of it is on the disk."""
    out = out.resolve() if out.is_symlink() else out
    check_target(out, overwrite=overwrite)
    temporary = out.with_name(f".{out.name}.tmp-{secrets.token_hex(8)}")
    documents: dict[str, Any] = {}
    if len(plan) > 1:
        total = sum(spec.nbytes for specs in plan.values() for spec in specs.values())
        weight_map = {name: file for file, specs in plan.items() for name in specs}
        documents[INDEX_NAME] = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    if config is not None and not _is_one_file(out):
        documents[ADAPTER_CONFIG_NAME if ADAPTERS_NAME in plan else CONFIG_NAME] = config
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        for name, specs in plan.items():
            write = _write_pickle if Path(name).suffix in _WRITTEN_SUFFIXES else write_safetensors
            write(temporary / name, specs, read)
        for name, document in documents.items():
            text = json.dumps(document, indent=2, ensure_ascii=False, default=_plain)
            write_file(temporary / name, f"{text}\n".encode())
        if _is_one_file(out):
            (temporary / out.name).replace(out)
            sync_directory(out.parent)
        else:
            for file in out.iterdir() if out.exists() else ():  # other files there, such as a tokenizer
                if not _OWN_NAME.fullmatch(file.name) and not (temporary / file.name).exists():
                    shutil.copy2(file, temporary / file.name, follow_symlinks=False)
            publish(temporary, out, remove=remove_tree)
    except OSError as error:
        raise CheckpointError(f"Could not export to {out}: {error}.") from error
    finally:
        remove_tree(temporary)
    return [out] if _is_one_file(out) else [out / name for name in (*plan, *documents)]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(value)


def _write_pickle(file: Path, specs: Mapping[str, TensorSpec], read: Callable[[str], Tensor]) -> None:
    state = {name: read(name).detach().to(device="cpu", dtype=spec.dtype).clone() for name, spec in specs.items()}
    with NewFile(file) as opened:
        try:
            torch.save(state, opened)
        except RuntimeError as error:  # from closing the archive after a failed write; the cause is in its context
            raise (error.__context__ if isinstance(error.__context__, OSError) else OSError(str(error))) from None


# -- A safetensors file, one tensor at a time; `safetensors.torch.save_file` needs all of them at once.
#
#    8 bytes          length of the header, little-endian
#    header           JSON: {"__metadata__": {...}, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}
#    tensors          row-major bytes, without gaps; offsets count from the header's end


def file_order(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """The tensors by falling item size, so that each begins at a multiple of it, as readers that map files need."""
    return dict(sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize))


def write_safetensors(path: Path, specs: Mapping[str, TensorSpec], read: Callable[[str], Tensor]) -> None:
    """Writes a new safetensors file; `read` is called once for each name, in order, and its result is cast."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers requires this
    begin = 0
    for name, spec in specs.items():
        end = begin + spec.nbytes
        entries[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": spec.shape, "data_offsets": [begin, end]}
        begin = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with NewFile(path) as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for name, spec in specs.items():
            tensor = read(name)
            if tensor.shape != spec.shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)} where {spec.shape} was expected.")
            plain = tensor.detach().to(device="cpu", dtype=spec.dtype).resolve_conj().resolve_neg()
            values = plain.contiguous().reshape(-1)
            # Through uint8: numpy has no bfloat16 and no float8. An empty tensor has no bytes to view.
            file.write(values.view(torch.uint8).numpy().data if values.numel() else b"")
