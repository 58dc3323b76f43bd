"""How a model is called with a batch: what goes in, what is compared with it, and where the loss comes from.

A batch is a tuple or list `(*inputs, target)`, a mapping of keyword arguments, or a single input. Without a loss
function the model computes its loss, as those of Hugging Face do: it gets the whole batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer.errors import DataError, HookError
from dream_trainer.nested import leaves
from dream_trainer.simple.described import described
from dream_trainer.simple.given_loss import GivenLoss

Step = Callable[[nn.Module, Any], Tensor | Mapping[str, Any]]


class Forward(NamedTuple):
    """What one forward gave.

    Attributes:
        loss: The batch's; None where there is nothing to compare with.
        outputs: What the model returned.
        targets: What it should have; None if the batch has none.
        labels: What the loss is a mean of, if these are labels that count; None: samples.
    """

    loss: Tensor | None
    outputs: Any
    targets: Any
    labels: Tensor | None = None


class ModelCalls:
    """Calls a model with batches.

    Args:
        loss: Of `(outputs, targets)`; None: the model returns its loss.
        target: Name of the target in a batch that is a mapping.

    Attributes:
        loss: The same.
    """

    def __init__(self, loss: GivenLoss | None, target: str) -> None:
        self.loss, self._target = loss, target

    @property
    def returns_loss(self) -> bool:
        """Whether the model computes its loss."""
        return self.loss is None

    def forward(self, model: nn.Module, batch: Any) -> Forward:
        """One forward with its loss. What is raised in it tells of the batch.

        Raises:
            DataError: The batch has no target, and there is a loss function.
            HookError: The model returned no loss, and there is no loss function; or it does not take the batch.
        """
        inputs, targets = self._parts(batch)
        outputs = None
        try:
            if self.loss is None:
                outputs = _called(model, batch)
                return Forward(_own_loss(outputs, model, batch), outputs, targets)
            if targets is None:
                raise DataError(
                    f"loss= needs a target, and there is none in a batch of {described(batch)}. Yield (inputs, "
                    f"target), or a dict with {self._target!r} (target= names another), or give step=, a function of "
                    "(model, batch) that returns the loss."
                )
            outputs = _called(model, inputs)
            return Forward(self.loss(outputs, targets), outputs, targets, self.loss.labels_in(outputs, targets))
        except Exception as error:
            self._explain(error, model, batch, outputs)
            raise

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """What the model says of a batch, with or without its target."""
        inputs, _ = self._parts(batch)
        try:
            return scores(_called(model, batch if self.loss is None and isinstance(batch, Mapping) else inputs))
        except Exception as error:
            self._explain(error, model, batch, None)
            raise

    def _explain(self, error: Exception, model: nn.Module, batch: Any, outputs: Any) -> None:
        """Adds to an error of the model or the loss what there was to compute with.

        Raises:
            HookError: In its place, where the model does not take such a batch.
        """
        inputs = batch if self.loss is None else self._parts(batch)[0]
        if isinstance(error, TypeError) and outputs is None and not _takes(model, inputs):
            advice = (
                "Without loss= the model gets the whole batch and returns its loss: give loss=, a function of "
                "(outputs, targets)"
                if self.loss is None
                else "Leave the rest out of the batch"
            )
            raise HookError(
                f"{type(model).__name__}.forward({_arguments(model)}) cannot be called with {described(inputs)} of a "
                f"batch. {advice}, or step=, a function of (model, batch) that returns the loss."
            ) from error
        shown = "" if outputs is None else f", the model's outputs {described(outputs)}"
        first = next((parameter for parameter in model.parameters()), None)
        given = _of_numbers(inputs, model)
        is_of_type = outputs is None and ("type" in str(error) or "not implemented for" in str(error))
        if is_of_type and given is not None and first is not None and given.dtype != first.dtype:
            divided = ", and images divided by 255" if given.dtype is torch.uint8 else ""
            raise DataError(
                f"the inputs are {described(given)}, and the model's first parameter is {described(first.detach())}: "
                f"{error}. Give the inputs its type, such as x.to({first.dtype}){divided}."
            ) from error
        weights = "" if first is None else f"; its first parameter is {described(first.detach())}"
        error.add_note(f"The batch was {described(batch)}{shown}{weights}.")

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


def _takes(model: nn.Module, inputs: Any) -> bool:
    """Whether the model's forward can be called with them."""
    given, named = (), inputs
    if not isinstance(inputs, Mapping):
        given, named = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}
    try:
        inspect.signature(model.forward).bind(*given, **named)
    except TypeError:
        return False
    return True


def _of_numbers(inputs: Any, model: nn.Module) -> Tensor | None:
    """The first input that is to have the type of the parameters; whole numbers may be meant for an embedding."""
    tensors = [leaf for leaf in leaves(inputs) if isinstance(leaf, Tensor)]
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floats and any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in model.modules()):
        return None
    return next(iter(floats or tensors), None)


def _arguments(model: nn.Module) -> str:
    return ", ".join(inspect.signature(model.forward).parameters)


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
        f"{described(batch)}. Give loss=, a function of (outputs, targets); models of Hugging Face return theirs "
        'where the batch has "labels".'
    )


def values_of(result: Tensor | Mapping[str, Any], name: str) -> dict[str, Any]:
    """What a step of the user's returned, as a dict with "loss".

    Raises:
        HookError: There is no loss in it.
    """
    if isinstance(result, Tensor):
        return {"loss": result}
    if isinstance(result, Mapping) and "loss" in result:
        return dict(result)
    raise HookError(f'{name} returned {described(result)}. Return the loss, or a dict with "loss" and what to log.')
