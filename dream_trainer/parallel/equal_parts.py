"""Ranks that share layers need equal parts: PyTorch joins others wrongly, or ends the process.

At the first batch of some shapes, ranks therefore compare the inputs of each split module before it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dream_trainer.compat.pytorch import all_gather_flat, is_dtensor
from dream_trainer.distributed.world import World
from dream_trainer.errors import RanksDifferError
from dream_trainer.modules.class_change import own_class
from dream_trainer.nested import leaves
from dream_trainer.parallel.micro_batches import shapes_of
from dream_trainer.parallel.plain_run import removed_after
from dream_trainer.parallel.sharding import dim_of_part

_NUMBERS = 64  # that ranks send to describe a module's inputs: each tensor's number of dimensions and sizes


class EqualParts:
    """Compares the inputs of split modules between tensor-parallel ranks."""

    def __init__(self, models: Mapping[str, nn.Module], world: World) -> None:
        assert world.mesh is not None  # several ranks share layers
        self._group, self._size, self._device = world.mesh["tp"].get_group(), world.mesh["tp"].size(), world.device
        self._last: nn.Module | None = None
        self._split = {
            module: f"{model_name}.{name}" if name else model_name
            for model_name, model in models.items()
            for name, module in model.named_modules()
            if any(dim_of_part(p, "tp") is not None for p in module.parameters())
        }

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Compares split modules inside the block; the error of one that fails says what is split there."""
        self._last = None
        comparing = (m.register_forward_pre_hook(self._compare, prepend=True, with_kwargs=True) for m in self._split)
        try:
            with removed_after(comparing):
                yield
        except RuntimeError as error:
            self._note_what_is_split(error)
            raise

    @torch.no_grad()
    def _compare(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._last = module
        given = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor) and not is_dtensor(x)]
        numbers = [number for tensor in given for number in (tensor.ndim, *tensor.shape)][:_NUMBERS]
        own = torch.tensor(numbers + [-1] * (_NUMBERS - len(numbers)), device=self._device)
        of_ranks = own.new_empty(self._size * _NUMBERS)
        all_gather_flat(of_ranks, own, self._group)
        by_rank = of_ranks.view(self._size, -1)
        if bool((by_rank != by_rank[0]).any()):
            self._refuse(module, [_shapes(row) for row in by_rank.tolist()])

    def _refuse(self, module: nn.Module, shapes: list[list[list[int]]]) -> None:
        place = next(
            (n for n, of_ranks in enumerate(zip(*shapes, strict=False)) if len(set(map(tuple, of_ranks))) > 1), 0
        )
        said = ", ".join(f"{of_rank[place] if place < len(of_rank) else 'nothing'}" for of_rank in shapes)
        uneven = [
            f"{self._split[part]}.{name} has {p.shape[dim]} in dimension {dim}"
            for part in self._split
            for name, p in part.named_parameters(recurse=False)
            if (dim := dim_of_part(p, "tp")) is not None and dim >= 0 and p.shape[dim] % self._size
        ]
        # With several stages on a rank, each has its own copy of the non-block modules.
        name = self._split.get(module, own_class(module).__name__)
        cause = f" Of parameters, {', '.join(uneven[:3])}." if uneven else ""
        raise RanksDifferError(
            f"{name} is given parts of unequal sizes on the tensor_parallel={self._size} ranks: {said}. "
            "A plan cuts into equal parts: use lengths of sequences (with sequence parallel), heads and hidden sizes "
            f"that are multiples of {self._size}.{cause}"
        )

    def _note_what_is_split(self, error: RuntimeError) -> None:
        """Explains e.g. a failed view into the config's number of heads, which mistakes a part for the whole."""
        owner = self._last
        if owner is None:
            return
        parts = [
            f"{name} ({p.shape[dim] // self._size} of {p.shape[dim]} in dimension {dim})"
            for name, p in owner.named_parameters()
            if (dim := dim_of_part(p, "tp")) is not None and dim >= 0
        ]
        error.add_note(
            f"Under tensor_parallel={self._size} each rank has a part of {self._split[owner]}, which ran last: "
            f"{', '.join(parts[:6])}. Parts have to be whole heads, of a number that {self._size} divides, and heads "
            "counted from the tensor: x.view(*x.shape[:-1], -1, head_size)."
        )


def once_for_each_shape(step: Callable[[Any, int], Any], parts: EqualParts) -> Callable[[Any, int], Any]:
    """`step`, which compares the first batch of each shape."""
    seen: set[Any] = set()

    def compared(batch: Any, batch_idx: int) -> Any:
        shapes = shapes_of(batch)
        if shapes in seen:
            return step(batch, batch_idx)
        with parts.compared():
            result = step(batch, batch_idx)
        seen.add(shapes)
        return result

    return compared


def _shapes(numbers: list[int]) -> list[list[int]]:
    shapes = []
    while numbers and numbers[0] >= 0:
        ndim, *rest = numbers
        shapes.append(rest[:ndim])
        numbers = rest[ndim:]
    return shapes
