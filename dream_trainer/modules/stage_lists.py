"""Lists of layers of which a stage of a pipeline has some: each is asked for by its number in the whole model."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

import torch.nn as nn

from dream_trainer.errors import StepError
from dream_trainer.modules.class_change import Changed, change_class
from dream_trainer.modules.cut_models import is_held


class NumberedAsWhole(Changed):
    """A ModuleList whose entries keep their numbers, whichever are left."""

    _called: str
    _stages: Sequence[str]

    def __getitem__(self, index: int | slice) -> Any:
        numbers = range(len(self._stages))
        if isinstance(index, slice):
            return nn.ModuleList(self._modules[str(n)] for n in numbers[index] if str(n) in self._modules)  # type: ignore[misc]
        number = numbers[operator.index(index)]  # raises as a list does
        return self._modules[str(number)] if str(number) in self._modules else self._refuse(number)

    def __setitem__(self, index: int, module: nn.Module) -> None:
        number = range(len(self._stages))[operator.index(index)]
        if str(number) not in self._modules:
            self._refuse(number)
        setattr(self, str(number), module)

    def __reversed__(self) -> Iterator[nn.Module]:
        return reversed(list(self))  # type: ignore[call-overload]

    def _refuse_another_length(self, *_: Any, **__: Any) -> NoReturn:
        raise StepError(
            f"{self._called} is a list of layers that stages of the pipeline share, and none can be added or removed "
            "once it is cut. Do it in configure_models."
        )

    append = insert = extend = pop = __delitem__ = __iadd__ = _refuse_another_length

    def _refuse(self, number: int) -> NoReturn:
        raise IndexError(
            f"{self._called}[{number}] is in stage {self._stages[number]} of the pipeline, and this rank has "
            f"{', '.join(self._modules) or 'none'} of {len(self._stages)}. Run through those that are there (`for "
            f"block in self.{self._called}`), or have pipeline_stages put what is needed together into one stage."
        )


def number_lists(model: nn.Module, stages: Sequence[Collection[str]]) -> None:
    """Has lists around the blocks of `model`, which is still whole, keep their numbers when it is cut.

    Args:
        model: The model; the lists' classes change in place.
        stages: The names that each stage holds.
    """
    held = [name for names in stages for name in names]
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(name.startswith(f"{around}.") for around in held):
            continue
        change_class(module, NumberedAsWhole)
        vars(module)["_called"] = name
        vars(module)["_stages"] = [_stage_of(f"{name}.{number}", stages) for number in range(len(module))]


def _stage_of(name: str, stages: Sequence[Collection[str]]) -> str:
    of = [str(n) for n, names in enumerate(stages) if is_held(name, names) or _has_part(name, names)]
    return " and ".join(of) or "none"


def _has_part(name: str, names: Collection[str]) -> bool:
    return any(held.startswith(f"{name}.") for held in names)
