"""What `metrics=` may be: names, functions of (outputs, targets), and torchmetrics' objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer.best_value import mode_of
from dream_trainer.errors import ConfigError, DataError
from dream_trainer.modules.metrics import higher_is_better
from dream_trainer.simple.described import described
from dream_trainer.simple.given_loss import IGNORED, GivenLoss
from dream_trainer.simple.given_together import refuse_wrong_function
from dream_trainer.trainer.registry import is_metric


def accuracy(outputs: Tensor, targets: Tensor, loss: GivenLoss | None = None) -> tuple[Tensor, Tensor]:
    """Share of the labels that count whose class has the highest score, and how many these are.

    Args:
        outputs: Scores; the classes are dimension 1, as in torch's losses. Where a model returns its loss itself, and
            where dimension 1 does not fit a loss of the user's own, they are the last one.
        targets: Numbers of classes, shaped as `outputs` without the classes. Those that the loss ignores do not count.
        loss: The loss function; None: the model returns its loss.

    Raises:
        DataError: The shapes do not fit each other.
    """
    dims = (-1, 1) if loss is None else (1,) if loss.is_of_classes else (1, -1)
    for dim in dims:
        if outputs.dim() > 1 and outputs.shape[dim] > 1 and outputs.select(dim, 0).shape == targets.shape:
            counts = targets != (IGNORED if loss is None else loss.ignore_index)
            count = counts.sum()
            return ((outputs.argmax(dim) == targets) & counts).sum() / count, count
    last = "" if dims == (1,) else " or [batch, ..., 2 or more]"
    raise DataError(
        f'metrics=["accuracy"] is of scores [batch, 2 or more, ...]{last} and targets [batch, ...], and got '
        f"{tuple(outputs.shape)} and {tuple(targets.shape)}. Give a function: "
        "metrics={'accuracy': lambda outputs, targets: ...}."
    )


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error."""
    _refuse_other_shapes("mse", outputs, targets)
    return torch.nn.functional.mse_loss(outputs, targets)


def mae(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean absolute error."""
    _refuse_other_shapes("mae", outputs, targets)
    return torch.nn.functional.l1_loss(outputs, targets)


def _refuse_other_shapes(name: str, outputs: Tensor, targets: Tensor) -> None:
    """Raises ConfigError where torch would repeat one along the other: (n, 1) with (n) would be n * n."""
    if outputs.shape != targets.shape:
        raise ConfigError(
            f"metrics=[{name!r}] compares element by element, and got outputs {tuple(outputs.shape)} and targets "
            f"{tuple(targets.shape)}. Give them one shape, or a function: metrics={{{name!r}: lambda outputs, targets: "
            "...}."
        )


NAMED: dict[str, Callable[[Any, Any], Any]] = {"accuracy": accuracy, "mse": mse, "mae": mae}


class GivenMetrics:
    """Metrics of a validation, by name.

    Args:
        given: Names, or a dict of functions and torchmetrics' objects, or a collection of theirs.
        of: The model, where it returns its loss itself.

    Attributes:
        functions: Those whose values are averaged over samples.
        objects: Those of torchmetrics, which are updated; None if there are none.

    Raises:
        ConfigError: A name is not known, something is no metric, or an accuracy is asked of a model that shifts its
            labels.
    """

    def __init__(self, given: Iterable[str] | Mapping[str, Any], of: nn.Module | None = None) -> None:
        self.functions: dict[str, Callable[[Any, Any], Any]] = {}
        self.objects: Any = None
        if is_metric(given) and isinstance(given, nn.ModuleDict):  # a collection
            self.objects = given
            return
        if isinstance(given, str) or callable(given):
            raise ConfigError(f"metrics={given!r} has no name for it. Use a dict: metrics={{'name': metric}}.")
        by_name: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {name: _named(name) for name in given}
        objects: dict[str, Any] = {name: metric for name, metric in by_name.items() if is_metric(metric)}
        if objects:
            from torchmetrics import MetricCollection

            self.objects = MetricCollection(objects, compute_groups=False)
        for name, metric in by_name.items():
            if name not in objects:
                refuse_wrong_function(f"metrics[{name!r}]", metric, "outputs", "targets")
                self.functions[name] = metric
        if accuracy in self.functions.values():
            _refuse_shifted_labels(of)

    def better(self, metric: str, *, named_by: str, set_by: str) -> Literal["min", "max"]:
        """Whether lower or higher values of a validation's metric, such as "val/accuracy", are better.

        Args:
            metric: Its name.
            named_by: The argument that names it, for the error.
            set_by: The one that would say which is better.

        Raises:
            ConfigError: Nobody knows.
        """
        known = None if self.objects is None else higher_is_better({"": self.objects}, metric)
        return mode_of(metric, None, higher_is_better=known, named_by=named_by, set_by=set_by)

    @property
    def names(self) -> list[str]:
        """What is measured, sorted."""
        objects = [] if self.objects is None else [str(name) for name in self.objects]
        return sorted([*self.functions, *objects])

    def value(self, name: str, outputs: Any, targets: Any, loss: GivenLoss | None) -> tuple[Any, Tensor | None]:
        """What one of the functions says, and the labels it is of; None: it is of samples.

        What is raised in it tells of its arguments.
        """
        function = self.functions[name]
        with telling_of(f"metrics[{name!r}]", outputs, targets):
            if function is accuracy:
                return accuracy(outputs, targets, loss)
            return function(outputs, targets), None

    def __bool__(self) -> bool:
        return bool(self.functions) or self.objects is not None


@contextmanager
def telling_of(what: str, outputs: Any, targets: Any) -> Iterator[None]:
    """Adds to an error inside what was called with which outputs and targets."""
    try:
        yield
    except Exception as error:
        error.add_note(f"{what} was called with outputs {described(outputs)} and targets {described(targets)}.")
        raise


def _refuse_shifted_labels(model: nn.Module | None) -> None:
    """Raises ConfigError for a causal model of Hugging Face's kind, by the name of its class."""
    if any(cls.__name__.endswith(("ForCausalLM", "LMHeadModel")) for cls in type(model).__mro__):
        raise ConfigError(
            f'metrics=["accuracy"] of {type(model).__name__}, which by its name shifts its labels by one inside: the '
            "scores at a place are of the next token. Give a function that does so: metrics={'accuracy': lambda "
            "outputs, targets: (outputs[:, :-1].argmax(-1) == targets[:, 1:]).float().mean()}."
        )


def _named(name: Any) -> Callable[[Any, Any], Any]:
    if name not in NAMED:
        raise ConfigError(
            f"metrics has {name!r}. Of names there are {', '.join(NAMED)}; give any other as a dict: "
            "metrics={'f1': torchmetrics.F1Score(...)}, or a function of (outputs, targets)."
        )
    return NAMED[name]
