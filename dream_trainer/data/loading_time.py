"""How long each source of a dataset takes to load: measured where it is loaded, and added up over workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch.utils.data import get_worker_info

IN_THIS_PROCESS = -1  # the number of a worker where there are none


class LoadingTime(NamedTuple):
    """Seconds that one process has loaded each source since its pass began."""

    worker: int  # number of the worker; IN_THIS_PROCESS without workers
    seconds: tuple[float, ...]  # of each source, in their order


class SourceClock:
    """Adds up, in the process that loads, how long each source takes."""

    __slots__ = ("_seconds",)

    def __init__(self, num_sources: int) -> None:
        self._seconds = [0.0] * num_sources

    def add(self, source: int, seconds: float) -> None:
        self._seconds[source] += seconds

    def told(self) -> LoadingTime:
        info = get_worker_info()
        return LoadingTime(IN_THIS_PROCESS if info is None else info.id, tuple(self._seconds))


class LoadingTimes:
    """Adds up what the workers of one pass after another tell."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._before: dict[tuple[int, str], float] = {}
        self._newest: dict[int, LoadingTime] = {}

    def hear(self, told: LoadingTime) -> None:
        self._newest[told.worker] = told

    def begin_pass(self) -> None:
        self._before = dict(self.seconds)
        self._newest.clear()

    @property
    def seconds(self) -> Mapping[tuple[int, str], float]:
        found = dict(self._before)
        for told in self._newest.values():
            for name, seconds in zip(self._names, told.seconds, strict=True):
                found[told.worker, name] = found.get((told.worker, name), 0.0) + seconds
        return found
