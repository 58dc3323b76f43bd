"""Turns: several optimizers in one window, and the gradients that one model's loss leaves in another.

A generator's loss leaves gradients in its critic, which the critic's next step would use. Here they are an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.nn as nn
from torch.optim import Optimizer

from dream_trainer.compat.pytorch import local_tensor, write_count
from dream_trainer.errors import StepError
from dream_trainer.gradient_state import GradientState
from dream_trainer.trainer.registry import Registry

_REMEDY = "Keep that loss out of it: `with self.frozen({0}): self.backward(...)`."


class Turns:
    """Which gradients each optimizer's parameters have in the running window."""

    def __init__(self, registry: Registry, gradients: GradientState) -> None:
        self._registry, self._local_gradients = registry, gradients
        self.optimizers = list(dict.fromkeys(registry.optimizers().values()))
        self._backwards = 0
        self._origins: dict[Optimizer, int] = {}  # the backward that gave an optimizer its first gradients
        self._stepped: set[Optimizer] = set()
        # Optimizers with gradients of a loss that also trained another optimizer, which has stepped since.
        self._left: dict[Optimizer, Optimizer] = {}
        self._marks: dict[Optimizer, list[tuple[int, int]]] = {}

    def number_of(self, optimizers: Sequence[Optimizer]) -> int:
        """A number that encodes which of the trainer's optimizers these are, and their order."""
        numbers = {id(optimizer): number for number, optimizer in enumerate(self.optimizers, start=1)}
        return sum(numbers.get(id(optimizer), 0) * 64**place for place, optimizer in enumerate(optimizers))

    def start_window(self) -> None:
        self._backwards = 0
        self._stepped.clear()
        if len(self.optimizers) > 1:
            for of_window in (self._origins, self._left, self._marks):
                of_window.clear()

    def before_backward(self) -> None:
        if self._left:
            self._left = {optimizer: other for optimizer, other in self._left.items() if self._has_gradients(optimizer)}
            self._marks = {optimizer: self._mark(optimizer) for optimizer in self._left}

    def after_backward(self) -> None:
        if len(self.optimizers) < 2:
            return
        for optimizer, other in self._left.items():
            if self._mark(optimizer) != self._marks[optimizer]:
                raise StepError(
                    f"a loss that trained {self._name(other)} left gradients in {self._name(optimizer)}, and after "
                    f"{self._name(other)} was stepped another loss was added to them. {self._remedy(optimizer)} If one "
                    "loss is meant to train both, step both before the next backward."
                )
        self._backwards += 1
        for optimizer in self.optimizers:
            if optimizer not in self._origins and self._has_gradients(optimizer):
                self._origins[optimizer] = self._backwards

    def one_with_gradient(self) -> nn.Parameter | None:
        """A parameter with a gradient; None if there is none, or several optimizers, which `finish_window` looks at."""
        if len(self.optimizers) > 1:
            return None
        parameters = (p for optimizer in self.optimizers for p in _parameters(optimizer))
        return next((p for p in parameters if p.grad is not None), None)

    def has_stepped(self, optimizers: Sequence[Optimizer]) -> bool:
        return not self._stepped.isdisjoint(optimizers)

    def stepped(self, optimizers: Sequence[Optimizer]) -> None:
        self._stepped.update(optimizers)
        self.optimizers += [optimizer for optimizer in optimizers if optimizer not in self.optimizers]
        if len(self.optimizers) > 1:
            origins = {self._origins.pop(o): o for o in optimizers if o in self._origins}
            for optimizer in optimizers:
                self._left.pop(optimizer, None)
            for optimizer, origin in self._origins.items():
                if origin in origins:
                    self._left.setdefault(optimizer, origins[origin])

    def finish_window(self, n_batches: int) -> None:
        if len(self.optimizers) < 2:
            return
        for optimizer in self.optimizers:
            if self._has_gradients(optimizer):
                if not self._backwards and not self._stepped:
                    raise StepError(
                        f"the window ended with gradients in {self._name(optimizer)}, and neither self.backward(...) "
                        "nor self.step(...) was called in it. Call self.backward(loss) instead of loss.backward(), and "
                        "self.step(model, optimizer) instead of optimizer.step()."
                    )
                raise StepError(
                    f"the window ended with gradients in {self._name(optimizer)} that no step() used: they would leak "
                    f"into the next. Another model's loss may have left them there. {self._remedy(optimizer)}"
                )
            if n_batches > 1 and optimizer in self._stepped and optimizer in self._origins:
                raise StepError(
                    f"a loss left gradients in {self._name(optimizer)} after that was stepped, and zero_grad() dropped "
                    f"them; but in the window's other micro-batches they were added to its own, and stepped. "
                    f"{self._remedy(optimizer)}"
                )

    def _has_gradients(self, optimizer: Optimizer) -> bool:
        return self._local_gradients.has_gradients(_parameters(optimizer))

    def _mark(self, optimizer: Optimizer) -> list[tuple[int, int]]:
        """Changes when gradients are added."""
        grads = [local_tensor(p.grad) for p in _parameters(optimizer) if p.grad is not None]
        return [(id(grad), write_count(grad)) for grad in grads]

    def _models(self, optimizer: Optimizer) -> list[str]:
        parameters = {id(p) for p in _parameters(optimizer)}
        models = self._registry.models().items()
        return [name for name, model in models if any(id(p) in parameters for p in model.parameters())]

    def _name(self, optimizer: Optimizer) -> str:
        return " and ".join(self._models(optimizer)) or type(optimizer).__name__

    def _remedy(self, optimizer: Optimizer) -> str:
        return _REMEDY.format(", ".join(f"self.{name}" for name in self._models(optimizer)))


def _parameters(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    return (p for group in optimizer.param_groups for p in group["params"])
