"""Signals in a wait for data: what ends it, and what is left alone."""

import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.api import Requests, Signals, relayed
from tests.worlds import run_world


@pytest.fixture
def signals() -> Iterator[Signals]:
    signals = Signals(Requests())
    with signals.handled():
        yield signals


def send_in(seconds: float, *numbers: int) -> threading.Thread:
    """Sends this process signals, one after the other, from a thread."""

    def send() -> None:
        for number in numbers:
            time.sleep(seconds)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def long_wait() -> str:
    """A data set that catches what it can, as some do."""
    try:
        time.sleep(30)
    except Exception:
        return "swallowed"
    return "data"


@pytest.mark.pitfall(42)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_stops_ends_a_wait_for_data_at_once(signals: Signals, number: int) -> None:
    sender = send_in(0.1, number)
    assert signals.wait_for_data(long_wait) is None
    sender.join()
    assert signals.requests.ends_by_signal
    assert signals.wait_for_data(lambda: "more") is None  # nothing is fetched any more


def test_outside_a_wait_signals_only_set_flags(signals: Signals) -> None:
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
        time.sleep(0.05)
    assert (signals.requests.terminated, signals.requests.interrupted, signals.requests.save_signalled) == (
        True,
        True,
        True,
    )
    sender = send_in(0.1, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        time.sleep(5)
    sender.join()


def forget_and_sleep() -> None:
    time.sleep(60)


def test_a_forked_child_is_ended_by_its_parent_as_ever(signals: Signals) -> None:
    """`Process.terminate` and `Pool.terminate` send SIGTERM; a child that kept the handler would outlive it."""
    child = multiprocessing.get_context("fork").Process(target=forget_and_sleep)
    child.start()
    time.sleep(0.2)
    child.terminate()
    child.join(10)
    assert child.exitcode == -signal.SIGTERM
    assert not signals.requests.ends_by_signal


def relays_beside_many_files(count: int) -> int:
    """How often the store hears of one SIGUSR1, with `count` files open before the relay's own."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
    signals, store = Signals(Requests()), dist.HashStore()
    with signals.handled(), relayed(signals, store):
        os.kill(os.getpid(), signal.SIGUSR1)
        deadline = time.monotonic() + 10
        while store.add("signal/10", 0) == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
    for file in files:
        os.close(file)
    return store.add("signal/10", 0)


@pytest.mark.skipif(signal.SIGUSR1 != 10, reason="names the signal by Linux's number")
def test_signals_are_relayed_in_a_process_with_thousands_of_open_files() -> None:
    """A rank of a large world has as many connections, and `select.select` takes no number beyond 1023."""
    assert run_world(relays_beside_many_files, 1, 1500, fresh=True) == [1]
