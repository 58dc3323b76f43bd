"""Records: the lines in the making, of training, of each validation loader and of listeners, and which of them `log`
adds to now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor
from typing_extensions import override

from dream_trainer.errors import HookError
from dream_trainer.loggers.buffer import MetricBuffer, Scalar, check_reduction, keep
from dream_trainer.loggers.interface import Stamp

if TYPE_CHECKING:
    from dream_trainer.loggers.media import Media, MediaLog

# A name, the value logged under it, and its stamp if that is known already
Logged = tuple[str, "Media", Stamp | None]


@dataclass(kw_only=True, eq=False, repr=False)
class Record:
    """A line in the making."""

    prefix: str = ""
    media: list[Logged] | None = None
    media_stamp: Callable[[], Stamp | None] = lambda: None
    needs_weight: str = ""
    is_own_line: bool = False
    metrics: MetricBuffer = field(default_factory=MetricBuffer)
    weight: Scalar = 1.0

    def add(self, name: str, value: Scalar, weight: Scalar | None, reduce: str) -> None:
        if weight is None and self.needs_weight and reduce == "mean":
            raise HookError(
                f"log({name!r}) without weight= in a validation under {self.needs_weight}, and ranks have different "
                "numbers of labels in their parts of a sequence. Pass weight=the number of labels."
            )
        self.metrics.add(self._own_name(name), value, self.weight if weight is None else weight, reduce)

    def add_media(self, name: str, item: Media) -> None:
        if self.media is not None:
            name = self.prefix + name.removeprefix("val/") if self.prefix else name
            self.media.append((name, item, self.media_stamp()))

    def _own_name(self, name: str) -> str:
        if self.prefix:
            return name.removeprefix("val/")
        if name in Stamp._fields:
            raise ValueError(
                f"metric {name!r} would hide the {name} that each line has. Use another name, such as 'my/{name}'."
            )
        return name


class TrainingRecord(Record):
    def __init__(
        self, of_batch: Callable[[], tuple[Scalar | None, int]], media_stamp: Callable[[], Stamp | None]
    ) -> None:
        self.waiting: list[Logged] = []
        super().__init__(media=self.waiting, media_stamp=media_stamp)
        self._of_batch = of_batch
        self.undecided: list[tuple[str, Scalar, str, int]] = []
        self._n_media = 0  # of before the running window

    @override
    def add(self, name: str, value: Scalar, weight: Scalar | None, reduce: str) -> None:
        size = 0
        if weight is None:
            weight, size = self._of_batch()
        if weight is not None:
            self.metrics.add(self._own_name(name), value, weight, reduce)
            return
        check_reduction(name, reduce)
        self.undecided.append((self._own_name(name), keep(name, value), reduce, size))

    def decide(self, weight: Scalar | None = None) -> None:
        """Gives the values that wait for it the backward weight, or their batch's samples if there is none."""
        undecided, self.undecided = self.undecided, []  # one that is refused is refused once
        for name, value, reduce, size in undecided:
            self.metrics.add(name, value, size if weight is None else weight, reduce)

    def window_started(self) -> None:
        if self.undecided:
            self.decide()
        self.metrics.mark()
        self._n_media = len(self.waiting)

    def window_dropped(self) -> None:
        self.undecided.clear()
        self.metrics.rewind()
        del self.waiting[self._n_media :]

    def clear(self) -> None:
        self.undecided.clear()
        self.waiting.clear()
        self.metrics = MetricBuffer()


class NoRecord(Record):
    """A record that logs nothing: numbers are ignored, with a warning."""

    def __init__(self, where: str, warn_once: Callable[[str, str], None], media: list[Logged] | None) -> None:
        super().__init__(prefix="val/", media=media)
        self._where, self._warn_once = where, warn_once

    @override
    def add(self, name: str, value: Tensor | float, weight: Scalar | None, reduce: str) -> None:
        message = f"log({name!r}) was called in {self._where}, which logs nothing: ignored."
        self._warn_once("log outside", message)


class Records:
    def __init__(self) -> None:
        self.current = Record()
        self.validation_media: list[Logged] = []
        self.media: MediaLog | None = None

    @contextmanager
    def inside(self, record: Record) -> Iterator[None]:
        before, self.current = self.current, record
        try:
            yield
        finally:
            self.current = before
