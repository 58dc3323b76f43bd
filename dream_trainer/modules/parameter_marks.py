"""Users' attributes of parameters and hooks on gradients, if a model is cut over ranks.

The new parameters get the attributes. A hook would need whole gradients, so it is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch.nn as nn

from dream_trainer.compat.pytorch import has_hooks
from dream_trainer.errors import HookError


class ParameterMarks:
    """Those of whole models."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        # Subclasses keep their own data there, such as quantised weights.
        plain = [(name, parameter) for name, parameter in _parameters(models) if type(parameter) is nn.Parameter]
        self._attributes = {name: dict(vars(parameter)) for name, parameter in plain}
        self._hooked = {name for name, parameter in _parameters(models) if has_hooks(parameter)}

    def put_back(self, models: Mapping[str, nn.Module]) -> None:
        """Restores missing attributes of parameters with these names, and remembers their present ones."""
        for name, parameter in _parameters(models):
            now = vars(parameter)
            now.update({key: value for key, value in self._attributes.get(name, {}).items() if key not in now})
            self._attributes[name] = dict(now)

    def refuse_lost_hooks(self, models: Mapping[str, nn.Module]) -> None:
        if not self._hooked:
            return
        lost = next((name for name, one in _parameters(models) if name in self._hooked and not has_hooks(one)), None)
        if lost is not None:
            raise HookError(
                f"{lost} has a hook on its gradient, set in configure_models, and was replaced when the model was cut "
                "over ranks: it would never be called. Change its grad, which is this rank's part, in "
                "pre_optimizer_step, or by register_post_accumulate_grad_hook in configure_optimizers."
            )


def _parameters(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """With all names, which may differ in a part of a model."""
    for name, model in models.items():
        yield from model.named_parameters(f"self.{name}", remove_duplicate=False)
