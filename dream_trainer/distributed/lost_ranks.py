"""Which rank died, where all that a rank knows is that a connection closed.

Each rank leaves its host and process number in the job's store; one that loses a connection looks which one is gone."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dream_trainer.compat.pytorch import Store

LOOK_FOR_SECONDS = 2.0  # how long to look: the system ends a killed process some time after its connections

_LOST = re.compile(
    r"Connection closed|Connection reset|Broken pipe|remote process exited|recvValue failed|connection.*aborted", re.I
)


class LostHostError(RuntimeError):
    """What ends the others where a host of the job is gone, or cannot be reached. Nobody catches it."""


def announce(store: Store, rank: int) -> None:
    store.set(_key(rank), f"{os.getpid()} {socket.gethostname()}")


def is_lost_connection(exc: BaseException) -> bool:
    """Whether a collective failed because another rank is gone."""
    if isinstance(exc, LostHostError):
        return True
    return isinstance(exc, RuntimeError) and _LOST.search(str(exc)) is not None


def dead_ranks(store: Store, world_size: int) -> dict[int, str]:
    """The ranks of this host whose processes are gone, with the process in words; looks until one is found."""
    this_host = socket.gethostname()
    deadline = time.monotonic() + LOOK_FOR_SECONDS
    processes = {rank: store.get(_key(rank)).decode().split(" ", 1) for rank in range(world_size)}
    while True:
        dead = {
            rank: f"process {number} on {host}"
            for rank, (number, host) in processes.items()
            if host == this_host and not _is_alive(int(number))
        }
        if dead or time.monotonic() > deadline:
            return dead
        time.sleep(0.05)


def _is_alive(number: int) -> bool:
    """Whether a process runs; one that has ended, and that nobody has waited for yet, does not."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    state = _state(number)
    if state is None:  # not Linux, or gone by now
        return Path("/proc/self").exists() is False
    return state not in ("Z", "X")


def _state(number: int) -> str | None:
    """What Linux says that a process does: a letter, T where it is stopped; None elsewhere, or where it is gone."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def announced_processes(store: Store, ranks: Sequence[int]) -> dict[int, int]:
    """The process numbers of `ranks`; none until all of them have announced themselves."""
    keys = [_key(rank) for rank in ranks]
    if not store.check(keys):
        return {}
    return {rank: int(store.get(key).split()[0]) for rank, key in zip(ranks, keys, strict=True)}


def is_stopped(number: int) -> bool:
    """Whether a process of this host was stopped by a signal (Linux)."""
    return _state(number) == "T"


def _key(rank: int) -> str:
    return f"process/{rank}"
