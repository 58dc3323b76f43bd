"""The heartbeat where a process itself does not run for a while. What befalls hosts: tests/faults/test_hosts.py."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from datetime import timedelta

from dream_trainer.compat.stores import TCPStore
from dream_trainer.distributed.heartbeat import Heartbeat
from dream_trainer.distributed.hosts import HostPlace
from tests.worlds import SERVER, free_port

LIMIT = 1.0


def hold_the_lock(port: int) -> None:
    """A rank whose main thread runs native code that keeps Python's lock, for much longer than the limit."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    stores = [TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20)) for _ in range(2)]
    heartbeat = Heartbeat(stores[0], stores[1], HostPlace(0, 2, 0, range(1), 1), limit_seconds=LIMIT)
    heartbeat.start()
    time.sleep(LIMIT / 2)
    ctypes.PyDLL(None).sleep(3)
    time.sleep(LIMIT)
    heartbeat.close()


def test_a_rank_that_held_the_lock_for_long_does_not_take_the_store_for_lost() -> None:
    port = free_port()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    ended = threading.Event()

    def other_host() -> None:
        while not ended.wait(0.1):
            store.add("1/heart/1", 1)

    thread = threading.Thread(target=other_host)
    thread.start()
    try:
        rank = SERVER.Process(target=hold_the_lock, args=(port,))
        rank.start()
        rank.join(60)
    finally:
        ended.set()
        thread.join()
    assert rank.exitcode == 0
