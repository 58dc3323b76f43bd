"""The heartbeat of a job's hosts, since a host that is down, frozen or cut off closes no connections."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, Self

from dream_trainer.compat.pytorch import Store
from dream_trainer.distributed.hosts import HostPlace, host_name
from dream_trainer.distributed.job import (
    LATER_SECONDS,
    LostHostError,
    announced_processes,
    first_to_fail,
    is_stopped,
    tell_failure,
)

BEATS = 5  # beats within the limit
LONGEST_BEAT_SECONDS = 2.0
LIMITS_OF_A_SETUP = 6.0  # how many times the limit a host may be silent until the first step is done
JOIN_SECONDS = 3.0


@dataclass(eq=False)
class Heartbeat:
    """One rank's side of the heartbeat, from launch until the world is closed."""

    store: Store
    store_of_main: Store
    place: HostPlace
    limit_seconds: float
    where: Callable[[], str] = lambda: "launch"  # training's position; called from a thread
    is_training: bool = False  # whether the first step is done: a host is late sooner then

    def __post_init__(self) -> None:
        self._period = min(LONGEST_BEAT_SECONDS, self.limit_seconds / BEATS)
        self._answered = time.monotonic()
        self._processes: dict[int, int] = {}
        self._closing = threading.Event()
        work = {"heartbeat": self._beat, "heartbeat judge": self._judge}
        self._threads = [threading.Thread(target=act, name=name, daemon=True) for name, act in work.items()]

    def start(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        """Ends it, and tells the others to ignore this host's silence from now on. Safe to call twice."""
        if self._closing.is_set():
            return
        with suppress(RuntimeError):  # the store has left with its rank
            self.store_of_main.set(self.place.key(f"left/{self.place.number}"), "")
        self._closing.set()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)

    # -- the thread that uses the store

    def _beat(self) -> None:
        next_host = (self.place.number + 1) % self.place.n_hosts
        seen, since = -1, time.monotonic()
        stopped: dict[int, float] = {}
        while not self._closing.wait(self._period):
            try:
                self.store.add(self.place.key(f"heart/{self.place.number}"), 1)
                beats = self.store.add(self.place.key(f"heart/{next_host}"), 0)
                if self.store.check([self.place.key("lost")]):
                    self._end(self.store.get(self.place.key("lost")).decode(), first=int(self.store.get("failed")))
                has_left = beats == seen and self.store.check([self.place.key(f"left/{next_host}")])
                self._answered = now = time.monotonic()
                if beats != seen or has_left:
                    seen, since = beats, now
                elif now - since > self.limit_seconds * (1.0 if self.is_training else LIMITS_OF_A_SETUP):
                    met = json.loads(self.store.get(self.place.key(f"hosts/{next_host}")))
                    self._end_all(
                        f"{host_name(next_host, met['name'])} has not been heard of for {now - since:.0f} s, at "
                        f"{self.where()}: it is down, frozen, or cut off from the network"
                    )
                stopped = self._look_at_neighbours(stopped, now)
            except RuntimeError:  # the store is gone with its rank; ranks that talk to it fail by themselves
                continue

    def _look_at_neighbours(self, known: dict[int, float], now: float) -> dict[int, float]:
        """Ranks of this host whose processes are stopped, each with the time since; too long ends the job."""
        self._processes = self._processes or announced_processes(self.store, self.place.ranks)
        stopped = {rank: known.get(rank, now) for rank, number in self._processes.items() if is_stopped(number)}
        for rank, since in stopped.items():
            if now - since > self.limit_seconds:
                self._end_all(
                    f"the process of rank {rank} on {self.place.name} has been stopped for {now - since:.0f} s "
                    f"(SIGSTOP), at {self.where()}"
                )
        return stopped

    def _end_all(self, reason: str) -> NoReturn:
        """Ends the job for what this rank has found; the first to find anything tells the others."""
        first = first_to_fail(self.store, self.place.rank)
        if first == self.place.rank:
            self.store.set(self.place.key("lost"), reason)
        self._end(reason, first=first)

    # -- the thread that needs no answer

    def _judge(self) -> None:
        pause = min(0.5, self._period)
        answered, woke, silent = self._answered, time.monotonic(), 0.0
        while not self._closing.wait(pause):
            # In a long time between two looks this process did not run, so it could not receive an answer.
            slept, woke = time.monotonic() - woke, time.monotonic()
            silent = silent + min(slept, 2 * pause) if self._answered == answered else 0.0
            answered = self._answered
            if silent > self.limit_seconds + self._period:
                address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
                self._end(
                    f"the job's store at {address} has not answered {self.place.name} for {silent:.0f} s, at "
                    f"{self.where()}: the host that keeps it is down or frozen, or this one is cut off",
                    first=self.place.ranks.start,
                )

    def _end(self, reason: str, *, first: int) -> NoReturn:
        report = (
            f"{reason}.\nStart the job again when the host is back, or without it; it resumes from its newest "
            "checkpoint. host_timeout_seconds in DeviceParameters sets the tolerated silence."
        )
        tell_failure(LostHostError(reason), report, rank=self.place.rank, first=first)
        if first != self.place.rank:
            time.sleep(LATER_SECONDS)
        os._exit(1)
