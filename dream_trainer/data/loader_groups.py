"""Several training loaders as one: a batch of each in every micro-batch, or one loader's turn after another's."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

from dream_trainer.checks import refuse
from dream_trainer.data.sample_count import SampleCount
from dream_trainer.data.sampler import ENDLESS, innermost
from dream_trainer.data.window import DataPosition, SavedState, TrainStream, Window
from dream_trainer.distributed.seeds import preserved_random_state
from dream_trainer.errors import DataError

_ADVICE = "Give it what it had, or start a new run from the checkpoint's weights."
PassEnd = Literal["shortest", "longest", "cycle"]


class LoaderGroup:
    """Named training loaders that are read together: each batch is a dict with one batch of each.

    A plain dict of loaders does the same. Each loader may be of any kind that works in a trainer. It has its own batch
    size, and its own seed from the run's seed and its name. Each loader restarts independently when it ends, so the
    samples of a step only depend on the number of steps. Only whole optimizer steps are read: samples at a loader's end
    that do not fill its part of a step are left out of that pass.

    Args:
        loaders: Maps names to loaders.
        end: The pass over the group, which is an epoch. "longest" and "shortest" are a pass over that loader; the
            others continue in the next pass at their position. "cycle" never ends: limit the run by steps, samples or
            tokens, and use `train_steps_per_epoch` to make epochs.

    Raises:
        DataError: There is no loader, one is in it twice, or `end` is unknown.
    """

    def __init__(self, loaders: Mapping[str, Any], *, end: PassEnd = "longest") -> None:
        kind, ends = type(self).__name__, get_args(PassEnd)
        if not isinstance(loaders, Mapping) or not loaders:
            raise DataError(f'{kind} got {loaders!r}, no loaders. Give a dict, such as {{"text": ..., "images": ...}}.')
        refuse(end not in ends, f"end={end!r} is not one of {', '.join(map(repr, ends))}.", DataError)
        wrong = [name for name in loaders if not isinstance(name, str) or not name]
        refuse(wrong, f"{kind} got loaders named {wrong}. Use strings for their names.", DataError)
        refuse_shared(loaders)
        self.loaders = dict(loaders)
        self.end: PassEnd = end


class AlternatingLoaders(LoaderGroup):
    """Named training loaders that take turns by optimizer steps: each batch is `(name, batch)` of one.

    All micro-batches of a step are from one loader, on all ranks, so a step's data depends neither on accumulation
    nor on the number of ranks. Turns are spread evenly: `{"text": 3, "images": 1}` is text, text, images, text. Each
    pass begins with the first turn. Otherwise the loaders are read as in a LoaderGroup.

    Args:
        loaders: Maps names to loaders.
        ratio: Steps of each loader in a round, whole numbers above 0. None is one for each.
        end: A pass ends at the turn of a loader that has nothing left: when the last loader gets there ("longest"),
            the first ("shortest"), or never ("cycle").

    Raises:
        DataError: As in LoaderGroup, or the ratio has other names, or values that are not whole numbers above 0.
    """

    def __init__(
        self, loaders: Mapping[str, Any], ratio: Mapping[str, int] | None = None, *, end: PassEnd = "longest"
    ) -> None:
        super().__init__(loaders, end=end)
        ratio = dict.fromkeys(self.loaders, 1) if ratio is None else ratio
        is_whole = isinstance(ratio, Mapping) and set(ratio) == set(self.loaders)
        if not is_whole or not all(type(count) is int and count > 0 for count in ratio.values()):
            raise DataError(f"ratio={ratio!r} is not a whole number above 0 for each of the loaders {[*self.loaders]}.")
        self.ratio = {name: ratio[name] for name in self.loaders}
        self.turns = turns(self.ratio)


def turns(ratio: Mapping[str, int]) -> list[str]:
    shares = {name: count // math.gcd(*ratio.values()) for name, count in ratio.items()}
    total = sum(shares.values())
    owed, order = dict.fromkeys(shares, 0), []
    for _ in range(total):
        for name, share in shares.items():
            owed[name] += share
        chosen = max(owed, key=owed.__getitem__)
        owed[chosen] -= total
        order.append(chosen)
    return order


def refuse_shared(parts: Mapping[str, object]) -> None:
    """Raises DataError where one object is there under two names: it has one place, and both would move it."""
    names: dict[int, str] = {}
    for name, part in parts.items():
        first = names.setdefault(id(part), name)
        if first != name:
            raise DataError(f"loaders {first!r} and {name!r} read the same {type(part).__name__}. Make one for each.")


# -- The stream over them: each loader has its own place, and a checkpoint keeps the places of all after a window.


class GroupStream(TrainStream):
    """A window of each loader in every step, or of AlternatingLoaders of one of them."""

    def __init__(self, loader: LoaderGroup, streams: Mapping[str, TrainStream], accumulation: int) -> None:
        ordered = {name: stream.reader and stream.reader.ordered for name, stream in streams.items()}
        refuse_shared({name: innermost(dataset) for name, dataset in ordered.items() if dataset is not None})
        start = Place(DataPosition(0, 0, 0))
        self._parts = {name: Member(name, stream, start) for name, stream in streams.items()}
        self._turns = [[*self._parts.values()]]
        self._order: dict[str, Any] = {"kind": type(loader).__name__, "end": loader.end}
        if isinstance(loader, AlternatingLoaders):
            self._turns = [[self._parts[name]] for name in loader.turns]
            self._order["ratio"] = loader.ratio
        of_parts = {f"{name}: {key}": value for name, one in streams.items() for key, value in one.facts.items()}
        self.facts = {"read by": self._order} | of_parts
        self._end = loader.end
        self._accumulation = accumulation
        uneven = [name for name, stream in streams.items() if not stream.is_even]
        self.is_even = not uneven
        self.resumes_from_all_ranks = any(stream.resumes_from_all_ranks for stream in streams.values())
        if uneven and loader.end != "cycle":
            raise DataError(
                f'ranks may have different numbers of batches of {", ".join(map(repr, uneven))}. Use end="cycle" '
                f"instead of {loader.end!r}, with train_steps_per_epoch for epochs; or a DistributedDataLoader."
            )
        self._epoch = self._windows = 0
        self._leader: str | None = None  # the loader that ended first: the shortest
        self._samples: int | None = 0  # of all ranks in this pass, or None once a window did not know its own
        # The ends of the last windows, and how many there were: a checkpoint may be of the last but one.
        self._places: deque[tuple[DataPosition, int, list[Place]]] = deque(maxlen=3)
        self._note_places(start.position)
        self.steps_per_epoch = self._count_steps()

    def _count_steps(self) -> int | None:
        """Windows of a pass: up to the turn in which the first or the last loader has used up its own."""
        turns = []
        for part in self._parts.values():
            count = part.stream.steps_per_epoch
            if count is not None:
                places = [place for place, turn in enumerate(self._turns) if part in turn]
                rounds, rest = divmod(count, len(places))
                turns.append(rounds * len(self._turns) + places[rest])
            elif self._end != "shortest" or part.stream.length != ENDLESS:
                return None
        if self._end == "cycle" or not turns:
            return None
        return min(turns) if self._end == "shortest" else max(turns)

    @property
    def parts(self) -> Mapping[str, TrainStream]:
        return {name: part.stream for name, part in self._parts.items()}

    @property
    def length(self) -> int | None:
        known = [stream.length for stream in self.parts.values() if stream.length is not None]
        return sum(known) if known else None

    # -- the place

    def seek(self, position: DataPosition, rank_state: SavedState, *, is_pass_over: bool, state: SavedState) -> None:
        if state is None:  # as at the start of a pass, where all loaders are at theirs
            if position.batches and not is_pass_over:
                raise self._of_one_loader()
            position = DataPosition(position.epoch + is_pass_over, 0, 0)
            for part in self._parts.values():
                part.place = Place(position)
                self._seek_part(part, None)
            self._epoch, self._windows, self._samples, self._leader = position.epoch, 0, 0, None
            self._note_places(position)
            return
        self._refuse_other_loaders(state)
        of_rank = {} if rank_state is None else rank_state["loaders"]
        for name, part in self._parts.items():
            saved, own = state["loaders"][name], of_rank.get(name)
            if saved["is_by_rank"] and not own:
                raise DataError(
                    f"only the training loader {name!r} itself knows where it was on each of the former ranks. "
                    "Resume on the former number of ranks, or use a DistributedDataLoader."
                )
            values = own["place"] if own else saved["place"]
            place = Place(**values | {"position": DataPosition(**values["position"])})
            part.place = place._replace(rank_state=own["state"]) if own else place
            self._seek_part(part, saved["state"])
        self._epoch, self._windows, self._samples = position.epoch, state["windows"], position.samples
        self._leader = state["leader"]
        self._note_places(position)
        # A pass that was over is ended in the way it was then.
        if is_pass_over and self._is_last():
            self.end_pass()
        elif is_pass_over:
            with preserved_random_state():
                window = self.next_window()
            if window is not None:
                raise DataError(
                    f"the checkpoint's pass over the training loaders {[*self._parts]} was over, and now there is more "
                    "of it: their data changed. Give them the data they had, or start another experiment."
                )

    def state_at(self, position: DataPosition) -> dict[str, Any] | None:
        windows, places = self._after(position)
        loaders = {
            name: {
                "place": place.as_dict(),
                "state": stream.state_at(place.position),
                "is_by_rank": place.rank_state is not None,
                "global_batch_size": stream.global_batch_size,
            }
            for (name, stream), place in zip(self.parts.items(), places, strict=True)
        }
        return {"loaders": loaders, "order": self._order, "windows": windows, "leader": self._leader}

    def united(self, rank_states: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
        loaders = {}
        for name, stream in self.parts.items():
            of_ranks = [state["loaders"][name] for state in rank_states if state and name in state["loaders"]]
            if of_ranks and stream.resumes_from_all_ranks:
                state = stream.united([own["state"] for own in of_ranks])
                loaders[name] = {"place": of_ranks[0]["place"], "state": state}
        return {"loaders": loaders}

    def numbers_at(self, position: DataPosition) -> Mapping[str, float]:
        _, places = self._after(position)
        return {
            f"data/{part}/{name.removeprefix('data/')}": value
            for (part, stream), place in zip(self.parts.items(), places, strict=True)
            for name, value in stream.numbers_at(place.position).items()
        }

    def end_pass(self) -> None:
        if self._windows == 0:
            return
        if self._end == "shortest":
            self._leader = self._leader or next((name for name, is_over in self._ends().items() if is_over), None)
        for part in self._parts.values():
            # That it is at its end, which was why this pass was over, says nothing of the next one.
            part.place = part.place._replace(is_counted=bool(part.place.at_end), has_ended=False)
        self._epoch += 1
        self._windows, self._samples = 0, 0

    def _after(self, position: DataPosition) -> tuple[int, list[Place]]:
        """How many windows of its pass end with that position, and where the loaders are then."""
        return next(
            (windows, places)
            for end, windows, places in self._places
            # where no samples were counted, the trainer has written them into the position
            if (end == position if end.samples else (end.epoch, end.batches) == (position.epoch, position.batches))
        )

    def close(self) -> None:
        for stream in self.parts.values():
            stream.close()

    def _seek_part(self, part: Member, state: dict[str, Any] | None) -> None:
        part.window = None
        with naming_loader(part.name):
            part.stream.seek(part.place.position, part.place.rank_state, is_pass_over=False, state=state)

    def _refuse_other_loaders(self, state: dict[str, Any]) -> None:
        if "loaders" not in state:
            raise self._of_one_loader()
        saved = state["loaders"]
        if set(saved) != set(self._parts):
            raise DataError(f"the checkpoint is of the training loaders {[*saved]}, not {[*self._parts]}. {_ADVICE}")
        if state["order"] != self._order:
            raise DataError(
                f"the checkpoint's training loaders were read by {state['order']}, and are now by {self._order}: "
                f"other samples would be in each step. {_ADVICE}"
            )
        for name, stream in self.parts.items():
            before, now = saved[name]["global_batch_size"], stream.global_batch_size
            if before != now and None not in (before, now):
                raise DataError(
                    f"the training loader {name!r} gave {before} samples to a step where the checkpoint was "
                    f"written, and gives {now} now: batch size x accumulation x data-parallel ranks. Keep the product."
                )

    def _of_one_loader(self) -> DataError:
        return DataError(f"the checkpoint is of a run over one training loader, not over {[*self._parts]}. {_ADVICE}")

    # -- windows

    def next_window(self) -> Window | None:
        parts = self._turns[self._windows % len(self._turns)]
        has_window = [self._look(part) for part in parts]
        if not all(has_window) and self._is_over():
            self.end_pass()
            return None
        windows = [self._take(part) for part in parts]
        each = [_named(part, window.batches) for part, window in zip(parts, windows, strict=True)]
        if "ratio" in self._order:
            return self._window(((parts[0].name, batch) for batch in each[0]), windows)
        names = [part.name for part in parts]
        return self._window((dict(zip(names, batch, strict=True)) for batch in zip(*each, strict=False)), windows)

    def _is_over(self) -> bool:
        """Whether the pass is over, now that a loader of the next step has ended."""
        if self._end == "shortest":
            return self._leader is not None and self._parts[self._leader].place.has_ended
        return self._end == "longest" and all(part.place.has_ended for part in self._parts.values())

    def _ends(self) -> dict[str, bool | None]:
        """Whether each loader whose turn is next has ended in this pass."""
        parts = self._turns[self._windows % len(self._turns)]
        return {part.name: not part.place.is_counted and part.place.at_end for part in parts}

    def _is_last(self) -> bool | None:
        """Whether the pass is over with the window that was read last; None where only the next one tells."""
        ends = self._ends()
        if self._end == "longest":
            known = [part.place.has_ended or ends.get(name, False) for name, part in self._parts.items()]
            return False if False in known else None if None in known else True
        if self._end == "shortest" and self._leader is None:
            return True if True in ends.values() else None if None in ends.values() else False
        return self._leader is not None and self._end == "shortest" and ends.get(self._leader, False)

    def _look(self, part: Member) -> bool:
        """Looks for the loader's next window; False if its pass has ended, which is counted once."""
        if part.window is None and (not part.place.at_end or part.place.is_counted):
            part.window = self._pull(part) or (self._pull(part) if part.place.is_counted else None)
        if part.window is None:
            part.place = part.place._replace(is_counted=True, has_ended=True)
            self._leader = self._leader or part.name
        return part.window is not None

    def _pull(self, part: Member) -> Window | None:
        with naming_loader(part.name):
            return part.stream.next_window()

    def _take(self, part: Member) -> Window:
        """The loader's next window, of its next pass where this one has ended."""
        window = part.window or self._pull(part) or self._pull(part)
        if window is None:
            raise DataError(
                f"the training loader {part.name!r} has no whole window of {self._accumulation} batches on this rank. "
                "Give every rank enough batches, or lower the accumulation."
            )
        part.place = Place(window.end, window.rank_state, window.is_last, False, part.place.has_ended)
        part.window = None
        return window

    def _window(self, batches: Iterable[Any], windows: Sequence[Window]) -> Window:
        counts = [window.samples for window in windows if window.samples is not None]
        samples = sum(counts) if len(counts) == len(windows) else None
        sizes = [window.sizes for window in windows if window.sizes is not None]
        self._windows += 1
        self._samples = None if self._samples is None or samples is None else self._samples + samples
        end = DataPosition(self._epoch, self._samples or 0, self._windows * self._accumulation, self.length)
        self._note_places(end)
        by_rank = {
            part.name: {"place": part.place.as_dict(), "state": part.place.rank_state}
            for part in self._parts.values()
            if part.place.rank_state is not None
        }
        return Window(
            self._accumulation,
            batches,
            samples,
            end,
            {"loaders": by_rank} if by_rank else None,
            False,
            self._is_last() if self.is_even else None,  # some rank may have to look ahead, and then all of them do
            [sum(of_batch) for of_batch in zip(*sizes, strict=True)] if len(sizes) == len(windows) else None,
        )

    def _note_places(self, end: DataPosition) -> None:
        self._places.append((end, self._windows, [part.place for part in self._parts.values()]))


