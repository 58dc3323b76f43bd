"""`checkpoints push`: an export, uploaded to the Hugging Face Hub."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.checkpoint.lookup import find_checkpoint
from dream_trainer.cli.output import print_json
from dream_trainer.stores.store_path import as_path
from dream_trainer.weights.hub import push_to_hub

if TYPE_CHECKING:
    from dream_trainer.cli.checkpoints import Push


def push(arguments: Push) -> int:
    """Pushes an export and prints the commit; returns the exit code."""
    checkpoint = find_checkpoint(as_path(arguments.checkpoint), arguments.step)
    address = push_to_hub(
        checkpoint,
        arguments.repo,
        model=arguments.model,
        weights=arguments.weights,
        merge_adapters=arguments.merge_adapters,
        base=arguments.base,
        base_model=arguments.base_model,
        beside=arguments.beside,
        private=not arguments.public,
    )
    if arguments.as_json:
        print_json({"checkpoint": checkpoint, "repo": arguments.repo, "commit": address})
    else:
        print(f"pushed {checkpoint} to {address}")
    return 0
