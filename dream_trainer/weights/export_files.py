"""Files of an export, which appear complete or not at all: model.safetensors, or numbered shards with an index, and
config.json; adapters in peft's layout; or a single .safetensors, .pt or .pth file."""

from __future__ import annotations

import json
import math
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dream_trainer.checkpoint.files import NewFile, named_step, step_directories, sync_directory, write_file
from dream_trainer.checkpoint.manifest import MANIFEST_NAME
from dream_trainer.checkpoint.run_directory import LOCK_NAME
from dream_trainer.checks import listed
from dream_trainer.errors import CheckpointError, ConfigError

INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
ADAPTERS_NAME = "adapter_model.safetensors"
ADAPTER_CONFIG_NAME = "adapter_config.json"

_TORCH_SUFFIXES = (".pt", ".pth")
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
    if out.suffix in _TORCH_SUFFIXES:
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
    return out.suffix in (*_TORCH_SUFFIXES, ".safetensors")


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
            write = _write_pickle if Path(name).suffix in _TORCH_SUFFIXES else write_safetensors
            write(temporary / name, specs, read)
        for name, document in documents.items():
            text = json.dumps(document, indent=2, ensure_ascii=False, default=_plain)
            write_file(temporary / name, f"{text}\n".encode())
        sync_directory(temporary)
        if _is_one_file(out):
            (temporary / out.name).replace(out)
        else:
            for file in out.iterdir() if out.exists() else ():  # other files there, such as a tokenizer
                if not _OWN_NAME.fullmatch(file.name) and not (temporary / file.name).exists():
                    shutil.copy2(file, temporary / file.name, follow_symlinks=False)
            if out.exists():  # removed only after the finished export has its name
                out.rename(aside := out.with_name(f".{out.name}.tmp-{secrets.token_hex(8)}"))
                temporary.rename(out)
                shutil.rmtree(aside, ignore_errors=True)
            else:
                temporary.rename(out)
        sync_directory(out.parent)
    except OSError as error:
        raise CheckpointError(f"Could not export to {out}: {error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
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
