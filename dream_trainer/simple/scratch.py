"""Where a run without a name keeps what a trainer cannot do without, such as its lock: nowhere that anybody looks."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dream_trainer.simple.objects_trainer import ObjectsTrainer

_COUNT = itertools.count()


def scratch_directory() -> Path:
    """A directory for one trainer, the same on all ranks of a host. The trainer removes it when it is closed."""
    if "MASTER_PORT" not in os.environ or "RANK" not in os.environ:
        return Path(tempfile.mkdtemp(prefix="dream_trainer_"))
    job = f"{os.environ.get('MASTER_ADDR')}_{os.environ['MASTER_PORT']}_{next(_COUNT)}"
    return Path(tempfile.gettempdir()) / f"dream_trainer_{job}"


def close_and_remove(dream: ObjectsTrainer, scratch: Path | None) -> None:
    """What happens when nobody has the trainer any more. Several ranks do not get here together: they end by exit."""
    if not (dream._world is not None and dream.world.world_size > 1):
        dream.close()
    if scratch is not None and (dream._world is None or dream.world.is_main):
        shutil.rmtree(scratch, ignore_errors=True)
