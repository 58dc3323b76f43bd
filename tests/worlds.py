"""Real multi-process worlds for tests: each rank is a process with the environment torchrun would give it.

A server imports torch and the framework once and forks ranks in milliseconds. Ranks are kept for the next world, unless
one of them failed or is not as it was before (tests/kept_ranks.py). With `--all` every world has fresh ranks, which are
spawned: forked ones share one order of hashing, and ranks of `torchrun` don't.
"""

import atexit
import contextlib
import faulthandler
import os
import pickle
import random
import signal
import socket
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.kept_ranks import StateOfRank

SERVER = mp.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.preloaded"])
start_method = "forkserver"


_reserved: deque[socket.socket] = deque()  # the oldest are let go, whose servers listen by then or have ended


def free_port() -> int:
    """A TCP port on localhost that nothing listens on, and that no other test run takes at this moment.

    Not one of those that the system gives to outgoing connections: other ranks' would take it before it is listened on.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        held = socket.socket()
        try:
            held.bind(("127.0.0.1", port))
        except OSError:
            held.close()
            continue
        # Until it is listened on, others fail to bind it as above, while a server, which sets the same, does not.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _reserved.append(held)
        if len(_reserved) > 32:
            _reserved.popleft().close()
        return port


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for one rank of a single host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


class KeptWorld:
    """Ranks that stay, for many calls: a call costs what the function does, and no start of processes.

    A call that fails ends its ranks, and the next one starts others. Use it with `with`.
    """

    def __init__(self) -> None:
        self.ranks: list[Rank] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def call(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 180.0, renew: bool = False
    ) -> list[Any]:
        """Calls `function(*args)` on the first `world_size` ranks and returns the results in rank order.

        Args:
            function: A module-level callable; its result must be picklable.
            world_size: Number of processes.
            *args: Handed to `function` on every rank.
            timeout: Seconds after which the ranks are killed and the test fails.
            renew: Whether ranks get back the state they started with, and end where they cannot.

        Raises:
            RuntimeError: A rank failed (its traceback is the message) or the time ran out.
        """
        ranks, self.ranks = self.ranks[:world_size], self.ranks[world_size:]
        results: list[Any] = []
        with tempfile.TemporaryDirectory() as stacks:
            try:
                while len(ranks) < world_size:
                    ranks.append(Rank())
                port, call = free_port(), pickle.dumps((function, args))
                for number, rank in enumerate(ranks):
                    environment = os.environ | rank_environment(number, world_size, port)
                    rank.calls.send((environment, os.getcwd(), f"{stacks}/{number}", call, renew))
                results, are_as_before = _collect(ranks, Path(stacks), timeout)
                if are_as_before:
                    self.ranks = ranks + self.ranks
                    ranks = []
            finally:
                _end(ranks, patience=10 if results else 0.5)
        return results

    def end(self) -> None:
        ranks, self.ranks = self.ranks, []
        _end(ranks, patience=10)


kept = KeptWorld()
atexit.register(kept.end)  # before multiprocessing waits for its processes, which do not end by themselves


def run_world(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 180.0, fresh: bool = False
) -> list[Any]:
    """Calls `function(*args)` on every rank of a world and returns the results in rank order; see `KeptWorld.call`.

    `fresh` ranks have done nothing before, and end as a process does, which takes twice as long.
    """
    if fresh or start_method == "spawn" or world_size > 4:
        with KeptWorld() as world:
            return world.call(function, world_size, *args, timeout=timeout)
    return kept.call(function, world_size, *args, timeout=timeout, renew=True)


def run_each(
    function: Callable[..., Any], world_size: int, cases: Sequence[Any], *args: Any, timeout: float = 180.0
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Each case with what `function(case, *args)` returns on each rank, one after the other in one world."""
    by_rank = run_world(_call_for_each, world_size, function, cases, args, timeout=timeout)
    return zip(cases, zip(*by_rank, strict=True), strict=True)


def _call_for_each(function: Callable[..., Any], cases: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    return [function(case, *args) for case in cases]


@contextlib.contextmanager
def gloo_group() -> Iterator[None]:
    """Around what ranks do that need no more than the group of all."""
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


class Rank:
    """A process that serves calls until it is told to end, or fails."""

    def __init__(self) -> None:
        context = mp.get_context(start_method)
        self.calls, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,))
        self.process.start()
        theirs.close()


def _serve(calls: Connection) -> None:
    start: StateOfRank | None = None
    while (received := calls.recv()) is not None:
        environment, directory, stacks, call, renew = received
        os.environ.clear()  # the server's is that of the moment when it was started
        os.environ.update(environment)
        os.chdir(directory)  # so is its working directory
        torch.set_num_threads(1)
        if renew and start is None:
            start = StateOfRank()
        with open(stacks, "w") as asked_for_stacks:
            faulthandler.register(signal.SIGUSR2, asked_for_stacks)
            try:
                function, args = pickle.loads(call)
                # Bytes, since tensors sent as such live in files that die with this process.
                result = pickle.dumps(function(*args))
            except BaseException:
                calls.send((None, traceback.format_exc(), False))
                raise
            faulthandler.unregister(signal.SIGUSR2)
        del function, args
        calls.send((result, None, start is None or start.restore()))


def _collect(ranks: list[Rank], stacks: Path, timeout: float) -> tuple[list[Any], bool]:
    """One result of each rank, and whether all can serve again. Asked to, ranks write where they are under `stacks`."""
    results: dict[int, Any] = {}
    are_as_before, deadline = True, time.monotonic() + timeout
    while waiting := {rank.calls: rank for number, rank in enumerate(ranks) if number not in results}:
        if time.monotonic() > deadline:
            where = _where_ranks_are(ranks, stacks)
            raise RuntimeError(f"no result within {timeout} s but of ranks {sorted(results)}\n{where}")
        is_dead = any(rank.process.exitcode is not None for rank in waiting.values())  # before what it said is read
        errors = []
        for calls in wait(list(waiting), timeout=0.2):
            number = ranks.index(waiting[calls])
            try:
                value, error, is_as_before = waiting[calls].calls.recv()
            except (EOFError, ConnectionError):
                continue
            if error is not None:
                errors.append(f"rank {number} of {len(ranks)} failed:\n{error}")
            else:
                results[number], are_as_before = pickle.loads(value), are_as_before and is_as_before
        if errors:
            raise RuntimeError("\n".join(errors))
        if is_dead:
            for rank in ranks:  # the others follow once they see it
                rank.process.join(timeout=5)
            codes = {number: rank.process.exitcode for number, rank in enumerate(ranks) if rank.process.exitcode}
            raise RuntimeError(f"ranks ended without a result, by exit code: {codes}")
    return [results[number] for number in range(len(ranks))], are_as_before


def _where_ranks_are(ranks: list[Rank], stacks: Path) -> str:
    for rank in ranks:
        if rank.process.is_alive():
            os.kill(rank.process.pid, signal.SIGUSR2)
    time.sleep(1)
    return "\n".join(f"rank {path.name}:\n{path.read_text()}" for path in sorted(stacks.iterdir()))


def _end(ranks: list[Rank], patience: float) -> None:
    for rank in ranks:
        with contextlib.suppress(OSError):
            rank.calls.send(None)
    for rank in ranks:
        rank.process.join(timeout=patience)
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.calls.close()
