"""Several training loaders as one: a batch of each in every micro-batch, or one loader's turn after another's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from math import gcd
from typing import Any, Literal, get_args

from dream_trainer.checks import refuse
from dream_trainer.errors import DataError

PassEnd = Literal["shortest", "longest", "cycle"]
LONGEST_PERIOD = 10_000


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
        DataError: There is no loader, one is a group itself or in it twice, or `end` is unknown.
    """

    def __init__(self, loaders: Mapping[str, Any], *, end: PassEnd = "longest") -> None:
        self.loaders = _checked(loaders, end, type(self).__name__)
        self.end: PassEnd = end


class AlternatingLoaders:
    """Named training loaders that take turns by optimizer steps: each batch is `(name, batch)` of the one whose turn it
    All micro-batches of a step are from one loader, on all ranks, so a step's data depends neither on accumulation
    nor on the number of ranks. Turns are spread evenly: `{"text": 3, "images": 1}` is text, text, images, text. Each
    All micro-batches of a step are of one loader, on all ranks: so what a step reads depends neither on accumulation
    nor on the number of ranks. Turns are spread evenly: `{"text": 3, "images": 1}` is text, text, images, text. Each
    pass begins with the first turn. Else the loaders are read as in a LoaderGroup.

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
        self.loaders = _checked(loaders, end, type(self).__name__)
        self.end: PassEnd = end
        self.ratio = dict.fromkeys(self.loaders, 1) if ratio is None else _checked_ratio(ratio, self.loaders)
        self.turns = turns(self.ratio)


def turns(ratio: Mapping[str, int]) -> list[str]:
    divisor = reduce(gcd, ratio.values())
    shares = {name: count // divisor for name, count in ratio.items()}
    total = sum(shares.values())
    if total > LONGEST_PERIOD:
        raise DataError(f"ratio={dict(ratio)!r} has a round of {total} steps. Use numbers of up to {LONGEST_PERIOD}.")
    owed, order = dict.fromkeys(shares, 0), []
    for _ in range(total):
        for name, share in shares.items():
            owed[name] += share
        chosen = max(owed, key=owed.__getitem__)
        owed[chosen] -= total
        order.append(chosen)
    return order


def _checked(loaders: Any, end: object, kind: str) -> dict[str, Any]:
    if not isinstance(loaders, Mapping) or not loaders:
        raise DataError(
            f'{kind} got {loaders!r}, and no loaders. Give a dict of named loaders, such as {{"text": ..., "images": '
            "...}."
        )
    ends = get_args(PassEnd)
    refuse(end not in ends, f"end={end!r} is not one of {', '.join(map(repr, ends))}.", DataError)
    for name, loader in loaders.items():
        is_name = isinstance(name, str) and name
        is_group = isinstance(loader, LoaderGroup | AlternatingLoaders | Mapping)
        refuse(not is_name, f"{kind} got a loader named {name!r}. Use a string for its name.", DataError)
        what = f"{name!r} of {kind} is itself a {type(loader).__name__}"
        refuse(is_group, f"loader {what}. Put all loaders into one group.", DataError)
    refuse_shared(loaders)
    return dict(loaders)


def refuse_shared(parts: Mapping[str, object]) -> None:
    """Raises DataError where one object is there under two names: it has one place, and both would move it."""
    names: dict[int, str] = {}
    for name, part in parts.items():
        first = names.setdefault(id(part), name)
        if first != name:
            raise DataError(
                f"the training loaders {first!r} and {name!r} read the same {type(part).__name__}. Make one for each."
            )


def _checked_ratio(ratio: Any, loaders: Mapping[str, Any]) -> dict[str, int]:
    is_whole = isinstance(ratio, Mapping) and set(ratio) == set(loaders)
    if not is_whole or not all(type(count) is int and count > 0 for count in ratio.values()):
        raise DataError(
            f"ratio={ratio!r} is not a whole number of steps above 0 for each of the loaders {list(loaders)}, and no "
            "other. Leave out a loader that is not to be read."
        )
    return {name: ratio[name] for name in loaders}
