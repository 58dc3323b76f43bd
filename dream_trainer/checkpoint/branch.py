"""Branches: a run that continues from an older checkpoint writes the later steps again, and keeps the former ones."""

from __future__ import annotations

import logging
from pathlib import Path

from dream_trainer.checkpoint.files import set_newer_aside
from dream_trainer.distributed.outcomes import on_all_ranks
from dream_trainer.distributed.ranks import Ranks

logger = logging.getLogger("dream_trainer")


def leave_branch(root: Path, step: int, world: Ranks) -> None:
    """Renames this run's checkpoints after `step`, which belong to a branch that the run leaves now; a collective."""
    set_aside = on_all_ranks(
        world, "set newer checkpoints aside", lambda: set_newer_aside(root, step) if world.is_main else []
    )
    if set_aside:
        logger.warning("going on from step %d; set aside: %s", step, ", ".join(path.name for path in set_aside))
