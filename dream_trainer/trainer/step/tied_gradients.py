"""Parameters that several stages have copies of: each copy's gradient is the sum of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from dream_trainer.compat.pytorch import is_dtensor, local_tensor, with_local, write_count
from dream_trainer.distributed.world import World
from dream_trainer.errors import HookError, StepError
from dream_trainer.gradient_state import GradientState
from dream_trainer.parallel.sharding import Tie, is_cut, ties_in
from dream_trainer.trainer.registry import Registry
from dream_trainer.trainer.step.accumulation import Accumulation

_FIXES = ("Put it into the same group", "Have it split alike")


def connect_copies(registry: Registry, world: World, gradients: GradientState) -> None:
    """Makes `step` sum the gradients of parameters that several stages have; a collective if any are shared."""
    whole = [id(p) for model in registry.models().values() if not is_cut(model) for p in model.parameters()]
    gradients.whole |= set(whole)
    gradients.tied |= dict.fromkeys(whole, tuple(range(world.stages)))
    ties = ties_of_models(registry)
    if not ties:
        return
    own = {key: (tie.own_name, parameter) for key, (tie, parameter) in ties.items() if parameter is not None}
    places = {
        id(parameter): f"in group {number} of {optimizer_name}"
        for optimizer_name, optimizer in registry.optimizers().items()
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    held = {
        key: (f"{name} is {places.get(id(p), 'in no optimizer')}", f"{name} is {_layout(p)}")
        for key, (name, p) in own.items()
    }
    all_held = world.all_gather_object(held)
    for key, (tie, _) in ties.items():
        of_ranks = [of_rank[key] for of_rank in all_held if key in of_rank]
        for found, fix in zip(zip(*of_ranks, strict=True), _FIXES, strict=True):
            if len({said.partition(" is ")[2] for said in found}) > 1:
                raise HookError(
                    f"{' and '.join(tie.names)} are one parameter with copies in several stages, and "
                    f"{', '.join(dict.fromkeys(found))}. {fix} under each of its names."
                )
    gradients.tied |= {id(parameter): ties[key][0].ranks for key, (_, parameter) in own.items()}


def ties_of_models(registry: Registry) -> dict[tuple[str, ...], tuple[Tie, nn.Parameter | None]]:
    """What stages share, in an order that all ranks share, each with this rank's copy, if it has one."""
    return {
        (model_name, *tie.names): (tie, None if tie.own_name is None else model.get_parameter(tie.own_name))
        for model_name, model in registry.models().items()
        for tie in ties_in(model)
    }


def _layout(parameter: nn.Parameter) -> str:
    placements = parameter.placements if is_dtensor(parameter) else ()
    return f"of the shape {list(parameter.shape)}, {' '.join(map(str, placements)) or 'whole'}"


