"""A base that was not loaded: a model that trains a small part on a large frozen part with random values.

A base may be filled in any way: a few values of each of its parameters are checked afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from dream_trainer.compat.pytorch import local_tensor
from dream_trainer.meta.realize import Plan, plain_name

_LOOKED_AT = 8


def frozen_draws(models: Mapping[str, nn.Module], plan: Plan) -> dict[str, Tensor]:
    """Some values of each frozen parameter whose recorded initialisation draws them, once it is real."""
    noted = {name: one for name, one in _parameters(models) if name in plan.by_name and not one.requires_grad}
    is_drawn = plan.tape.history.is_drawn
    return {name: _some_of(one) for name, one in noted.items() if is_drawn(plan.by_name[name].ref)}


def warn_of_unloaded_bases(
    drawn: Mapping[str, Tensor],
    models: Mapping[str, nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    warn_once: Callable[[str, str], None],
) -> None:
    """Warns of each model that is mostly frozen as it was drawn, and trains the rest; once the resume is over."""
    if not drawn:
        return
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    stepped = {id(parameter) for group in groups for parameter in group["params"]}  # may be thawed later
    for model_name, model in models.items():
        trained = unloaded = total = 0
        for name, parameter in _parameters({model_name: model}):
            total += parameter.numel()
            if parameter.requires_grad or id(parameter) in stepped:
                trained += parameter.numel()
            elif name in drawn and torch.equal(_some_of(parameter), drawn[name]):
                unloaded += parameter.numel()
        if trained and 2 * unloaded > total:
            warn_once(
                f"unloaded {model_name}",
                f"model {model_name!r} trains {trained:,} of its {total:,} parameters, and {unloaded:,} are frozen at "
                "random initial values: no weights were loaded into them. Load them in load_pretrained, by "
                "load_base_weights under adapters of peft and by load_weights otherwise, or set init_from. If they "
                "are meant to be random, all is well.",
            )


def _parameters(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for model_name, model in models.items():
        for name, parameter in model.named_parameters(prefix=model_name):
            yield plain_name(name), parameter


def _some_of(parameter: nn.Parameter) -> Tensor:
    """Values spread over this rank's part: the first row by itself may be padding, which is zero in every file."""
    values = local_tensor(parameter).detach().flatten()
    return values[:: max(1, len(values) // _LOOKED_AT)].clone()
