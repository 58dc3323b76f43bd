"""The frozen weights that a checkpoint left out, read from the file that the run had loaded them from."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from dream_trainer.checkpoint.digests import value_digests
from dream_trainer.distributed.ranks import Ranks
from dream_trainer.errors import CheckpointError
from dream_trainer.weights.reading import WeightFiles
from dream_trainer.weights.safetensors_file import DTYPE_NAMES, TensorSpec
from dream_trainer.weights.weight_files import open_weights

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}
_DIGEST = re.compile(r"(\w+) (\(.*\)) [0-9a-f]{16}")


class LeftOutWeights:
    """Tensors by the names that the checkpoint would have for them.

    Args:
        records: What the checkpoint says of each: its digest, and the path and name it was loaded from if known.
        base: Where to read them instead, as it was moved; None for where they were.

    Attributes:
        specs: Shape and dtype of each.
    """

    def __init__(self, records: Mapping[str, Mapping[str, str]], base: Path | None) -> None:
        self._records, self._base = records, base
        self._files: dict[Path, WeightFiles] = {}
        self.specs: dict[str, TensorSpec] = {}
        for name, record in records.items():
            match = _DIGEST.fullmatch(record["digest"])
            if match is not None and match[1] in _DTYPES:
                self.specs[name] = TensorSpec(tuple(ast.literal_eval(match[2])), _DTYPES[match[1]])

    def read(self, name: str) -> Tensor:
        """The whole tensor on the CPU, its digest compared.

        Raises:
            CheckpointError: It is not known where it was loaded from, or it is not there, or has other values now.
        """
        record, spec = self._records[name], self.specs[name]
        if "path" not in record:
            raise CheckpointError(
                f"the checkpoint has no {name}, which was frozen, and does not know where it came from, since it was "
                "not loaded by load_weights. Export from the trainer instead: trainer.export(...)."
            )
        path = self._base or Path(record["path"])
        if path not in self._files:
            self._files[path] = open_weights(path, None)
        files = self._files[path]
        if files.shapes.get(record["name"]) != spec.shape:
            raise CheckpointError(
                f"{path} has no {record['name']!r} of shape {spec.shape}, which {name} was loaded from."
            )
        tensor = files.read(record["name"], tuple(slice(0, size) for size in spec.shape)).to(spec.dtype)
        if value_digests({name: tensor}, world=Ranks.alone())[name] != record["digest"]:
            raise CheckpointError(
                f"{record['name']!r} in {path} is not what {name} was when the checkpoint was saved. Give the file or "
                "directory that the run loaded (base=, --base)."
            )
        return tensor
