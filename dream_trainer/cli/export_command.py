"""`checkpoints export`: weights for other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dream_trainer.callbacks.tables import print_table
from dream_trainer.checkpoint.lookup import find_checkpoint
from dream_trainer.cli.output import print_json
from dream_trainer.loggers.formatting import format_bytes
from dream_trainer.stores.store_path import as_path
from dream_trainer.weights.export import export_checkpoint

if TYPE_CHECKING:
    from dream_trainer.cli.checkpoints import Export

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(arguments: Export) -> int:
    """Exports and prints the files; returns the exit code."""
    checkpoint = find_checkpoint(as_path(arguments.checkpoint), arguments.step)
    written = export_checkpoint(
        checkpoint,
        arguments.out,
        model=arguments.model,
        weights=arguments.weights,
        dtype=_DTYPES[arguments.dtype] if arguments.dtype else None,
        max_shard_size=arguments.max_shard_size,
        renames=arguments.renames,
        merge_adapters=arguments.merge_adapters,
        base=arguments.base,
        overwrite=arguments.overwrite,
    )
    sizes = [path.stat().st_size for path in written]
    if arguments.as_json:
        files = [{"path": path, "size": size} for path, size in zip(written, sizes, strict=True)]
        print_json({"checkpoint": checkpoint, "files": files})
    else:
        rows = [[str(path), format_bytes(size)] for path, size in zip(written, sizes, strict=True)]
        print_table(f"exported {checkpoint}", ["file", "size"], rows)
    return 0
