"""Parameters that several stages of a pipeline have copies of: each copy's gradient is the sum of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer.compat.pytorch import local_tensor, with_local
from dream_trainer.errors import HookError, StepError
from dream_trainer.modules.cut_models import ties_in

if TYPE_CHECKING:
    import torch.distributed as dist

    from dream_trainer.compat.local_gradients import LocalGradients
    from dream_trainer.distributed.world import World
    from dream_trainer.trainer.abstract import AbstractTrainer

_FIXES = ("Put it into the same group", "Have apply_tensor_parallel split it alike")


def connect_ties(trainer: AbstractTrainer, model: nn.Module) -> None:
    """Has `step` add up the gradients of copies; a collective, if there are any.

    Raises:
        HookError: Copies are in other optimizers or groups than each other, and would not stay equal, or ranks that
            share layers have other parts of one copy than of the other.
    """
    ties = ties_in(model)
    if not ties:
        return
    own = {tie.names: (tie.own_name, model.get_parameter(tie.own_name)) for tie in ties if tie.own_name is not None}
    places = {
        names: f"{name} is in group {number} of {optimizer_name}"
        for names, (name, parameter) in own.items()
        for optimizer_name, optimizer in trainer.named_optimizers().items()
        for number, group in enumerate(optimizer.param_groups)
        if any(parameter is other for other in group["params"])
    }
    held = {
        names: (places.get(names, f"{name} is in no optimizer"), f"{name} is {_layout(parameter)}")
        for names, (name, parameter) in own.items()
    }
    all_held = trainer.world.all_gather_object(held)
    for tie in ties:
        of_ranks = [of_rank[tie.names] for of_rank in all_held if tie.names in of_rank]
        for found, fix in zip(zip(*of_ranks, strict=True), _FIXES, strict=True):
            if len({said.partition(" is ")[2] for said in found}) > 1:
                raise HookError(
                    f"{' and '.join(tie.names)} are one parameter, of which stages of the pipeline have copies, and "
                    f"{', '.join(dict.fromkeys(found))}. {fix} under each of its names."
                )
    trainer._parallel.gradients.tied |= {id(own[tie.names][1]): tie.ranks for tie in ties if tie.names in own}


def _layout(parameter: nn.Parameter) -> str:
    from torch.distributed.tensor import DTensor

    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return f"of the shape {list(parameter.shape)}, {' '.join(map(str, placements)) or 'whole'}"


class TiedGradients:
    """Adds up the gradients of copies, in one order on all ranks, so that they are equal to the bit.

    Args:
        world: The ranks.
        stages: The pipeline.
        gradients: What a backward has used.
    """

    def __init__(self, world: World, stages: dist.ProcessGroup, gradients: LocalGradients) -> None:
        self._world, self._stages, self._gradients = world, stages, gradients
        self._agreed: set[int] = set()

    def add_up(self, model: nn.Module, tied: Sequence[tuple[nn.Parameter, tuple[int, ...]]], number: int) -> None:
        """A step's own; what is stepped for the first time is compared first, by all ranks.

        Args:
            model: What is stepped.
            tied: This rank's copies, in an order that all ranks share, each with the ranks of the pipeline that have
                one.
            number: One that says which optimizers are stepped.

        Raises:
            StepError: Stages step other optimizers than each other, or train other copies; the same on every rank.
        """
        if not (ties := ties_in(model)):
            return
        if number not in self._agreed:
            own = {tie.names: tie.own_name for tie in ties if tie.own_name is not None}
            trained = {names: model.get_parameter(name).requires_grad for names, name in own.items()}
            self._compare(self._world.all_gather_object((number, trained)))
            self._agreed.add(number)
        for parameter, ranks in tied:
            if parameter.requires_grad:
                _add_up(parameter, ranks, self._stages, self._world.device)
                if parameter.grad is not None and id(parameter) in self._gradients.shared:
                    self._gradients.used.add(id(parameter))  # by another stage

    def _compare(self, of_ranks: Sequence[tuple[int, dict[tuple[str, ...], bool]]]) -> None:
        if len({number for number, _ in of_ranks}) > 1:
            raise StepError(
                "stages of the pipeline have called step() for other optimizers than each other, or in another order. "
                "Step the same ones on all, in the same order, also those that have nothing in a stage."
            )
        for names in dict.fromkeys(names for _, trained in of_ranks for names in trained):
            if len({trained[names] for _, trained in of_ranks if names in trained}) > 1:
                raise StepError(
                    f"{' and '.join(names)} are one parameter, of which stages of the pipeline have copies, and it is "
                    "frozen in some of them. Freeze it under each of its names, or under none."
                )


def _add_up(parameter: nn.Parameter, ranks: tuple[int, ...], stages: dist.ProcessGroup, device: torch.device) -> None:
    import torch.distributed as dist

    has_gradient = parameter.grad is not None
    own = local_tensor(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    # The last number says whether there is a gradient: a parameter that no stage used gets none, as in one process.
    sent = torch.cat((own.reshape(-1), own.new_full((1,), float(has_gradient)))).to(device)
    parts: list[Tensor] = []
    messages: list[Any] = []
    for rank in ranks:
        if dist.get_group_rank(stages, dist.get_rank()) == rank:
            parts.append(sent)
            continue
        other = dist.get_global_rank(stages, rank)
        parts.append(torch.empty_like(sent))
        messages += [dist.P2POp(dist.isend, sent, other, stages), dist.P2POp(dist.irecv, parts[-1], other, stages)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    total = torch.stack(parts).sum(dim=0) if len(parts) > 2 else parts[0] + parts[1]
    if not has_gradient:  # a rank that has it does not wait for the device
        if not total[-1].item():
            return
        parameter.grad = with_local(parameter, own)
    own.copy_(total[:-1].view_as(own))
