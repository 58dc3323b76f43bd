"""Signals ask; they do not act. A handler sets a flag that all ranks learn of before their next window, and stop there.

Only a wait in the data loader is ended at once, or answered from within."""

from __future__ import annotations

import builtins
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from dream_trainer.compat.pytorch import Store
from dream_trainer.distributed.job import leave_lost_job
from dream_trainer.distributed.pulse import Requests
from dream_trainer.screen import show

T = TypeVar("T")

TERMINATING = (signal.SIGTERM, signal.SIGHUP)  # save and end the run; a closed terminal or ssh session sends the second

_HANDLED = (*TERMINATING, signal.SIGINT, signal.SIGUSR1)  # those, Ctrl-C, and a request to save and continue
_CLOSE = 0  # no signal has this number

LOOK_SECONDS = 0.5  # a wait for data that is longer looks into the store, each time this long has passed
JOIN_SECONDS = 5.0
# Longer than a job takes to save after a signal, shorter than torchrun waits for it to end.
_WORKER_OUTLIVES_SECONDS = 25


class _Forked:
    """What a process is to know that is forked now."""

    is_worker = False  # of a loader, with this process's handler until it sets its own
    is_relaying = False  # and would write the signals that it gets into this process's pipe


_forked = _Forked()
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1) if _forked.is_relaying else None)


@contextmanager
def starting_workers() -> Iterator[None]:
    _forked.is_worker = True
    try:
        yield
    finally:
        _forked.is_worker = False


def outlive_job(*_: object) -> None:
    """A worker's handler of signals that end the job: it ends when the job has had time to save."""
    signal.alarm(_WORKER_OUTLIVES_SECONDS)


class _Exits:
    """The handler that an ended run leaves behind: the process exits at once, as the run has."""

    def __init__(self, code: int) -> None:
        self._code = code

    def __call__(self, *_: object) -> None:
        os._exit(self._code)


class Interrupted(BaseException):
    """A signal came while this rank waited for data. No Exception: a data set that catches those must not keep it."""


class Signals:
    """SIGTERM, SIGHUP, SIGINT and SIGUSR1 received by this process. The pulse tells the other ranks."""

    def __init__(self, requests: Requests) -> None:
        self.requests = requests
        self._pid = os.getpid()
        self._answer: Callable[[], bool] | None = None
        self._waits_since: float | None = None
        self._ends = False
        self._before: dict[int, Any] = {}
        self._error: Exception | None = None
        self.broke_a_wait = False  # the data being loaded is lost
        self.relayed: set[int] = set()  # sent by this process to itself, since another rank had got them

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handles the signals inside. Outside the main thread Python allows no handlers, and there are none."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._pid = os.getpid()
        numbers = [*_HANDLED]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup: the run outlives its terminal
            numbers.remove(signal.SIGHUP)
        before = self._before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                if handler is not None and not (self._ends and number in TERMINATING):
                    signal.signal(number, handler)

    @contextmanager
    def ending(self, code: int) -> Iterator[None]:
        """The run ends for a signal: inside, a second one does nothing; afterwards it exits with `code` at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._ends = True
        handled = [number for number in TERMINATING if number in self._before]
        for number in handled:
            signal.signal(number, signal.SIG_IGN)
        yield
        for number in handled:
            signal.signal(number, _Exits(code))

    def wait_for_data(self, fetch: Callable[[], T], answer: Callable[[], bool] | None = None) -> T | None:
        """Returns `fetch()`, or None if a signal ended the wait; `answer` tells whether a save signal does."""
        self._answer, self._error = answer, None
        self._waits_since = time.monotonic()
        try:
            if self.requests.ends_by_signal or self.requests.save_signalled:  # it came before the wait
                self._leave_the_wait()
            return fetch()
        except Interrupted:
            self.broke_a_wait = True
            if self._error is not None:
                raise self._error from None
            return None
        finally:
            self._waits_since = None

    def waits_for(self) -> float:
        """Seconds that this rank has been waiting for data; 0 where it does not."""
        since = self._waits_since
        return 0.0 if since is None else time.monotonic() - since

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked child that kept the handler. SIGTERM is how its parent ends it (`Process.terminate`, `Pool`);
            # the others come to the whole process group, and a loader's worker outlives them.
            if number in TERMINATING and _forked.is_worker:
                outlive_job()
            elif number in TERMINATING:
                signal.signal(number, self._before[number] or signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if number in TERMINATING:
            leave_lost_job()
            self.requests.terminated = True
            self.requests.hung_up = number == signal.SIGHUP
        elif number == signal.SIGINT:
            if self.requests.interrupted:
                raise KeyboardInterrupt
            self.requests.interrupted = True
            show("\nstopping after this step; press Ctrl-C again to stop at once", sys.stderr)
        else:
            self.requests.save_signalled = True
        before = self._before[number]
        # The user's own; Python's for Ctrl-C would raise.
        if number != signal.SIGINT and callable(before) and not isinstance(before, _Exits):
            before(number, frame)
        if self._waits_since is not None:
            self._leave_the_wait()

    def _leave_the_wait(self) -> None:
        since, self._waits_since = self._waits_since, None  # a second signal finds nothing to leave
        asked, answer = self.requests, self._answer
        try:
            stays = not asked.ends_by_signal and answer is not None and answer() and not asked.ends_by_signal
        except Exception as error:  # kept for `wait_for_data`: here a dataset would catch it
            self._error, stays = error, False
        if not stays:
            raise Interrupted
        self._waits_since = since


def is_interactive() -> bool:
    """Whether this is a prompt or a notebook, which continues after an interruption."""
    return "ps1" in vars(sys) or bool(sys.flags.interactive) or "__IPYTHON__" in vars(builtins)


def exit_code(number: signal.Signals, *, restart: bool = False) -> int:
    """128 + the signal's number; 0 under torchrun, which sets its own code, unless it is to `restart`."""
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ and not restart else 128 + number


