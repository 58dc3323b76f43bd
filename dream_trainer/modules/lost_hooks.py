"""Hooks on the gradients of parameters that are replaced when a model is cut over ranks: they are gone with those."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch.nn as nn

from dream_trainer.compat.gradient_hooks import has_hooks
from dream_trainer.errors import HookError


def hooked_parameters(models: Mapping[str, nn.Module]) -> list[str]:
    """Names of parameters on whose gradients there are hooks."""
    found = []
    for name, model in models.items():
        found += [full for full, parameter in model.named_parameters(f"self.{name}") if has_hooks(parameter)]
    return found


def refuse_lost_hooks(hooked: Collection[str], models: Mapping[str, nn.Module]) -> None:
    """Refuses to train where hooks were set and are there no longer.

    Args:
        hooked: As `hooked_parameters` found them while models were whole.
        models: As they are to be trained, maybe with a part of the parameters.

    Raises:
        HookError: One of these has lost its hooks.
    """
    if not hooked:
        return
    still = hooked_parameters(models)
    there = {full for name, model in models.items() for full, _ in model.named_parameters(f"self.{name}")}
    lost = [name for name in hooked if name in there and name not in still]
    if lost:
        raise HookError(
            f"{lost[0]} has a hook on its gradient, set in configure_models, and was replaced when the model was cut "
            "over ranks: it would never be called. Change its grad, which is this rank's part, in pre_optimizer_step, "
            "or by register_post_accumulate_grad_hook in configure_optimizers."
        )
