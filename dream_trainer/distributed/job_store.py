"""The job's store: where ranks leave notes for one another beside all collectives.

One connection serves all trainers of a process. Each attempt of the job has keys of its own: a restart under the same
torchrun agent must not find the last one's.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from dream_trainer.compat.pytorch import connect_again
from dream_trainer.errors import ConfigError

if TYPE_CHECKING:
    from dream_trainer.compat.stores import Store

_store: Store | None = None


def store_for_group(number: int, rank: int, world_size: int, timeout: timedelta) -> Store:
    """The store for the process group that this process makes as its `number`-th; connects on the first call.

    Under a prefix of its own: a second `init_process_group` on the agent's store met stale keys
    (docs/measurements.md#a-second-process-group).

    Raises:
        ConfigError: The process was not started by torchrun, or in its way.
    """
    global _store
    from dream_trainer.compat.stores import PrefixStore

    if _store is None:
        _store = _connect(rank, world_size, timeout)
    return PrefixStore(f"{_prefix()}/{number}", _store)


def job_store() -> Store | None:
    """The keys of this attempt, for the main thread; None where no process group was made here."""
    if _store is None:
        return None
    from dream_trainer.compat.stores import PrefixStore

    return PrefixStore(_prefix(), _store)


def job_store_for_thread() -> Store | None:
    """The same over a connection of its own, since one serves one thread at a time."""
    if _store is None:
        return None
    from dream_trainer.compat.stores import PrefixStore

    return PrefixStore(_prefix(), connect_again(_store))


def another_rank_failed() -> bool:
    """Whether a rank of this attempt has said that it failed; does not wait."""
    if _store is None:
        return False
    try:
        return bool(_store.check([f"{_prefix()}/failed"]))
    except RuntimeError:  # the store went away with its rank
        return True


def all_say(what: str, world_size: int, timeout_seconds: float) -> bool:
    """Says `what`, and returns whether all ranks have said it within the time."""
    if _store is None:
        return True
    key = f"{_prefix()}/said/{what}"
    try:
        if _store.add(key, 1) == world_size:
            _store.set(f"{key}/all", "")
        _store.wait([f"{key}/all"], timedelta(seconds=timeout_seconds))
    except RuntimeError:  # the time is up, or the store went away with its rank
        return False
    return True


def leave(number: int, world_size: int, timeout_seconds: float | None) -> None:
    """Says that this rank leaves its `number`-th process group, and with a time-out waits until all ranks have said so.

    Not by a collective: a rank that gives up must not leave one running, and gloo's monitored_barrier keeps its
    time-out on rank 0 only.

    Raises:
        RuntimeError: A rank did not come in time.
    """
    if _store is None:
        return
    key = f"{_prefix()}/{number}/leaving"
    if _store.add(key, 1) == world_size:
        _store.set(f"{key}/all", "")
    if timeout_seconds is not None:
        _store.wait([f"{key}/all"], timedelta(seconds=timeout_seconds))


def _prefix() -> str:
    return f"dream_trainer/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _connect(rank: int, world_size: int, timeout: timedelta) -> Store:
    from dream_trainer.compat.stores import TCPStore

    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(f"WORLD_SIZE={world_size} but {' and '.join(missing)} are not set. Start with torchrun.")
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=rank == 0 and not agent_hosts,
        timeout=timeout,
        multi_tenant=True,
    )
