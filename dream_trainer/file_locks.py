"""Locks on open files, also on network disks that have none."""

from __future__ import annotations

import errno
import fcntl
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from dream_trainer.screen import logger

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)


def take(file: IO[Any], *, shared: bool = False) -> bool | None:
    """Takes the lock of an open file, without waiting: whether it is held now; None if there are no locks."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def release(file: IO[Any]) -> None:
    """Releases the lock: closing is not enough, since a loader's worker may have the file open too."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)


@cache
def warn_of_no_locks(directory: Path) -> None:
    """Warns that nothing keeps two jobs apart, once for a directory."""
    logger.warning(
        "the file system of %s has no file locks, so two jobs that write there at a time are not noticed. Start one at "
        "a time, or use a disk with locks (NFS: mount it without nolock).",
        directory,
    )