def may_be_restarted() -> bool:
    count, most = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return int(count) < int(most)


@contextmanager
def relayed(signals: Signals, store: Store | None) -> Iterator[None]:
    """Inside, signals of one rank reach all."""
    if store is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before, _forked.is_relaying = signal.set_wakeup_fd(writer, warn_on_full_buffer=False), True
    thread = threading.Thread(target=_relay, args=(signals, store, reader), name="signal relay", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        _forked.is_relaying = False
        os.write(writer, bytes([_CLOSE]))
        thread.join(JOIN_SECONDS)  # it may be held by a store whose host is gone
        os.close(reader)
        os.close(writer)


def _relay(signals: Signals, store: Store, reader: int) -> None:
    counts: dict[int, int] = {}
    sent_by_us: set[int] = set()
    pipe = select.poll()  # select.select takes no file number beyond 1023, and large worlds have many connections
    pipe.register(reader, select.POLLIN)
    while True:
        ready = pipe.poll(LOOK_SECONDS * 1000)
        try:
            if ready:
                numbers = set(os.read(reader, 64))
                if _CLOSE in numbers:
                    return
                for number in numbers & {*_HANDLED} - sent_by_us:
                    counts[number] = store.add(f"signal/{number}", 1)
                sent_by_us -= numbers
            elif signals.waits_for() > LOOK_SECONDS:
                for number in () if signals.requests.ends_by_signal else _HANDLED:
                    before, counts[number] = counts.get(number, 0), store.add(f"signal/{number}", 0)
                    if counts[number] == before:
                        continue
                    if number == signal.SIGHUP:  # here it may be ignored, as nohup has it
                        number = signal.SIGTERM
                    signals.relayed.add(number)
                    sent_by_us.add(number)  # it comes back through the pipe, and must not be relayed again
                    os.kill(os.getpid(), number)
            elif signals.requests.save_is_known:
                signals.requests.save_is_known = False
                counts[signal.SIGUSR1] = store.add(f"signal/{signal.SIGUSR1}", 0)  # the other signals are still new
        except RuntimeError:  # the store is gone, and with it the job
            return
