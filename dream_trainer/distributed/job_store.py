"""The job's store: where ranks leave notes for one another outside all collectives.

Each attempt has keys under a name that its ranks agree on. A restart must not find the last attempt's keys, and the
number of restarts does not change when hosts join or leave."""

from __future__ import annotations

import math
import os
import secrets
import time
from datetime import timedelta

from dream_trainer.compat.pytorch import PrefixStore, Store, TCPStore, connect_again
from dream_trainer.errors import ConfigError
from dream_trainer.screen import logger


class _Connection:
    """This process's connection, from its first process group on."""

    store: Store | None = None
    attempt = ""  # prefix of this attempt's keys


_connection = _Connection()

_LOOK_SECONDS = 0.02
SAYS_SO_AFTER_SECONDS = 10.0  # how long a rank waits for others before it logs that


def store_for_group(number: int, rank: int, world_size: int, timeout: timedelta) -> Store:
    """The store for this process's `number`-th group, under its own prefix; connects on the first call."""
    if _connection.store is None:
        _connection.store, agent_hosts = _connect(rank, world_size, timeout)
        _connection.attempt = (
            _agree_on_attempt(_connection.store, rank, world_size, timeout) if agent_hosts else "dream_trainer"
        )
    return PrefixStore(f"{_connection.attempt}/{number}", _connection.store)


def job_store(*, for_thread: bool = False) -> Store | None:
    """The keys of this attempt; None where no process group was made here. A connection serves one thread at a time."""
    store = _connection.store
    if store is None:
        return None
    return PrefixStore(_connection.attempt, connect_again(store) if for_thread else store)


def all_arrive(where: str, n_ranks: int, timeout_seconds: float, *, times: int = 1, waits_for: str = "") -> bool:
    """Arrives for the `times`-th time, and returns whether `n_ranks` ranks do in time; a long wait is logged."""
    store = job_store()
    if store is None:
        return True
    key, begin, pause = f"at/{where}", time.monotonic(), 0.0005
    says_so_at = begin + SAYS_SO_AFTER_SECONDS
    try:
        arrived = store.add(key, 1)
        while arrived < times * n_ranks and time.monotonic() < begin + timeout_seconds:
            if waits_for and time.monotonic() > says_so_at:
                logger.warning("%s", waits_for)
                says_so_at = math.inf
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
            arrived = store.add(key, 0)
    except RuntimeError:  # the store went away with its rank
        return False
    return arrived >= times * n_ranks


def _agree_on_attempt(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name that all ranks of this attempt have, and none of an earlier one on the same store."""
    calls = [f"dream_trainer/call/{other}" for other in range(1, world_size)]
    if rank > 0:
        word = secrets.token_hex(8)
        store.set(calls[rank - 1], word)
        store.wait([f"dream_trainer/answer/{word}"], timeout)
        name = store.get(f"dream_trainer/answer/{word}").decode()
        store.add(f"{name}/came", 1)
        return name
    name = f"dream_trainer/{secrets.token_hex(8)}"
    answered: dict[str, bytes] = {}
    deadline = time.monotonic() + timeout.total_seconds()
    while store.add(f"{name}/came", 0) < world_size - 1:
        for call in calls:
            word_there = store.get(call) if store.check([call]) else b""
            if word_there and answered.get(call) != word_there:
                answered[call] = word_there
                store.set(f"dream_trainer/answer/{word_there.decode()}", name)
        if time.monotonic() > deadline:
            raise ConfigError(
                f"only {store.add(f'{name}/came', 0) + 1} of {world_size} ranks came within "
                f"{timeout.total_seconds():.0f} s (start_timeout_seconds). Look at what the others' processes say."
            )
        time.sleep(_LOOK_SECONDS)
    return name


def _connect(rank: int, world_size: int, timeout: timedelta) -> tuple[Store, bool]:
    """A connection to the job's store, and whether the agent has it, and so keeps it over attempts."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(f"WORLD_SIZE={world_size} but {' and '.join(missing)} are not set. Start with torchrun.")
    port = os.environ["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(
            f"MASTER_PORT={port!r} is no port that ranks could meet at (with 0 each would wait at a different one). "
            "Use the same free one on all ranks, from 1024 to 65535, such as 29500, or torchrun, which finds one."
        )
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(port),
        world_size,
        is_master=rank == 0 and not agent_hosts,
        timeout=timeout,
        multi_tenant=True,
    )
    return store, agent_hosts
