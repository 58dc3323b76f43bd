"""The heartbeat where a process itself does not run for a while. What befalls hosts: tests/faults/test_hosts.py."""

import ctypes
import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from tests.api import Heartbeat, HostPlace, TCPStore
from tests.worlds import SERVER, free_port

LIMIT = 1.0


class FarStore(TCPStore):
    """Takes a while to answer."""

    def add(self, key: str, amount: int) -> int:
        time.sleep(LIMIT / 4)
        return super().add(key, amount)


def connections(port: int, kind: type[TCPStore]) -> list[TCPStore]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [kind("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20)) for _ in range(2)]


def hold_the_lock(port: int) -> None:
    """A rank whose main thread runs native code that keeps Python's lock, for much longer than the limit."""
    stores = connections(port, FarStore)
    heartbeat = Heartbeat(stores[0], stores[1], HostPlace(0, 2, 0, range(1), 1), limit_seconds=LIMIT).start()
    time.sleep(LIMIT / 2)
    ctypes.PyDLL(None).sleep(3)
    time.sleep(LIMIT)
    heartbeat.close()


def bear_silence(port: int) -> None:
    """A rank that hears nothing of the other host, in its setup and then in training."""
    stores = connections(port, TCPStore)
    heartbeat = Heartbeat(stores[0], stores[1], HostPlace(0, 2, 0, range(1), 1), limit_seconds=LIMIT).start()
    time.sleep(2.5 * LIMIT)
    stores[1].set("is set up", "")
    heartbeat.is_training = True
    time.sleep(60)


def test_a_rank_that_held_the_lock_for_long_does_not_take_the_store_for_lost() -> None:
    store = store_of_the_job()
    ended = threading.Event()

    def other_host() -> None:
        while not ended.wait(0.1):
            store.add("1/heart/1", 1)

    thread = threading.Thread(target=other_host)
    thread.start()
    try:
        assert exit_code(hold_the_lock, store) == 0
    finally:
        ended.set()
        thread.join()


def test_a_host_may_be_silent_for_longer_until_the_first_step_is_done() -> None:
    """All of its ranks may read a large file by native code at once, which keeps Python's lock."""
    store = store_of_the_job()
    store.set("1/hosts/1", json.dumps({"name": "b"}))
    assert exit_code(bear_silence, store) == 1
    assert store.check(["is set up"])
    assert "host 1 (b) has not been heard of for" in store.get("1/lost").decode()


def store_of_the_job() -> TCPStore:
    return TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def exit_code(target: Callable[[int], None], store: TCPStore) -> int | None:
    rank = SERVER.Process(target=target, args=(store.port,))
    rank.start()
    rank.join(50)
    rank.kill()
    return rank.exitcode
