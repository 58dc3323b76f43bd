"""Real multi-process worlds for tests: each rank is a process with the environment torchrun would give it.

A server imports torch and the framework once and forks ranks in milliseconds; importing them anew is half of what a
short world costs. Forked ranks share one order of hashing, which `torchrun`'s do not: with `--all` they are spawned.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import random
import signal
import socket
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from typing import Any, Self

import torch.multiprocessing as mp

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


def _entry(
    rank: int,
    environment: dict[str, str],
    directory: str,
    stacks: str,
    function: Callable[..., Any],
    args: tuple,
    queue: Any,
) -> None:
    os.environ.clear()  # the server's is that of the moment when it was started
    os.environ.update(environment)
    os.chdir(directory)  # so is its working directory
    import torch

    torch.set_num_threads(1)
    asked_for_stacks = open(Path(stacks) / str(rank), "w")  # noqa: SIM115 (as long as the process lives)
    faulthandler.register(signal.SIGUSR2, asked_for_stacks)
    try:
        # Bytes, since tensors sent as such live in files that die with this process.
        queue.put((rank, pickle.dumps(function(*args)), None))
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
        raise


def run_world(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 180.0) -> list[Any]:
    """Calls `function(*args)` on every rank of a fresh world and returns the results in rank order.

    Args:
        function: A module-level callable; its result must be picklable.
        world_size: Number of processes.
        *args: Handed to `function` on every rank.
        timeout: Seconds after which the world is killed and the test fails.

    Raises:
        RuntimeError: A rank failed (its traceback is the message) or the time ran out.
    """
    context = mp.get_context(start_method)
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as stacks:
        processes = _start(context, world_size, stacks, function, [args] * world_size, queue)
        results: list[Any] = []
        try:
            results = _collect(processes, stacks, queue, timeout)
        finally:
            _end(processes, [queue], patience=10 if results else 0.5)
    return results


class KeptWorld:
    """Ranks that stay, for many short calls: a call costs what the function does, and no start of processes.

    A call that fails ends them, and the next one starts others. Use it with `with`.

    Args:
        function: A module-level callable; its result must be picklable.
        world_size: Number of processes.
    """

    def __init__(self, function: Callable[..., Any], world_size: int) -> None:
        self._function, self._world_size = function, world_size
        self._context = mp.get_context(start_method)
        self._processes: list[Any] = []
        self._inboxes: list[Any] = []
        self._results: Any = None
        self._stacks: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def call(self, *args: Any, timeout: float = 60.0) -> list[Any]:
        """Calls the function on every rank and returns the results in rank order; raises as `run_world` does."""
        if self._stacks is None:
            self._stacks = tempfile.TemporaryDirectory()
            self._inboxes = [self._context.Queue() for _ in range(self._world_size)]
            self._results = self._context.Queue()
            each = [(self._function, inbox, self._results) for inbox in self._inboxes]
            self._processes = _start(self._context, self._world_size, self._stacks.name, _serve, each, self._results)
            timeout += 60
        for inbox in self._inboxes:
            inbox.put(pickle.dumps(args))
        try:
            return _collect(self._processes, self._stacks.name, self._results, timeout)
        except BaseException:
            self._stop(patience=0.5)
            raise

    def _stop(self, patience: float = 10) -> None:
        if self._stacks is not None:
            for inbox in self._inboxes:
                inbox.put(None)
            _end(self._processes, [*self._inboxes, self._results], patience)
            self._stacks.cleanup()
            self._stacks = None


def _serve(function: Callable[..., Any], inbox: Any, results: Any) -> None:
    gc.freeze()  # closing a trainer collects garbage, which takes half a second over all that is imported
    while (args := inbox.get()) is not None:
        results.put((int(os.environ["RANK"]), pickle.dumps(function(*pickle.loads(args))), None))


def _start(
    context: Any, world_size: int, stacks: str, function: Callable[..., Any], args: list[tuple], queue: Any
) -> list[Any]:
    port = free_port()
    processes = [
        context.Process(
            target=_entry,
            args=(
                rank,
                os.environ | rank_environment(rank, world_size, port),
                os.getcwd(),
                stacks,
                function,
                args[rank],
                queue,
            ),
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return processes


def _collect(processes: list[Any], stacks: str, queue: Any, timeout: float) -> list[Any]:
    """One result of each rank, in rank order. A rank that is asked to writes where its threads are under `stacks`."""
    world_size = len(processes)
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < world_size:
        try:
            rank, value, error = queue.get(timeout=0.2)
        except Empty:
            dead = [rank for rank, process in enumerate(processes) if process.exitcode and rank not in results]
            if dead and queue.empty():
                for process in processes:  # the others follow once they see it
                    process.join(timeout=5)
                codes = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode}
                raise RuntimeError(f"ranks ended without a result, by exit code: {codes}") from None
            if time.monotonic() > deadline:
                where = _where_ranks_are(processes, stacks)
                raise RuntimeError(f"no result within {timeout} s but of ranks {sorted(results)}\n{where}") from None
            continue
        if error is not None:
            raise RuntimeError(f"rank {rank} of {world_size} failed:\n{error}")
        results[rank] = pickle.loads(value)
    return [results[rank] for rank in range(world_size)]


def _where_ranks_are(processes: list[Any], stacks: str) -> str:
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR2)
    time.sleep(1)
    return "\n".join(f"rank {path.name}:\n{path.read_text()}" for path in sorted(Path(stacks).iterdir()))


def _end(processes: list[Any], queues: list[Any], patience: float) -> None:
    for process in processes:
        process.join(timeout=patience)
        if process.is_alive():
            process.kill()
            process.join()
    for queue in queues:
        queue.close()
        queue.join_thread()
