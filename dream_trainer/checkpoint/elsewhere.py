"""Checkpoints that lie on another disk than their run: the run's `checkpoints` is a link to them, which all follow."""

from __future__ import annotations

import secrets
from pathlib import Path

from dream_trainer.checkpoint.files import step_directories, sync_directory
from dream_trainer.distributed.outcomes import on_all_ranks
from dream_trainer.distributed.ranks import Ranks
from dream_trainer.errors import CheckpointError


def linked_checkpoints(link: Path, elsewhere: Path | None, world: Ranks) -> Path:
    """The directory of a run's checkpoints, to which `link` leads from now on; every rank calls it.

    Args:
        link: The run's `checkpoints`.
        elsewhere: Where they are to lie; None: where it leads already.
        world: The ranks.

    Raises:
        CheckpointError: They cannot lie there; the same on every rank.
    """
    directory = link.resolve() if elsewhere is None else elsewhere
    on_all_ranks(world, "find the checkpoints", lambda: link_checkpoints(link, directory) if world.is_main else None)
    return directory


def link_checkpoints(link: Path, directory: Path) -> None:
    """Makes `link` lead to `directory`, which is made if it is not there; rank 0 alone calls it.

    Args:
        link: The run's `checkpoints`.
        directory: Where the checkpoints lie, or will.

    Raises:
        CheckpointError: The run has checkpoints in another place, which would be lost sight of, or that place is gone.
    """
    directory = directory.absolute()
    if link.is_symlink() and not link.exists():
        raise CheckpointError(
            f"{link} leads to {link.readlink()}, which is not there: is that disk mounted? Remove the link if the "
            "checkpoints are gone."
        )
    if link.exists() and link.resolve() == directory.resolve():
        return
    count = len(step_directories(link))
    if count:
        raise CheckpointError(
            f"the run has {count} checkpoints in {link.resolve()}, and checkpoint_parameters.directory says "
            f"{directory}. Move them there, or leave `directory` as it was."
        )
    if link.is_dir() and not link.is_symlink():
        _remove_empty(link)
    directory.mkdir(parents=True, exist_ok=True)
    new = link.with_name(f".{link.name}.tmp-{secrets.token_hex(8)}")
    new.symlink_to(directory)
    new.replace(link)  # an older link goes in the same moment
    sync_directory(link.parent)


def _remove_empty(directory: Path) -> None:
    try:
        directory.rmdir()
    except OSError:
        raise CheckpointError(
            f"{directory} is not empty, and checkpoint_parameters.directory would put a link in its place. Move what "
            "is in it away."
        ) from None
