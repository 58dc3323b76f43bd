"""How a model is called with a batch, `(*inputs, target)` or a mapping of keyword arguments: loss and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from dream_trainer.checks import check_choice, check_names
from dream_trainer.errors import ConfigError, DataError, HookError
from dream_trainer.nested import map_tensors
from dream_trainer.trainer.registry import is_metric

Step = Callable[[nn.Module, Any], Tensor | Mapping[str, Any]]
LossFunction = Callable[[Any, Any], Tensor]
LossName = Literal["cross_entropy", "binary_cross_entropy_with_logits", "nll", "mse", "mae", "huber"]

LOSSES: dict[str, LossFunction] = {
    "cross_entropy": F.cross_entropy,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "nll": F.nll_loss,
    "mse": F.mse_loss,
    "mae": F.l1_loss,
    "huber": F.huber_loss,
}
# Losses that broadcast (n, 1) against (n) to n * n elements.
_BY_ELEMENT = (
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.poisson_nll_loss, F.kl_div, F.hinge_embedding_loss),
    *(F.soft_margin_loss, F.multilabel_soft_margin_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss, nn.KLDivLoss, nn.HingeEmbeddingLoss),
    *(nn.SoftMarginLoss, nn.MultiLabelSoftMarginLoss, nn.BCELoss, nn.BCEWithLogitsLoss),
)
_OF_CLASSES = (F.cross_entropy, F.nll_loss)
IGNORED = -100  # target that PyTorch's losses of classes, and the models of Hugging Face, ignore


def shapes(value: Any) -> str:
    """A batch in a message: each tensor by its type and shape."""
    return str(map_tensors(lambda tensor: f"{tensor.dtype} {[*tensor.shape]}", value))


class Loss:
    """A loss function, which knows how many labels its mean is over; `module` is itself, or None for a function."""

    def __init__(self, given: LossFunction | str) -> None:
        if isinstance(given, str):
            check_choice("loss", given, LOSSES)
            given = LOSSES[given]
        self.module = given if isinstance(given, nn.Module) else None
        if self.module is not None and any(parameter.requires_grad for parameter in self.module.parameters()):
            raise ConfigError(
                f"loss={type(given).__name__} has parameters, which nothing would train. Make it a part of the model, "
                "which then returns its loss."
            )
        of_classes = given if isinstance(given, nn.CrossEntropyLoss | nn.NLLLoss) else None
        self.is_of_classes = given in _OF_CLASSES or of_classes is not None
        self.ignore_index = IGNORED if of_classes is None else of_classes.ignore_index
        if type(of_classes).__module__ != nn.CrossEntropyLoss.__module__ and "forward" in vars(type(of_classes)):
            of_classes = None  # a forward of the user's may be a mean of something else
        self._function: LossFunction = given
        self._of_classes = of_classes
        self._is_by_element = given in _BY_ELEMENT or type(given) in _BY_ELEMENT
        self._is_mean_of_labels = given in _OF_CLASSES if of_classes is None else of_classes.reduction == "mean"
        self._checks_classes = given in _OF_CLASSES or of_classes is not None  # at the first batch

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        if isinstance(targets, Tensor) and isinstance(outputs, Tensor):
            targets = self._fitting(outputs, targets)
        loss = self._function(outputs, targets)
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            raise HookError(f'loss= returned {shapes(loss)}, not a scalar. Use reduction="mean", or its mean().')
        return loss

    def labels_in(self, outputs: Any, targets: Any) -> Tensor | None:
        """The labels that the loss of a batch is a mean over, by the weights of their classes; None: its samples."""
        are_numbers = isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.shape != targets.shape
        if not self._is_mean_of_labels or not are_numbers:
            return None
        counts: Tensor = targets != self.ignore_index
        weight: Tensor | None = None if self._of_classes is None else self._of_classes.weight
        return counts.sum() if weight is None else (weight[targets.long() * counts] * counts).sum()

    def _fitting(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Whole numbers of any width as class numbers, or as numbers to compare with."""
        if targets.dim() == 0 or (self._is_by_element and outputs.shape != targets.shape):
            raise DataError(
                f"the outputs are {shapes(outputs)} and the targets {shapes(targets)}. loss= takes those of a batch, "
                "and compares element by element if they have one shape. Give targets[:, None], or batches instead of "
                "samples."
            )
        if self._is_by_element and not targets.is_floating_point() and outputs.is_floating_point():
            return targets.to(outputs.dtype)
        if not self.is_of_classes or targets.is_floating_point() or targets.shape == outputs.shape:
            return targets
        targets = targets.long()
        if self._checks_classes:  # a wrong number is an assert on an accelerator, which ends the process
            self._checks_classes = False
            counted, classes = targets[targets != self.ignore_index], outputs.shape[1]
            if counted.numel() and (counted.min() < 0 or counted.max() >= classes):
                raise DataError(
                    f"the targets go from {int(counted.min())} to {int(counted.max())}, and the model's outputs have "
                    f"{classes} classes. Count targets from 0 to {classes - 1}, or use {self.ignore_index} for those "
                    "that do not count, or give the model more outputs."
                )
        return targets


