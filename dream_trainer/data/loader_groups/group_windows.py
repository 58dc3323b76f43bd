"""How the windows of several loaders are put together: a batch of each, or one loader's turn after another's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dream_trainer.data.loader_groups.group_place import Member, naming_loader
from dream_trainer.data.loader_groups.group_stream import GroupStream
from dream_trainer.data.loader_groups.loader_group import AlternatingLoaders, LoaderGroup, refuse_shared
from dream_trainer.data.ordered import innermost
from dream_trainer.data.sample_count import SampleCount
from dream_trainer.data.window import TrainStream, Window
from dream_trainer.distributed.seeds import hash_seed


class TogetherStream(GroupStream):
    """A batch of each loader in every micro-batch."""

    def next_window(self) -> Window | None:
        has_window = [self._look(part) for part in self._parts]
        if not all(has_window) and self._is_over():
            self.end_pass()
            return None
        windows = [self._take(part) for part in self._parts]
        names = [part.name for part in self._parts]
        each = [self._timed(part, window.batches) for part, window in zip(self._parts, windows, strict=True)]
        batches = (dict(zip(names, batch, strict=True)) for batch in zip(*each, strict=False))
        return self._window(batches, windows)

    def _is_over(self) -> bool:
        """Whether the pass is over, now that a loader has no window."""
        if self._end == "shortest":
            return self._leader is not None and self._leader.place.has_ended
        return self._end == "longest" and all(part.place.has_ended for part in self._parts)

    def _is_last(self) -> bool | None:
        if self._end == "cycle":
            return False
        if self._end == "longest":
            ends = [part.place.has_ended or part.place.at_end for part in self._parts]
            return False if False in ends else None if None in ends else True
        ends = [part.place.at_end for part in self._parts] if self._leader is None else [self._leader.place.at_end]
        return True if True in ends else None if None in ends else False

    def _count_windows(self, windows: Sequence[float]) -> float:
        return min(windows) if self._end == "shortest" else max(windows)


class TurnsStream(GroupStream):
    """One loader after the other, each for a whole window.

    Args:
        streams: As of GroupStream.
        turns: One round of names.
        **options: The others of GroupStream.
    """

    def __init__(self, streams: Mapping[str, TrainStream], turns: Sequence[str], **options: Any) -> None:
        numbers = {name: number for number, name in enumerate(streams)}
        self._turns = [numbers[name] for name in turns]
        super().__init__(streams, **options)

    def next_window(self) -> Window | None:
        part = self._part_in_turn()
        if not self._look(part) and self._ends_with(part):
            self.end_pass()
            return None
        window = self._take(part)
        return self._window(((part.name, batch) for batch in self._timed(part, window.batches)), [window])

    def _part_in_turn(self) -> Member:
        return self._parts[self._turns[self._windows % len(self._turns)]]

    def _ends_with(self, part: Member) -> bool:
        """Whether the pass is over once this loader, whose turn it is, has no window."""
        if self._end == "longest":
            return all(other is part or other.place.has_ended for other in self._parts)
        return self._end == "shortest" and self._leader in (None, part)

    def _is_last(self) -> bool | None:
        part = self._part_in_turn()
        return part.place.at_end if self._ends_with(part) and not part.place.is_counted else False

    def _count_windows(self, windows: Sequence[float]) -> float:
        ends = [self._turn_without_window(number, count) for number, count in enumerate(windows)]
        return min(ends) if self._end == "shortest" else max(ends)

    def _turn_without_window(self, number: int, count: float) -> float:
        """Number of the turn at which the loader has used up its `count` windows."""
        if count == math.inf:
            return count
        places = [place for place, turn in enumerate(self._turns) if turn == number]
        rounds, rest = divmod(int(count), len(places))
        return rounds * len(self._turns) + places[rest]


def group_stream(
    loader: LoaderGroup | AlternatingLoaders,
    open_one: Callable[[object, int, SampleCount | None, str], TrainStream],
    *,
    seed: int,
    count: SampleCount | None,
    accumulation: int,
    dp_size: int,
) -> GroupStream:
    """The stream over several loaders.

    Args:
        loader: The group.
        open_one: Opens the stream over one loader, from its seed, what counts its batches' samples, and its name.
        seed: The run's seed.
        count: Counts the samples of a batch, as `training_step` gets it; None does not count them.
        accumulation: Micro-batches in a window.
        dp_size: Number of data-parallel ranks.

    Raises:
        DataError: One of them cannot be read, which it names; or two read the same dataset.
    """
    streams = {}
    for name, one in loader.loaders.items():
        # Else loaders of one length would have one order.
        own_seed = hash_seed(b"loader" + name.encode(), seed)
        open_it = partial(open_one, one, own_seed, _count_of_one(loader, name, count), name)
        streams[name] = naming_loader(name, open_it)
    readers = {name: stream.reader for name, stream in streams.items() if stream.reader is not None}
    refuse_shared({name: innermost(reader.ordered) for name, reader in readers.items() if reader.ordered is not None})
    order: dict[str, Any] = {"kind": type(loader).__name__, "end": loader.end}
    options: dict[str, Any] = {"end": loader.end, "accumulation": accumulation, "dp_size": dp_size}
    if isinstance(loader, LoaderGroup):
        return TogetherStream(streams, order=order, **options)
    return TurnsStream(streams, loader.turns, order=order | {"ratio": loader.ratio}, **options)


def _count_of_one(loader: LoaderGroup | AlternatingLoaders, name: str, count: SampleCount | None) -> SampleCount | None:
    """What counts the samples of one loader's batch: a function of the user's takes what `training_step` gets."""
    if count is None or count.own is None:
        return count
    own = count.own
    return SampleCount() if isinstance(loader, LoaderGroup) else SampleCount(lambda batch: own((name, batch)))
