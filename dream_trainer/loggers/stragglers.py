"""Stragglers: the slow ranks, and the cause. Ranks wait for one another in collectives. Therefore each line of the log
compares their time without collectives and their wait for data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median_low

from dream_trainer.checks import listed
from dream_trainer.config.logger_parameters import LoggerParameters

_WORK, _DATA = "seconds of work", "seconds of data"
# how much longer than the median a step of a slow rank takes at least: less is noise, or does no harm
LEAST_SECONDS = 0.02
_NAMED = 8


class Stragglers:
    """One rank's and all ranks' measurements; `spent` gives its windows and seconds of work and waiting."""

    def __init__(
        self,
        parameters: LoggerParameters,
        hosts: Callable[[], Sequence[str]],
        spent: Callable[[], tuple[int, float, float]],
        warn_once: Callable[[str, str], None],
    ) -> None:
        self._hosts, self._spent, self._warn_once = hosts, spent, warn_once
        self._factor, self._lines = parameters.straggler_factor, parameters.straggler_lines
        self._before = (0, 0.0, 0.0)
        self._slow_for: dict[int, int] = {}  # lines in a row, by rank
        self._named: set[int] = set()

    def measured(self, world_size: int) -> dict[str, float]:
        """Seconds of a step, on average since the last call: of this rank's own work, and of waiting for its data."""
        if self._factor is None or world_size == 1:
            return {}
        now = self._spent()
        windows, work, data = (new - old for new, old in zip(now, self._before, strict=True))
        self._before = now
        return {_WORK: work / windows, _DATA: data / windows} if windows else {_WORK: 0.0, _DATA: 0.0}

    def hear(self, ranks: Mapping[str, Sequence[float]]) -> None:
        """Takes what all ranks measured, equal on all; a collective where one is to be named."""
        work, data = ranks[_WORK], ranks[_DATA]
        own = [sum(parts) for parts in zip(work, data, strict=True)]
        if not any(own):  # a save has flushed the log, and there was no window since
            return
        usual = median_low(own)
        assert self._factor is not None  # else nothing was measured
        limit = max(self._factor * usual, usual + LEAST_SECONDS)
        slow = [rank for rank, seconds in enumerate(own) if seconds > limit]
        self._slow_for = {rank: self._slow_for.get(rank, 0) + 1 for rank in slow}
        found = [rank for rank in slow if self._slow_for[rank] >= self._lines and rank not in self._named]
        if found:
            self._named.update(found)
            self._tell(found, work, data)

    def _tell(self, slow: list[int], work: Sequence[float], data: Sequence[float]) -> None:
        hosts = self._hosts()
        worst = max(slow, key=lambda rank: work[rank] + data[rank])
        waits_for_data = data[worst] - median_low(data) > work[worst] - median_low(work)
        names = listed([f"rank {rank} on {hosts[rank]}" for rank in slow], _NAMED)
        advice = (
            "Look at its storage, and at num_workers of its loader."
            if waits_for_data
            else "Look at what else runs on that host, at its clocks, and at work that only this rank does in a step."
        )
        self._warn_once(
            f"slow {slow}",
            f"{names} has been slower than the others for {self._lines} lines of the log, and all wait for it in "
            f"each step. Rank {worst} loads data for {_spelled(data[worst])} of a step and works for "
            f"{_spelled(work[worst])}; usual are {_spelled(median_low(data))} and {_spelled(median_low(work))}: it is "
            f"slow in its {'data' if waits_for_data else 'work'}. {advice}",
        )


def _spelled(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
