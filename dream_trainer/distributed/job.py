"""The job's store, where ranks leave notes for one another outside all collectives; and how a job ends when a rank has
failed: without a collective, since the other ranks may be inside any.

Each attempt has keys under a name that its ranks agree on. A restart must not find the last attempt's keys, and the
number of restarts does not change when hosts join or leave."""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from textwrap import shorten
from typing import NoReturn

from dream_trainer.compat.pytorch import PrefixStore, Store, TCPStore, connect_again
from dream_trainer.errors import ConfigError, is_own
from dream_trainer.screen import logger

PACKAGE = Path(__file__).parent.parent
LATER_SECONDS = 0.5  # how much later the other ranks leave, so that torchrun takes the one that failed for the cause
LOOK_FOR_SECONDS = 2.0  # how long to look for a dead rank: its process ends some time after its connections
_LOOK_SECONDS = 0.02
SAYS_SO_AFTER_SECONDS = 10.0  # how long a rank waits for others before it logs that

_LOST = re.compile(
    r"Connection closed|Connection reset|Broken pipe|remote process exited|recvValue failed|connection.*aborted", re.I
)


class _Job:
    """This process in its job, from its first process group on."""

    store: Store | None = None
    attempt = ""  # prefix of this attempt's keys
    has_told = False  # why this rank stops


_job = _Job()


def store_for_group(number: int, rank: int, world_size: int, timeout: timedelta) -> Store:
    """The store for this process's `number`-th group, under its own prefix; connects on the first call."""
    if _job.store is None:
        _job.store, agent_hosts = _connect(rank, world_size, timeout)
        _job.attempt = _agree_on_attempt(_job.store, rank, world_size, timeout) if agent_hosts else "dream_trainer"
    return PrefixStore(f"{_job.attempt}/{number}", _job.store)


def job_store(*, for_thread: bool = False) -> Store | None:
    """The keys of this attempt; None where no process group was made here. A connection serves one thread at a time."""
    store = _job.store
    return None if store is None else PrefixStore(_job.attempt, connect_again(store) if for_thread else store)


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
    address, is_master = os.environ["MASTER_ADDR"], rank == 0 and not agent_hosts
    store = TCPStore(address, int(port), world_size, is_master=is_master, timeout=timeout, multi_tenant=True)
    return store, agent_hosts


def end_job(exc: BaseException, store: Store | None, *, rank: int, world_size: int) -> NoReturn:
    """Tells of this rank's failure and ends the process with status 1; its closing sockets free the other ranks."""
    if is_lost_connection(exc) and _is_gone(store):
        first = 0  # which hosted it
    else:
        first = first_to_fail(store, rank, dead=lambda: _dead(exc, store, world_size))
    tell_failure(exc, describe(exc) if first == rank else "", rank=rank, first=first)
    if first != rank and "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(LATER_SECONDS)
    os._exit(1)


def leave_lost_job() -> None:
    """Ends this process with status 1 if a rank of its job has said that it failed; for a signal handler."""
    store = job_store()
    if store is None:
        return
    try:
        if not store.check(["failed"]):
            return
        why = f"because of rank {int(store.get('failed'))}"
    except RuntimeError:
        why = "because the process that hosted the job's store is gone"
    with contextlib.suppress(RuntimeError):  # this rank was writing a line itself
        if not _job.has_told:
            sys.stderr.write(f"[rank {os.environ.get('RANK', '0')}] stops {why}.\n")
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(1)


def _is_gone(store: Store | None) -> bool:
    """Whether the store went away with the rank that hosted it; torchrun's agent hosts it for longer than any rank."""
    if store is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return False
    try:
        store.check(["failed"])
    except RuntimeError:
        return True
    return False


def _dead(exc: BaseException, store: Store | None, world_size: int) -> int | None:
    """The rank that died, if this one failed because of it; announces it, since a dead process cannot."""
    if store is None or not is_lost_connection(exc):
        return None
    dead = dead_ranks(store, world_size)
    for rank, process in dead.items():
        sys.stderr.write(
            f"[rank {rank}] died, the job ends: {process} is gone. The system or a user killed it (out of memory?), "
            "or native code ended it.\n"
        )
    return next(iter(dead), None)


