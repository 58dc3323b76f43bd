"""Watchdog: when training stands still, every rank writes where its threads are, and the job ends with an error.

    write this rank's stacks -> tell the other ranks, through the store -> they write theirs -> all exit with status 1

`faulthandler`, whose timer is native, is armed again at every check, for code that holds Python's lock.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, NoReturn

from dream_trainer.checks import listed
from dream_trainer.compat.pytorch import Store, recorded_collectives
from dream_trainer.distributed.job import first_to_fail, tell_failure
from dream_trainer.errors import line_running_in

LOOK_SECONDS = 1.0  # how often a rank looks whether it moves
ASK_SECONDS = 3.0  # how often it asks the store whether another rank stands still
GATHER_SECONDS = 10.0  # how long ranks wait for one another's stacks; longer than it takes all to ask
# How much later than the limit the backstop acts: after the orderly end, before torchrun kills what is left (30 s).
GRACE_SECONDS = 20.0
_LINES = 8  # that the report has of ranks, which are hundreds in some jobs


@dataclass(eq=False)
class Watchdog:
    """Ends the job with every rank's stacks when `where`, called from a thread, stays the same for the limit. One for
    each process, since `faulthandler` has one timer."""

    where: Callable[[], str]
    limit_seconds: Callable[[], float]
    patient_limit_seconds: float
    directory: Path
    rank: int = 0
    world_size: int = 1
    store: Store | None = None

    def __post_init__(self) -> None:
        self._path = self.directory.absolute() / f"rank_{self.rank:05d}.txt"
        self._patient_depth = self._patience_changes = 0
        self._closing = threading.Event()

    def __enter__(self) -> Watchdog:
        self._closing.clear()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stops watching; never waits long, since it is called on the way out of a failure too."""
        self._closing.set()
        self._thread.join(timeout=5)
        faulthandler.cancel_dump_traceback_later()

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Inside, allows `patient_limit_seconds` without progress: for a save, or another phase without batches."""
        self._patient_depth += 1
        self._patience_changes += 1
        try:
            yield
        finally:
            self._patient_depth -= 1
            self._patience_changes += 1

    # -- the thread

    def _watch(self) -> None:
        if self.store is not None:
            self.store.set_timeout(timedelta(seconds=GATHER_SECONDS))
        with self._backstop_file() as file:
            try:
                self._look_until_closed(file)
            finally:
                faulthandler.cancel_dump_traceback_later()

    def _look_until_closed(self, file: IO[str]) -> None:
        seen, since, asked = None, 0.0, time.monotonic()
        while not self._closing.is_set():
            now, where = time.monotonic(), self.where()
            limit = self.patient_limit_seconds if self._patient_depth else self.limit_seconds()
            if (where, self._patience_changes) != seen:
                seen, since = (where, self._patience_changes), now
            faulthandler.dump_traceback_later(max(since + limit - now, 0.0) + GRACE_SECONDS, file=file, exit=True)
            if now - since > limit:
                self._end_job(f"rank {self.rank} made no progress for {now - since:.0f} s ({where})", where)
            if now - asked > ASK_SECONDS:
                asked, failure = now, self._told()
                if failure is not None:
                    self._end_job(failure, where)
            self._closing.wait(LOOK_SECONDS)

    @contextmanager
    def _backstop_file(self) -> Iterator[IO[str]]:
        """The backstop's output: this rank's file, removed afterwards if empty, or standard error if that fails."""
        try:
            self._path.parent.mkdir(exist_ok=True)  # without its parents: a run that keeps no files shall have none
            file = self._path.open("a")
        except OSError:
            yield sys.__stderr__ or sys.stderr
            return
        try:
            yield file
        finally:
            file.close()
            with suppress(OSError):  # the directory, while other ranks' files are in it
                if self._path.stat().st_size == 0:
                    self._path.unlink()
                    self._path.parent.rmdir()

    # -- the end

    def _told(self) -> str | None:
        if self.store is None:
            return None
        try:
            return self.store.get("hang").decode() if self.store.check(["hang"]) else None
        except RuntimeError:  # the store is gone with its rank; ranks that talk to it fail by themselves
            return None

    def _end_job(self, reason: str, where: str) -> NoReturn:
        if self.store is not None:
            with suppress(RuntimeError):
                self.store.set("hang", reason)
        first = first_to_fail(self.store, self.rank)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            place = f"rank {self.rank} of {self.world_size} on {socket.gethostname()}, process {os.getpid()}"
            with self._path.open("a") as file:
                file.write(f"==== {now}, {place}\n{reason}; this rank is at {where}\n\n{stacks()}\n")
            records = recorded_collectives() if self.store is not None else None
            if records is not None:  # of this rank's last collectives; `torchfrtrace` compares the ranks' of NCCL
                directory = self._path.parent.parent / "flight_recorder"
                directory.mkdir(exist_ok=True)
                (directory / f"rank_{self.rank}").write_bytes(records)
            report = f"{reason}.\n{self._what_was_written(self._gather())}"
        except Exception as error:  # a full disk, a lost file system: whatever it is, the job must end
            report = f"{reason}.\nIts stacks, since writing {self._path} failed ({error}):\n{stacks()}"
        report += (
            "\nThe rank whose stack differs from the others' is the one they wait for. If this is not a hang, raise "
            "hang_timeout_seconds in DeviceParameters."
        )
        tell_failure(TimeoutError(reason), report, rank=self.rank, first=first)
        self._leave(first)

    def _gather(self) -> dict[int, str] | None:
        """Says that this rank's stacks are written, and waits for the others; which line each is at that said so."""
        if self.store is None:
            return None
        keys = [f"hang/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + GATHER_SECONDS
        try:
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            self.store.set(keys[self.rank], "" if frame is None else line_running_in(frame))
            while not self.store.check(keys) and time.monotonic() < deadline:
                time.sleep(0.2)
            said = {rank: key for rank, key in enumerate(keys) if self.store.check([key])}
            return {rank: self.store.get(key).decode() for rank, key in said.items()}
        except RuntimeError:  # the rank that hosts the store has left
            return None

    def _leave(self, first: int) -> NoReturn:
        """Ends the process once the first to fail has spoken, since torchrun ends all when one has ended."""
        if self.store is not None:
            with suppress(RuntimeError):
                if first == self.rank:
                    self.store.set("hang/told", "")
                else:
                    self.store.wait(["hang/told"], timedelta(seconds=GATHER_SECONDS / 2))
                if self.rank == 0:
                    time.sleep(1.0)  # it may host the store, which the others are reading
        os._exit(1)

    def _what_was_written(self, lines: Mapping[int, str] | None) -> str:
        written = f"The stacks of all threads are in {self._path.parent}, a file for each rank."
        if lines is None:
            return written
        missing = [str(rank) for rank in range(self.world_size) if rank not in lines]
        if missing:
            written += (
                f" {len(missing)} of {self.world_size} ranks wrote none ({listed(missing, 16)}): they are gone, or in "
                f"native code that holds Python's lock, whose stacks follow within {GRACE_SECONDS:.0f} s."
            )
        ranks: dict[str, list[str]] = {}
        for rank, line in lines.items():
            ranks.setdefault(line, []).append(str(rank))
        said = [f"\nrank {listed(of_line, 16)} at {line}" for line, of_line in ranks.items() if line]
        return written + "".join(said[:_LINES])


def stacks() -> str:
    """The Python stacks of this process's other threads as text, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    main = threading.main_thread().ident
    texts = []
    for ident, frame in sorted(frames.items(), key=lambda item: item[0] != main):
        name = names.get(ident, "not started by Python")
        texts.append(f"---- thread {name}, most recent call last\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(texts)