class ModelCalls:
    """Calls a model with batches; without a loss the model returns it. `target` is its name in a mapping."""

    def __init__(self, loss: Loss | None, target: str) -> None:
        self.loss, self._target = loss, target

    def forward(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any, Any, Tensor | None]:
        """The loss of a batch, what metrics get (outputs and targets), and the labels that the loss is a mean over."""
        inputs, targets = self._parts(batch)
        if self.loss is None:
            outputs = _called(model, batch)
            behind = [*outputs[1:2]] if isinstance(outputs, tuple | list) else []
            return _own_loss(outputs, model, batch), behind[0] if behind else scores(outputs), targets, None
        if targets is None:
            raise DataError(
                f"loss= needs a target, and there is none in a batch of {shapes(batch)}. Yield (inputs, target), or a "
                f"dict with {self._target!r} (target= names another), or give step=, a function of (model, batch)."
            )
        outputs = _called(model, inputs)
        return self.loss(outputs, targets), scores(outputs), targets, self.loss.labels_in(outputs, targets)

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """The model's outputs of a batch, with or without its target; half precision as float32, which numpy has."""
        is_whole = self.loss is None and isinstance(batch, Mapping)
        found = scores(_called(model, batch if is_whole else self._parts(batch)[0]))
        is_half = (torch.bfloat16, torch.float16)
        return map_tensors(lambda tensor: tensor.float() if tensor.dtype in is_half else tensor, found)

    def _parts(self, batch: Any) -> tuple[Any, Any]:
        if isinstance(batch, Mapping):
            return {key: value for key, value in batch.items() if key != self._target}, batch.get(self._target)
        if isinstance(batch, tuple | list):
            return (batch[:-1], batch[-1]) if len(batch) > 1 else (batch, None)
        return batch, None


def scores(outputs: Any) -> Any:
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
        f'{shapes(batch)}. Give loss=; models of Hugging Face return theirs if the batch has "labels".'
    )


def values_of(result: Tensor | Mapping[str, Any], name: str) -> dict[str, Any]:
    if isinstance(result, Tensor):
        return {"loss": result}
    if isinstance(result, Mapping) and "loss" in result:
        return dict(result)
    raise HookError(f'{name} returned {shapes(result)}. Return the loss, or a dict with "loss" and what to log.')


# -- metrics


def accuracy(outputs: Tensor, targets: Tensor, loss: Loss | None = None) -> tuple[Tensor, Tensor]:
    """Share of the labels that count whose class has the highest score, and how many these are."""
    # The classes are dimension 1 in PyTorch's losses, and the last one in models that return their loss.
    dims = (-1, 1) if loss is None else (1,) if loss.is_of_classes else (1, -1)
    for dim in dims:
        if outputs.dim() > 1 and outputs.shape[dim] > 1 and outputs.select(dim, 0).shape == targets.shape:
            counts = targets != (IGNORED if loss is None else loss.ignore_index)
            count = counts.sum()
            return ((outputs.argmax(dim) == targets) & counts).sum() / count, count
    raise DataError(
        f'metrics=["accuracy"] needs scores [batch, classes, ...] and targets [batch, ...], and got {shapes(outputs)} '
        f"and {shapes(targets)}. Give a function: metrics={{'accuracy': lambda outputs, targets: ...}}."
    )


METRICS: dict[str, Callable[[Any, Any], Any]] = {"accuracy": accuracy, "mse": Loss("mse"), "mae": Loss("mae")}


class Metrics:
    """A validation's named metrics: `functions` are averaged over samples, `objects` (torchmetrics) are updated."""

    def __init__(self, given: Iterable[str] | Mapping[str, Any]) -> None:
        self.functions: dict[str, Callable[[Any, Any], Any]] = {}
        self.objects: Any = None
        if is_metric(given) and isinstance(given, nn.ModuleDict):  # a collection
            self.objects = given
            return
        if not isinstance(given, Mapping):
            check_names("metrics", given, example="accuracy")
            for name in given:
                check_choice("metrics", name, METRICS)
            given = {name: METRICS[name] for name in given}
        objects: dict[str, Any] = {name: metric for name, metric in given.items() if is_metric(metric)}
        self.functions = {name: metric for name, metric in given.items() if name not in objects}
        if objects:
            from torchmetrics import MetricCollection

            self.objects = MetricCollection(objects, compute_groups=False)

    def measure(self, found: Any, targets: Any, loss: Loss | None) -> Iterator[tuple[str, Any, Tensor | None]]:
        """Name, value, and labels that it is a mean over (None: samples) of each function; objects are updated."""
        if self and (targets is None or (isinstance(found, Tensor) and found.dim() == 0)):
            raise HookError(
                f"metrics= need outputs and targets, and got {shapes(found)} and {shapes(targets)}. Give val_step=, a "
                "function of (model, batch) that returns a dict of values."
            )
        if self.objects is not None:
            self.objects.update(found, targets)
        for name, function in self.functions.items():
            if function is accuracy:
                yield name, *accuracy(found, targets, loss)
            else:
                yield name, function(found, targets), None

    def __bool__(self) -> bool:
        return bool(self.functions) or self.objects is not None
