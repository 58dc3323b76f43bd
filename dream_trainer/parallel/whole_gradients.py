"""What ranks of tensor parallelism have whole must get the same gradient on each: compared in the first steps.

A layer that is given a part of its activations trains on without an error, and its copies drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dream_trainer.checks import listed
from dream_trainer.compat.pytorch import all_gather_flat, local_tensor
from dream_trainer.errors import RanksDifferError
from dream_trainer.parallel.sharding import dim_of_part, local_gradient

if TYPE_CHECKING:
    from dream_trainer.distributed.world import World

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