def describe(exc: BaseException) -> str:
    """Describes an exception: itself, the place in the user's code, and the calls from there on."""
    lines = [f"{type(exc).__name__}: {exc}"]
    report = traceback.TracebackException.from_exception(exc)
    frames = report.stack
    users = [frame for frame in frames if is_own(frame.filename)]
    if users:
        place = users[-1]
        lines.append(f"  in {place.name}, {place.filename}:{place.lineno}: {place.line}")
    # The calls from fit() down to the user's step are the same for every mistake.
    outside_package = (index for index, frame in enumerate(frames) if not Path(frame.filename).is_relative_to(PACKAGE))
    report.stack = traceback.StackSummary.from_list(frames[next(outside_package, 0) :])
    return "\n".join(lines) + "\n" + "".join(report.format())


def tell_failure(exc: BaseException, report: str, *, rank: int, first: int) -> None:
    """Writes to standard error that this rank failed; only the first to fail prints `report` and notifies torchrun."""
    reason = shorten(f"{type(exc).__name__}: {exc}".split("\n")[0], 200, placeholder=" ...")
    if first == rank:
        sys.stderr.write(f"[rank {rank}] failed, the job ends:\n{report.rstrip()}\n")
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            try:
                raise SeeAbove(reason) from None
            except SeeAbove as short:
                get_error_handler().record_exception(short)
    else:
        because = f" (here: {reason})" if not is_lost_connection(exc) else ""
        sys.stderr.write(f"[rank {rank}] stops because of rank {first}{because}.\n")
    _job.has_told = True
    sys.stderr.flush()
    sys.stdout.flush()


class SeeAbove(Exception):
    """Stands in torchrun's summary for an exception whose traceback was printed already."""


def first_to_fail(store: Store | None, rank: int, dead: Callable[[], int | None] = lambda: None) -> int:
    """The rank whose failure came first, by an atomic counter; this rank if the store is gone. Sets `failed`."""
    if store is None:
        return rank
    try:
        if store.add("failures", 1) > 1:
            return int(store.get("failed"))
        dead_rank = dead()
        first = rank if dead_rank is None else dead_rank
        store.set("failed", str(first))
        return first
    except RuntimeError:  # the store went away with its rank
        return rank


class LostHostError(RuntimeError):
    """Ends the other ranks when a host of the job is gone, or cannot be reached. It must not be caught."""


def announce(store: Store, rank: int) -> None:
    """Records this rank's process, for `dead_ranks` of a rank that only knows that a connection closed."""
    store.set(f"process/{rank}", f"{os.getpid()} {socket.gethostname()}")


def is_lost_connection(exc: BaseException) -> bool:
    is_lost = isinstance(exc, RuntimeError) and _LOST.search(str(exc)) is not None
    return is_lost or isinstance(exc, LostHostError)


def dead_ranks(store: Store, world_size: int) -> dict[int, str]:
    """The dead ranks of this host, with descriptions of their processes; looks until one is found."""
    this_host = socket.gethostname()
    deadline = time.monotonic() + LOOK_FOR_SECONDS
    processes = {rank: store.get(f"process/{rank}").decode().split(" ", 1) for rank in range(world_size)}
    while True:
        dead = {
            rank: f"process {number} on {host}"
            for rank, (number, host) in processes.items()
            if host == this_host and not is_running(int(number))
        }
        if dead or time.monotonic() > deadline:
            return dead
        time.sleep(0.05)


def is_running(number: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    state = _state(number)
    if state is None:  # not Linux, or gone by now
        return Path("/proc/self").exists() is False
    return state not in ("Z", "X")


def _state(number: int) -> str | None:
    """Linux's state letter of a process, such as T for stopped; None on other systems, or if it is gone."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def announced_processes(store: Store, ranks: Sequence[int]) -> dict[int, int]:
    """The process numbers of `ranks`; none until all of them have announced themselves."""
    keys = [f"process/{rank}" for rank in ranks]
    if not store.check(keys):
        return {}
    return {rank: int(store.get(key).split()[0]) for rank, key in zip(ranks, keys, strict=True)}


def is_stopped(number: int) -> bool:
    """Whether a process of this host was stopped by a signal (Linux)."""
    return _state(number) == "T"
