"""`checkpoints push`: an export, uploaded to the Hugging Face Hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from dream_trainer.checkpoint.manifest import read_manifest
from dream_trainer.cli.output import print_json
from dream_trainer.cli.runs import find_checkpoint
from dream_trainer.weights.export import export_checkpoint
from dream_trainer.weights.hub import push_to_hub

if TYPE_CHECKING:
    from dream_trainer.cli.checkpoints import Push


def push(arguments: Push) -> int:
    """Exports to a directory that is removed again, pushes it, and prints the commit; returns the exit code."""
    checkpoint = find_checkpoint(arguments.checkpoint, arguments.step)
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "export"
        export_checkpoint(
            checkpoint,
            out,
            model=arguments.model,
            weights=arguments.weights,
            merge_adapters=arguments.merge_adapters,
            base=arguments.base,
        )
        address = push_to_hub(
            out,
            arguments.repo,
            read_manifest(checkpoint),
            base_model=arguments.base_model,
            private=not arguments.public,
        )
    if arguments.as_json:
        print_json({"checkpoint": checkpoint, "repo": arguments.repo, "commit": address})
    else:
        print(f"pushed {checkpoint} to {address}")
    return 0
