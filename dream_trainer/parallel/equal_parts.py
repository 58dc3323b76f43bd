"""Ranks that share layers have equal parts of what a plan cuts, or PyTorch joins them wrongly, or ends the process.

So at the first batch of some shapes ranks compare what each split module is given, before it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dream_trainer.checks import listed
from dream_trainer.compat.pytorch import all_gather_flat, is_dtensor, local_tensor
from dream_trainer.distributed.world import World
from dream_trainer.errors import RanksDifferError
from dream_trainer.modules.class_change import own_class
from dream_trainer.nested import leaves
from dream_trainer.parallel.micro_batches import shapes_of
from dream_trainer.parallel.sharding import dim_of_part, local_gradient
from dream_trainer.parallel.verify import removed_after

_NUMBERS = 64  # that ranks send of what a module is given: of each tensor its dimensions and their sizes


class EqualParts:
    """Compares what split modules are given, between the ranks that share them."""

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
        """Compares split modules inside of the block; the error of one that fails says what is split there."""
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
        # Of what is around the layers each of several stages of a rank has a copy.
        name = self._split.get(module, own_class(module).__name__)
        cause = f" Of parameters, {', '.join(uneven[:3])}." if uneven else ""
        raise RanksDifferError(
            f"{name} is given parts of unequal sizes on the tensor_parallel={self._size} ranks: {said}. "
            "A plan cuts into equal parts: use lengths of sequences (with sequence parallel), heads and hidden sizes "
            f"that are multiples of {self._size}.{cause}"
        )

    def _note_what_is_split(self, error: RuntimeError) -> None:
        """Such as for a view into as many heads as the config says, which takes a part for the whole."""
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
    """`step`, in which the first batch of each shape is compared."""
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


# -- What these ranks have whole must get the same gradient on each: compared in the first steps.
#
# A layer that is given a part of its activations trains on without an error, and its copies drift apart.


STEPS = 10  # a gradient may be 0 at first, as behind a layer that begins with zeros
SUMS = 1024
# Those of one computation differ by rounding alone, and only where a kernel adds in any order.
TOLERANCE = 0.01


def compare_first_gradients(optimizers: Iterable[Optimizer], models: Mapping[str, nn.Module], world: World) -> None:
    """Compares before each step, waiting for the device, until each whole parameter had a gradient."""
    names = {id(p): f"{name}.{path}" for name, model in models.items() for path, p in model.named_parameters()}
    for optimizer in optimizers:
        _Comparison(optimizer, names, world)


class _Comparison:
    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], world: World) -> None:
        assert world.mesh is not None  # several ranks share layers
        self._group, self._size = world.mesh["tp"].get_group(), world.mesh["tp"].size()
        self._names, self._world = names, world
        self._waiting = [
            p for group in optimizer.param_groups for p in group["params"] if dim_of_part(p, "tp") in (None, -1)
        ]
        self._n_steps, self._is_over = 0, False
        optimizer.register_step_pre_hook(self._compare)

    @torch.no_grad()
    def _compare(self, *of_optimizer: Any) -> None:
        if self._is_over:
            return
        self._n_steps += 1
        parts = [_fingerprint(p).to(self._world.device) for p in self._waiting]
        own = torch.cat(parts) if parts else torch.zeros(0, device=self._world.device)
        by_rank = own.new_empty(self._size * len(own))
        all_gather_flat(by_rank, own, self._group)
        waiting, differing = [], []
        of_each = by_rank.view(self._size, -1).cpu().split([len(part) for part in parts], dim=1)
        for parameter, prints in zip(self._waiting, of_each, strict=True):
            norm, sums = prints[:, 0].amax(), prints[:, 1:]
            if norm == 0 or not norm.isfinite():
                waiting.append(parameter)
            elif (sums - sums[0]).norm(dim=1).amax() > TOLERANCE * norm:
                differing.append(self._names[id(parameter)])
        self._waiting = waiting
        found: list[tuple[list[str], int]] = [(differing, len(waiting))]
        if self._world.workers == 1:  # groups that step on their own may leave out another step each
            found = self._world.all_gather_object(found[0])
        if self._n_steps == STEPS or not any(n_waiting for _, n_waiting in found):
            self._is_over = True
        self._refuse(list(dict.fromkeys(name for names, _ in found for name in names)))

    def _refuse(self, differing: list[str]) -> None:
        if not differing:
            return
        raise RanksDifferError(
            f"{listed(differing, 3)}: whole on each of the tensor_parallel={self._size} ranks, and their "
            "gradients differ between these, so that the ranks' weights would drift apart. Such a layer needs whole "
            "activations: where a plan cuts sequences, give it PrepareModuleInput(..., desired_input_layouts="
            "Replicate()), as every mixture of experts needs, or SequenceParallel() if it is a norm; and random layers "
            "behind it have to draw the same on these ranks."
        )


def _fingerprint(parameter: nn.Parameter) -> Tensor:
    """The norm of this rank's gradient, and sums over its elements with signs that nothing else has; without one 0."""
    own = _real(local_tensor(parameter.detach()))
    of_sum = max(1, own.numel() // SUMS)
    n_sums = own.numel() // of_sum
    if parameter.grad is None:
        return torch.zeros(1 + n_sums, device=own.device)
    gradient = _real(local_gradient(parameter)).flatten()
    signs = torch.randint(2, (of_sum,), generator=torch.Generator().manual_seed(0)).mul_(2).sub_(1).to(gradient)
    # The few elements left over are not looked at.
    sums = gradient[: n_sums * of_sum].view(n_sums, of_sum) @ signs
    return torch.cat((gradient.norm().view(1), sums)).float()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
