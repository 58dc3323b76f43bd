"""Relay: a signal that one rank got reaches a rank that waits for data.

A thread of each rank sees a signal at once (`signal.set_wakeup_fd`) and writes it into the store. A rank that has been
waiting for a while looks there, and sends itself the signals that it finds."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dream_trainer.compat.pytorch import Store
from dream_trainer.distributed.signals import STOPPING, Signals

LOOK_SECONDS = 0.5  # a wait for data that is longer looks into the store, each time this long has passed

JOIN_SECONDS = 5.0
_RELAYED = (*STOPPING, signal.SIGUSR1)
_CLOSE = 0  # no signal has this number

# A forked child would write the signals that it gets into this process's pipe.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1) if _is_relaying else None)
_is_relaying = False


@contextmanager
def relayed(signals: Signals, store: Store | None) -> Iterator[None]:
    if store is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    global _is_relaying
    before, _is_relaying = signal.set_wakeup_fd(writer, warn_on_full_buffer=False), True
    thread = threading.Thread(target=_relay, args=(signals, store, reader), name="signal relay", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        _is_relaying = False
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
                for number in numbers & {*_RELAYED} - sent_by_us:
                    counts[number] = store.add(_key(number), 1)
                sent_by_us -= numbers
            elif signals.waits_for() > LOOK_SECONDS:
                for number in () if signals.requests.ends_by_signal else _new(store, counts):
                    if number == signal.SIGHUP:  # here it may be ignored, as nohup has it
                        number = signal.SIGTERM
                    signals.relayed.add(number)
                    sent_by_us.add(number)  # it comes back through the pipe, and must not be relayed again
                    os.kill(os.getpid(), number)
            elif signals.requests.save_is_known:
                signals.requests.save_is_known = False
                counts[signal.SIGUSR1] = store.add(_key(signal.SIGUSR1), 0)  # the other signals are still new
        except RuntimeError:  # the store is gone, and with it the job
            return


def _new(store: Store, counts: dict[int, int]) -> list[signal.Signals]:
    new_signals = []
    for number in _RELAYED:
        count = store.add(_key(number), 0)
        if count > counts.get(number, 0):
            counts[number] = count
            new_signals.append(number)
    return new_signals


def _key(number: int) -> str:
    return f"signal/{number}"