@dataclass(eq=False, repr=False)
class TiedGradients:
    """Adds up the gradients of copies, in one order on all ranks, so that they are equal to the bit."""

    _registry: Registry
    _world: World
    _stages: dist.ProcessGroup
    _gradients: GradientState
    _accumulation: Accumulation
    _agreed: set[int] = field(default_factory=set)
    _trained: set[int] = field(default_factory=set)  # of this rank's copies, which were so in their last step
    _ties: dict[tuple[str, ...], tuple[Tie, nn.Parameter | None]] | None = None
    _with_buffers: list[nn.Module] | None = None  # of models that are whole, since the first step
    _counts: list[list[tuple[int, int]]] = field(default_factory=list)  # of their buffers, when they were last equal

    def add_up(self, tied: Sequence[tuple[nn.Parameter, tuple[int, ...]]], number: int) -> None:
        """Adds up the gradients of `tied`; all ranks compare what is stepped for the first time."""
        if self._ties is None:
            self._ties = ties_of_models(self._registry)
        if not self._ties and not self._gradients.whole:
            return
        if number not in self._agreed:
            trained = {key: p.requires_grad for key, (_, p) in self._ties.items() if p is not None}
            self._compare(self._world.all_gather_object((number, trained)))
            self._agreed.add(number)
        self._add_up_whole([p for p, _ in tied if p.requires_grad and id(p) in self._gradients.whole])
        if self._gradients.whole:
            self._share_buffers()
        for parameter, ranks in tied:
            takes_part = parameter.requires_grad or id(parameter) in self._trained
            if id(parameter) in self._gradients.whole or not takes_part:
                continue
            n_others = _add_up(parameter, ranks, self._stages, self._world.device)
            if parameter.requires_grad:
                self._trained.add(id(parameter))
                self._note(parameter)
                continue
            self._trained.discard(id(parameter))
            if n_others:
                name = next(f"{key[0]}.{tie.own_name}" for key, (tie, own) in self._ties.items() if own is parameter)
                raise StepError(
                    f"{name} was frozen since its last step, and other stages have copies of it that are trained. "
                    "Freeze it in all of them in the same step, under each of its names, or in none."
                )

    def _note(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None and id(parameter) in self._gradients.sharded:
            self._gradients.used.add(id(parameter))  # by another stage

    def _add_up_whole(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sends whole models' gradients from the rank that ran their backward to all others."""
        if not parameters:
            return
        # On the host, without waiting for the device: the other ranks have no gradients, and ask which exist.
        goes_back = bool(self._accumulation.goes_back_here)  # other ranks' gradients would be duplicates
        has_gradient = torch.tensor([goes_back and p.grad is not None for p in parameters])
        is_there = self._world.all_gather(has_gradient).any(dim=0).tolist()
        by_dtype: dict[torch.dtype, list[tuple[nn.Parameter, Tensor]]] = {}
        for parameter in [p for p, is_one in zip(parameters, is_there, strict=True) if is_one]:
            own = local_tensor(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            by_dtype.setdefault(own.dtype, []).append((parameter, own))
        for pairs in by_dtype.values():
            flat = torch.cat([own.reshape(-1) for _, own in pairs]).to(self._world.device)
            if not goes_back:
                flat.zero_()
            dist.all_reduce(flat, group=self._stages)
            for (parameter, own), total in zip(pairs, flat.split([own.numel() for _, own in pairs]), strict=True):
                own.copy_(total.view_as(own))
                if parameter.grad is None:
                    parameter.grad = with_local(parameter, own)
                self._note(parameter)

    def _share_buffers(self) -> None:
        """Sends the changes that losses made to whole models on the last stage to all other ranks."""
        if self._with_buffers is None:
            whole = [model for model in self._registry.models().values() if not is_cut(model)]
            parts = [module for model in whole for module in model.modules()]
            self._with_buffers = [module for module in parts if list(module.buffers(recurse=False))]
        modules = self._with_buffers
        if not modules:
            return
        goes_back = bool(self._accumulation.goes_back_here)
        # Of all that a module has: what a norm's kernel writes is not counted, the batches that it has seen are.
        counts = [[(id(b), write_count(b)) for b in module.buffers(recurse=False)] for module in modules]
        changed = [goes_back and now != then for now, then in zip_longest(counts, self._counts[: len(counts)])]
        of_ranks = self._world.all_gather(torch.tensor([goes_back, *changed]))
        of_ranks = of_ranks.view(self._world.stages, -1, 1 + len(changed))
        source = int(of_ranks[:, 0, 0].int().argmax())
        for module, is_new in zip(modules, of_ranks[..., 1:].flatten(0, 1).any(dim=0).tolist(), strict=True):
            for buffer in module.buffers(recurse=False) if is_new else ():
                dist.broadcast(local_tensor(buffer), group=self._stages, group_src=source)
        self._counts = [[(id(b), write_count(b)) for b in module.buffers(recurse=False)] for module in modules]

    def _compare(self, of_ranks: Sequence[tuple[int, dict[tuple[str, ...], bool]]]) -> None:
        if len({number for number, _ in of_ranks}) > 1:
            raise StepError(
                "stages have called step() for other optimizers than each other, or in another order. "
                "Step the same ones on all, in the same order, also those that have nothing in a stage."
            )
        for names in dict.fromkeys(names for _, trained in of_ranks for names in trained):
            if len({trained[names] for _, trained in of_ranks if names in trained}) > 1:
                raise StepError(
                    f"{' and '.join(names)} are one parameter with copies in several stages, and it is "
                    "frozen in some of them. Freeze it under each of its names, or under none."
                )


def _add_up(parameter: nn.Parameter, ranks: tuple[int, ...], stages: dist.ProcessGroup, device: torch.device) -> int:
    """Gives `parameter` the sum of its copies' gradients; returns how many are trained, if this one is frozen."""
    is_trained = parameter.requires_grad
    has_gradient = is_trained and parameter.grad is not None
    own = local_tensor(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    # The last numbers say whether there is a gradient, since a parameter that no stage used gets none, as in one
    # process, and whether it could have one.
    sent = torch.cat((own.reshape(-1), own.new_tensor((has_gradient, is_trained)))).to(device)
    parts: list[Tensor] = []
    messages: list[Any] = []
    for rank in ranks:
        if rank == stages.rank():
            parts.append(sent)
            continue
        parts.append(torch.empty_like(sent))
        for operation, tensor in ((dist.isend, sent), (dist.irecv, parts[-1])):
            messages.append(dist.P2POp(operation, tensor, group=stages, group_peer=rank))
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    total = torch.stack(parts).sum(dim=0) if len(parts) > 2 else parts[0] + parts[1]
    if not is_trained:
        return round(total[-1].real.item())
    if not has_gradient:  # a rank that has it does not wait for the device
        if not total[-2].item():
            return 0
        parameter.grad = with_local(parameter, own)
    own.copy_(total[:-2].view_as(own))
    return 0