def count_of_one(loader: LoaderGroup, name: str, count: SampleCount | None) -> SampleCount | None:
    """Counts the samples of one loader's batch; a user's function receives the argument of `training_step`."""
    if count is None or count.own is None:
        return count
    own = count.own
    return SampleCount(lambda batch: own((name, batch))) if isinstance(loader, AlternatingLoaders) else SampleCount()


class Place(NamedTuple):
    position: DataPosition
    rank_state: dict[str, Any] | None = None
    at_end: bool | None = False
    is_counted: bool = False
    has_ended: bool = False

    def as_dict(self) -> dict[str, Any]:
        """As plain data, without this rank's own part."""
        return self._replace(rank_state=None)._asdict() | {"position": asdict(self.position)}


@dataclass(slots=True, eq=False)
class Member:
    name: str
    stream: TrainStream
    place: Place
    window: Window | None = None


def refuse_state_of_group(state: dict[str, Any] | None) -> None:
    if state is not None and "loaders" in state:
        names = list(state["loaders"])
        raise DataError(f"the checkpoint is of a run over the training loaders {names}, not over one loader. {_ADVICE}")


def _named(part: Member, batches: Iterable[Any]) -> Iterator[Any]:
    with naming_loader(part.name):
        yield from batches


@contextmanager
def naming_loader(name: str) -> Iterator[None]:
    """Errors raised inside name the loader."""
    try:
        yield
    except DataError as error:
        raise DataError(f"the training loader {name!r}: {error}") from error
    except Exception as error:
        error.add_note(f"in the training loader {name!r}")
        raise
