"""Where a run without a name keeps what a trainer cannot do without, such as its lock: nowhere that anybody looks."""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path

_COUNT = itertools.count()


def scratch_directory() -> Path:
    """A directory for one trainer, the same on all ranks of a host. The trainer removes it when it is closed."""
    if "MASTER_PORT" not in os.environ or "RANK" not in os.environ:
        return Path(tempfile.mkdtemp(prefix="dream_trainer_"))
    job = f"{os.environ.get('MASTER_ADDR')}_{os.environ['MASTER_PORT']}_{next(_COUNT)}"
    return Path(tempfile.gettempdir()) / f"dream_trainer_{job}"
