"""A disk that fills up: a small tmpfs where a job's checkpoints are. It takes root."""

import subprocess
from pathlib import Path
from typing import Self

from tests.faults.job import run_dir
from tests.faults.phases import Fault, fill


class SmallDisk:
    """A tmpfs of 4 MB where the run's checkpoints are, with room for all of them until it is filled; a context that
    mounts and unmounts it.
    """

    def __init__(self, directory: Path) -> None:
        self.path = run_dir(directory) / "checkpoints"
        self._filler = self.path / "filler"

    def __enter__(self) -> Self:
        """Mounts it.

        Raises:
            OSError: This process may not.
        """
        self.path.mkdir(parents=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "faults", str(self.path)], capture_output=True, text=True
        )
        if done.returncode != 0:
            raise OSError(f"this process may not mount a tmpfs: {done.stderr.strip()}")
        return self

    def __exit__(self, *exc: object) -> None:
        subprocess.run(["umount", "--lazy", str(self.path)], check=True, capture_output=True)

    def fill(self) -> None:
        fill(self._filler)

    def filled_by(self, rank: int) -> Fault:
        """A rank that finds the disk full when it writes its part of the third checkpoint."""
        path = str(self._filler.absolute())
        return Fault(phase="before its own shard", does="fill", rank=rank, calls=(3,), seconds=0.5, path=path)

    def empty(self) -> None:
        self._filler.unlink()
