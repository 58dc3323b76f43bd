"""What `loss=` may be: a function of (outputs, targets), a module, or a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from dream_trainer.errors import ConfigError, DataError, HookError
from dream_trainer.simple.described import described
from dream_trainer.simple.given_together import refuse_wrong_function
from dream_trainer.simple.nearest import nearest

LossFunction = Callable[[Any, Any], Tensor]
LossName = Literal["cross_entropy", "binary_cross_entropy_with_logits", "nll", "mse", "mae", "huber"]

NAMED: dict[str, LossFunction] = {
    "cross_entropy": F.cross_entropy,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "nll": F.nll_loss,
    "mse": F.mse_loss,
    "mae": F.l1_loss,
    "huber": F.huber_loss,
}
# Element by element; torch repeats outputs and targets along dimensions of one: (n, 1) with (n) would be n * n.
_BY_ELEMENT = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.poisson_nll_loss,
    F.kl_div,
    F.hinge_embedding_loss,
    F.soft_margin_loss,
    F.multilabel_soft_margin_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)
_BY_ELEMENT_MODULES = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.PoissonNLLLoss,
    nn.KLDivLoss,
    nn.HingeEmbeddingLoss,
    nn.SoftMarginLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
)
# Of scores for each class, and the number of the right one.
_OF_CLASSES = (F.cross_entropy, F.nll_loss)
_OF_CLASSES_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)
_FORWARDS_OF_CLASSES = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
# The target that torch's losses of classes, and so the models of Hugging Face, leave out.
IGNORED = -100


class GivenLoss:
    """A loss function that says what is wrong with what it gets.

    Args:
        given: A function of `(outputs, targets)`, a module, or a name.

    Attributes:
        module: The module, whose tensors belong on the device; None if it is none.
        ignore_index: The target that does not count.
        is_of_classes: Whether it is one of torch's of scores `[batch, classes, ...]`.

    Raises:
        ConfigError: It is not a loss, or has parameters of its own, which nobody would train.
    """

    def __init__(self, given: LossFunction | str) -> None:
        self.module = given if isinstance(given, nn.Module) else None
        if isinstance(given, type):
            raise ConfigError(f"loss={given.__name__} is a class. Give an object of it: loss={given.__name__}().")
        if self.module is not None and any(parameter.requires_grad for parameter in self.module.parameters()):
            raise ConfigError(
                f"loss= is a {type(given).__name__} with parameters of its own, which nothing would train or save. "
                "Make it a part of the model, which then returns its loss, and leave loss= out."
            )
        if isinstance(given, str):
            if given not in NAMED:
                near = nearest(given, get_args(LossName))
                raise ConfigError(f"loss={given!r} is not known. {near} Or give a function of (outputs, targets).")
            given = NAMED[given]
        refuse_wrong_function("loss", given, "outputs", "targets")
        self._function: LossFunction = given
        self._is_by_element = given in _BY_ELEMENT or isinstance(given, _BY_ELEMENT_MODULES)
        self.is_of_classes = given in _OF_CLASSES or isinstance(given, _OF_CLASSES_MODULES)
        self.ignore_index = given.ignore_index if isinstance(given, _OF_CLASSES_MODULES) else IGNORED
        # A subclass with a forward of its own may be a mean of something else.
        of_classes = None
        if isinstance(given, nn.CrossEntropyLoss | nn.NLLLoss) and type(given).forward in _FORWARDS_OF_CLASSES:
            of_classes = given
        self._of_classes = of_classes
        self._is_torchs_of_classes = given in _OF_CLASSES or of_classes is not None
        self._is_mean_of_labels = given in _OF_CLASSES if of_classes is None else of_classes.reduction == "mean"
        self._has_seen_labels = False

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The loss, a scalar.

        Raises:
            DataError: The targets have another shape than the outputs, are those of one sample, or numbers of classes
                that there are not.
            HookError: It is not a scalar.
        """
        if isinstance(targets, Tensor):
            if targets.dim() == 0:
                raise DataError(
                    "the target is a single number, so this is a sample and not a batch. Give train= a dataset or a "
                    "list of samples, which batch_size= makes batches of, and not a loader or generator of samples."
                )
            if self._is_by_element and isinstance(outputs, Tensor) and outputs.shape != targets.shape:
                raise DataError(
                    f"loss= compares element by element, and the outputs are {described(outputs)}, the targets "
                    f"{described(targets)}. Give them one shape: targets[:, None], or a loss of your own that does so."
                )
            if isinstance(outputs, Tensor):
                targets = self._of_fitting_type(outputs, targets)
                if self._is_torchs_of_classes:
                    self._refuse_other_shape(outputs, targets)
                    if not self._has_seen_labels:  # an accelerator would fail without a word, and for good
                        self._has_seen_labels = True
                        self._refuse_other_classes(outputs, targets)
        try:
            loss = self._function(outputs, targets)
        except IndexError:
            if self._is_torchs_of_classes:
                self._refuse_other_classes(outputs, targets)
            raise
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            raise HookError(f'loss= returned {described(loss)}, not a scalar. Use reduction="mean", or its mean().')
        return loss

    def labels_in(self, outputs: Any, targets: Any) -> Tensor | None:
        """What the loss of a batch is a mean of: its labels that count, by the weights of their classes; None: its
        samples. A tensor on their device, which nothing waits for."""
        are_numbers = isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.shape != targets.shape
        if not self._is_mean_of_labels or not are_numbers:
            return None
        counts: Tensor = targets != self.ignore_index
        weight: Tensor | None = None if self._of_classes is None else self._of_classes.weight
        if weight is None:
            return counts.sum()
        of_labels: Tensor = weight[targets.long() * counts] * counts
        return of_labels.sum()

    def _of_fitting_type(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Integers of any width as class numbers, and as numbers to compare with; what else is meant nobody knows."""
        is_whole = not targets.is_floating_point() and not targets.is_complex()
        if self._is_by_element and is_whole and outputs.is_floating_point():
            return targets.to(outputs.dtype)
        if not self.is_of_classes or targets.shape == outputs.shape:  # which are shares of each class
            return targets
        if is_whole:
            return targets.long()
        raise DataError(
            f"loss= takes the numbers of classes as integers, and the targets are {described(targets)}, the outputs "
            f"{described(outputs)}. Give targets.long(), or y.astype('int64') of numpy's arrays."
        )

    def _refuse_other_shape(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises DataError unless there is a class for each place, or a share of each class."""
        shape = [*outputs.shape[:1], *outputs.shape[2:]]
        is_one_hot = targets.shape == outputs.shape and not targets.is_floating_point()
        if outputs.dim() < 2 or [*targets.shape] == shape or (targets.shape == outputs.shape and not is_one_hot):
            return
        if is_one_hot:
            advice = "Give targets.argmax(1), or as shares of each class targets.float()."
        elif targets.dim() > 1 and [*targets.squeeze(1).shape] == shape:
            advice = "Give targets.squeeze(1)."
        else:
            advice = "Classes are dimension 1 of the outputs; where they are the last, use outputs.movedim(-1, 1)."
        raise DataError(
            f"loss= is of the numbers of classes, and the outputs are {described(outputs)}, so it takes targets "
            f"{shape}, and they are {described(targets)}. {advice}"
        )

    def _refuse_other_classes(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises DataError for numbers of classes that the outputs do not have."""
        if targets.is_floating_point() or outputs.dim() < 2:
            return
        counted = targets[targets != self.ignore_index]
        classes = outputs.shape[1]
        if counted.numel() == 0 or (counted.min() >= 0 and counted.max() < classes):
            return
        lowest, highest = int(counted.min()), int(counted.max())
        outputs_needed = f", or give the model outputs for {highest + 1} classes" if lowest >= 0 else ""
        raise DataError(
            f"the model's outputs have {classes} classes, whose numbers are 0 to {classes - 1}, or {self.ignore_index} "
            f"where none counts, and the targets go from {lowest} to {highest}. Count them from 0{outputs_needed}."
        )
