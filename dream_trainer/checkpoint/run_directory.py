"""A job's claim on its run directory: all ranks see the same one, and no other live job writes to it.

The claim is a lock on an open file, so a killed job leaves nothing that blocks its restart. Rank 0 writes a token into
the file; a rank that reads another token has another directory under that name, such as on its own disk."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from dream_trainer import file_locks
from dream_trainer.checkpoint.files import step_directories, sync_directory
from dream_trainer.distributed.ranks import Ranks, from_main_rank, on_all_ranks
from dream_trainer.errors import CheckpointError
from dream_trainer.stores.store_path import StorePath

LOCK_NAME = "run.lock"
# A killed job's loader workers hold its lock until they notice; network file systems show a new file late.
PATIENCE_SECONDS = 15.0


_held: dict[Path, tuple[IO[str], int]] = {}
_trainings = Counter[Path]()  # on every rank


def claim(run_dir: Path, world: Ranks) -> None:
    """Claims `run_dir` for this job until `release`; every rank calls it."""
    task = f"claim the run directory {run_dir}"
    token = from_main_rank(world, task, lambda: _lock(run_dir))
    on_all_ranks(world, task, lambda: _expect(run_dir, token))


def release(run_dir: Path) -> None:
    """Releases the claim on rank 0, which holds it; on other ranks nothing happens."""
    path = (run_dir / LOCK_NAME).resolve()
    if path not in _held:
        return
    file, users = _held.pop(path)
    if users > 1:
        _held[path] = (file, users - 1)
    else:
        file_locks.release(file)
        file.close()


def trainings(run_dir: Path) -> int:
    """How often trainers of this process have begun to write to a run."""
    return _trainings[run_dir.resolve()]


def count_training(run_dir: Path) -> int:
    """A trainer begins to write to a run; returns how many have, with this one."""
    _trainings[run_dir.resolve()] += 1
    return trainings(run_dir)


def is_claimed(run_dir: Path) -> bool | None:
    """Whether a live job (or this process) has the run directory; None if no job ever had it, or if unknown."""
    path = run_dir / LOCK_NAME
    if path.resolve() in _held:
        return True
    try:
        with path.open("rb") as file:
            is_free = file_locks.take(file, shared=True)
    except FileNotFoundError:
        return None
    return None if is_free is None else not is_free


@contextmanager
def without_jobs(checkpoints: Path) -> Iterator[None]:
    """Keeps jobs from starting to write to a run; a run in an object store is only checked for a job."""
    if isinstance(checkpoints, StorePath):
        from dream_trainer.stores.ownership import is_owned

        if is_owned(checkpoints.parent):
            raise _in_use(checkpoints.parent)
        yield
        return
    # Checkpoints on another disk have their own lock, since the path may be that place and not the link to it.
    directories = dict.fromkeys([checkpoints.absolute().parent, checkpoints.resolve().parent, checkpoints.resolve()])
    with ExitStack() as locks:
        for path in [directory / LOCK_NAME for directory in directories if (directory / LOCK_NAME).exists()]:
            is_held = file_locks.take(locks.enter_context(path.open("a")))
            if is_held is False:
                raise _in_use(path.parent)
            if is_held is None:
                file_locks.warn_of_no_locks(path.parent)
        yield


def _in_use(run_dir: Path) -> CheckpointError:
    return CheckpointError(
        f"a live job writes to {run_dir}. Stop it first, or let its own retention remove checkpoints."
    )


def _lock(run_dir: Path) -> str:
    run_dir.mkdir(parents=True, exist_ok=True)
    path = (run_dir / LOCK_NAME).resolve()
    if path in _held:
        file, users = _held[path]
        _held[path] = (file, users + 1)
        return path.read_text()
    file = path.open("a+")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (is_held := file_locks.take(file)) is False:
        if time.monotonic() > deadline:
            file.close()
            raise CheckpointError(
                f"another live job writes to {run_dir}. Stop it, or give this run another experiment name."
            )
        time.sleep(0.2)
    if is_held is None:
        file_locks.warn_of_no_locks(run_dir)
    token = secrets.token_hex(8)
    file.truncate(0)
    file.write(token)
    file.flush()
    _held[path] = (file, 1)
    return token


def _expect(run_dir: Path, token: str) -> None:
    path = run_dir / LOCK_NAME
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not path.exists() or path.read_text() != token:
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{run_dir.resolve()} is not the directory that rank 0 sees under that name. "
                "Start all ranks in one directory of a file system that all hosts share."
            )
        time.sleep(0.2)


def linked_checkpoints(link: Path, elsewhere: Path | None, world: Ranks) -> Path:
    """The directory of a run's checkpoints, which `link` points to from now on; every rank calls it."""
    directory = link.resolve() if elsewhere is None else elsewhere
    on_all_ranks(world, "find the checkpoints", lambda: _link(link, directory.absolute()) if world.is_main else None)
    return directory


def _link(link: Path, directory: Path) -> None:
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
        try:
            link.rmdir()
        except OSError:
            raise CheckpointError(
                f"{link} is not empty, and checkpoint_parameters.directory would put a link in its place. Move what is "
                "in it away."
            ) from None
    directory.mkdir(parents=True, exist_ok=True)
    new = link.with_name(f".{link.name}.tmp-{secrets.token_hex(8)}")
    new.symlink_to(directory)
    new.replace(link)  # an older link goes in the same moment
    sync_directory(link.parent)
