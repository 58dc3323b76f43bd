"""Writing a safetensors file one tensor at a time; `safetensors.torch.save_file` needs all of them at once.

8 bytes          length of the header, little-endian
header           JSON: {"__metadata__": {...}, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}
tensors          row-major bytes, without gaps; offsets count from the header's end
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

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


def file_order(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """The tensors by falling item size, so that each begins at a multiple of it, as readers that map files need."""
    return dict(sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize))


def write_safetensors(path: Path, specs: Mapping[str, TensorSpec], read: Callable[[str], Tensor]) -> None:
    """Writes a new safetensors file; `read` is called once for each name, in order, and its result is cast."""
    header = _header(specs)
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for name, spec in specs.items():
            file.write(_content(name, read(name), spec))
        file.flush()
        os.fsync(file.fileno())


def _header(specs: Mapping[str, TensorSpec]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers requires this
    begin = 0
    for name, spec in specs.items():
        if spec.dtype not in DTYPE_NAMES:
            raise ValueError(f"{name} is {spec.dtype}, which safetensors cannot store. Convert it, or export to .pt.")
        end = begin + spec.nbytes
        entries[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": spec.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _content(name: str, tensor: Tensor, spec: TensorSpec) -> memoryview | bytes:
    if tensor.shape != spec.shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)} where {spec.shape} was expected.")
    values = tensor.detach().to(device="cpu", dtype=spec.dtype).resolve_conj().resolve_neg().contiguous().reshape(-1)
    # Through uint8: numpy has no bfloat16 and no float8. An empty tensor has no bytes to view.
    return values.view(torch.uint8).numpy().data if values.numel() else b""
