"""AccumulationWindow: the callbacks' view of the micro-batches between two optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dream_trainer.data.window import Window
from dream_trainer.trainer.runtime import Runtime


class AccumulationWindow:
    """The window that runs, or ran last: `trainer.accumulation_window`. Nothing here waits for the device.

    Before training is set up there is none: nothing is open, and everything else is None or empty.
    """

    __slots__ = ("_runtime",)

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @property
    def is_open(self) -> bool:
        """Whether a window is running, whose gradients cannot be saved: not a moment to save, to load
        or to move averages. In `post_train_step` it is over."""
        return self._runtime.session.is_ready and self._runtime.accumulation.is_open

    @property
    def batch(self) -> Any:
        """The micro-batch that runs, or ran last, on the device."""
        return self._runtime.window.batch

    @property
    def weight(self) -> Tensor | float:
        """Weight of that micro-batch in logged means: that of `backward`, otherwise its samples on this rank. In
        `training_step` it may be set, such as to a number of labels if `backward` gets no weight."""
        weight = self._runtime.accumulation.batch_weight
        return self._runtime.window.batch_samples if weight is None else weight

    @weight.setter
    def weight(self, weight: Tensor | float) -> None:
        self._runtime.accumulation.batch_weight = weight

    @property
    def data(self) -> Window | None:
        """Its loaded data: the number of samples over all ranks, and the position in the data after it."""
        return self._runtime.data.feed.window if self._runtime.session.is_ready else None

    def indices(self, epoch: int, first: int, end: int) -> list[list[int]] | None:
        """This rank's batches of positions `first` to `end` of a pass over the data, each as its samples' indices in
        the dataset; None if only the loader knows."""
        stream = self._runtime.data.stream
        return None if stream is None else stream.indices(epoch, first, end)

    @property
    def step_was_skipped(self) -> Tensor | None:
        """In `post_optimizer_step`: a 0-dim device tensor, nonzero if the step did not change the weights. None if the
        step is known to have changed them. Listeners can act on the tensor without a host read."""
        return self._runtime.optimizer_step.maybe_skipped if self._runtime.session.is_ready else None

    @property
    def loss_scale(self) -> Tensor | None:
        """The loss multiplier under fp16: a 0-dim device tensor that changes in place; otherwise None."""
        scale = self._runtime.accumulation.loss_scale if self._runtime.session.is_ready else None
        return None if scale is None else scale.scale

    @property
    def losses(self) -> Sequence[Tensor]:
        """Losses given to `backward` in the micro-batch, detached; empty unless `watch` was called."""
        return (self._runtime.accumulation.losses or ()) if self._runtime.session.is_ready else ()

    def watch(self, left_out: Callable[[Optimizer], None]) -> None:
        """Keeps `losses` and reports skipped steps from now on to the end of the run; can be called from `pre_fit` on.

        Args:
            left_out: Called with each optimizer whose step the host skips since its gradients are not finite, while
                they still exist; `post_optimizer_step` is not called then.
        """
        accumulation = self._runtime.accumulation
        if accumulation.losses is None:
            accumulation.losses = []
        self.watch_skipped(left_out)

    def watch_skipped(self, left_out: Callable[[Optimizer], None]) -> None:
        """As `watch`, without keeping `losses`."""
        self._runtime.optimizer_step.watch_left_out(left_out)
