"""How a model is called with a batch: what goes in, what is compared with it, and where the loss comes from.

A batch is a tuple or list `(*inputs, target)`, a mapping of keyword arguments, or a single input. Without a loss
function the model computes its loss, as those of Hugging Face do: it gets the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.nn as nn
from torch import Tensor

from dream_trainer.errors import DataError, HookError

Loss = Callable[[Any, Any], Tensor]
Step = Callable[[nn.Module, Any], Tensor | Mapping[str, Any]]
Metric = Callable[[Any, Any], Tensor | float]


class Forward(NamedTuple):
    """What one forward gave.

    Attributes:
        loss: The batch's; None where there is nothing to compare with.
        outputs: What the model returned.
        targets: What it should have; None if the batch has none.
    """

    loss: Tensor | None
    outputs: Any
    targets: Any


class ModelCalls:
    """Calls a model with batches.

    Args:
        loss: Of `(outputs, targets)`; None: the model returns its loss.
        target: Name of the target in a batch that is a mapping.
    """

    def __init__(self, loss: Loss | None, target: str) -> None:
        self._loss, self._target = loss, target

    @property
    def returns_loss(self) -> bool:
        """Whether the model computes its loss."""
        return self._loss is None

    def forward(self, model: nn.Module, batch: Any) -> Forward:
        """One forward with its loss.

        Raises:
            DataError: The batch has no target, and there is a loss function.
            HookError: The model returned no loss, and there is no loss function.
        """
        inputs, targets = self._parts(batch)
        if self._loss is None:
            outputs = _called(model, batch)
            return Forward(_own_loss(outputs, model, batch), outputs, targets)
        if targets is None:
            raise DataError(
                f"loss= needs a target, and there is none in a batch of {_described(batch)}. Yield (inputs, target), "
                f"or a dict with {self._target!r} (target= names another), or give step=, a function of "
                "(model, batch) that returns the loss."
            )
        outputs = _called(model, inputs)
        return Forward(self._loss(outputs, targets), outputs, targets)

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """What the model says of a batch, with or without its target."""
        inputs, _ = self._parts(batch)
        return scores(_called(model, batch if self._loss is None and isinstance(batch, Mapping) else inputs))

    def _parts(self, batch: Any) -> tuple[Any, Any]:
        """The inputs, and the target or None."""
        if isinstance(batch, Mapping):
            return {key: value for key, value in batch.items() if key != self._target}, batch.get(self._target)
        if isinstance(batch, tuple | list):
            return (batch[:-1], batch[-1]) if len(batch) > 1 else (batch, None)
        return batch, None


def scores(outputs: Any) -> Any:
    """What metrics and predictions are of: "logits" of a mapping that has them, else all of the output."""
    return outputs["logits"] if isinstance(outputs, Mapping) and "logits" in outputs else outputs


def _called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _own_loss(outputs: Any, model: nn.Module, batch: Any) -> Tensor:
    found = outputs
    if isinstance(outputs, Mapping):
        found = outputs.get("loss")
    elif isinstance(outputs, tuple | list) and outputs:
        found = outputs[0]
    if isinstance(found, Tensor) and found.dim() == 0:
        return found
    raise HookError(
        f"without loss= the model is to return its loss, and {type(model).__name__} returned none for a batch of "
        f"{_described(batch)}. Give loss=, a function of (outputs, targets); models of Hugging Face return theirs "
        'where the batch has "labels".'
    )


def _described(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"{type(batch).__name__} with {', '.join(map(repr, batch))}"
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return f"{type(batch).__name__} of {len(batch)}"
    return f"type {type(batch).__name__}"


def values_of(result: Tensor | Mapping[str, Any], name: str) -> dict[str, Any]:
    """What a step of the user's returned, as a dict with "loss".

    Raises:
        HookError: There is no loss in it.
    """
    if isinstance(result, Tensor):
        return {"loss": result}
    if isinstance(result, Mapping) and "loss" in result:
        return dict(result)
    raise HookError(f'{name} returned {_described(result)}. Return the loss, or a dict with "loss" and what to log.')
