"""Where each loader of a group is, and how errors name it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

from dream_trainer.data.window import DataPosition, TrainStream, Window
from dream_trainer.errors import DataError

T = TypeVar("T")


class Place(NamedTuple):
    """Where one loader is.

    Attributes:
        position: The end of the window that was read last.
        rank_state: What that window's loader needs besides, on this rank.
        at_end: Whether it has no further window in its pass; None where only looking for it would tell.
        is_counted: Whether the end of its pass, where it is, was counted already.
        has_ended: Whether it came to such an end in this pass of the group.
    """

    position: DataPosition
    rank_state: dict[str, Any] | None = None
    at_end: bool | None = False
    is_counted: bool = False
    has_ended: bool = False

    def as_dict(self) -> dict[str, Any]:
        """As plain data; without what is of this rank alone."""
        return self._replace(rank_state=None)._asdict() | {"position": asdict(self.position)}


@dataclass(slots=True, eq=False)
class Member:
    """One loader of the group.

    Attributes:
        name: Its name.
        stream: Its data.
        place: Where it is.
        window: Its next window, where it was looked for already.
        seconds: How long this process has waited for its batches.
    """

    name: str
    stream: TrainStream
    place: Place
    window: Window | None = None
    seconds: float = 0.0


def refuse_state_of_group(state: dict[str, Any] | None) -> None:
    """Raises DataError where one loader would go on with the state of several."""
    if state is not None and "loaders" in state:
        raise DataError(
            f"the checkpoint is of a run over the training loaders {list(state['loaders'])}, and this one has one "
            "loader. Give it what it had, or start a run of its own from the checkpoint's weights."
        )


def naming_loader(name: str, call: Callable[[], T]) -> T:
    """`call()`; its errors name the loader."""
    try:
        return call()
    except DataError as error:
        raise DataError(f"the training loader {name!r}: {error}") from error
    except Exception as error:
        error.add_note(f"in the training loader {name!r}")
        raise
