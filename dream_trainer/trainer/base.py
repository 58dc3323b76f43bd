"""BaseTrainer: the loop, read top to bottom.

    launch -> configure -> setup -> resume -> sanity validation
    for each epoch: for each window of batches:
        to the device -> training_step (backward; step at the window's end) -> counters -> events
        -> log -> validation when due -> checkpoint when due; never inside a window

It calls hooks at named phases and defines none of them. Everything that ranks must decide alike (stop, save, validate
by the clock, the last window) is decided between windows, from numbers that are equal on all ranks: the pulse.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.data.nested import detach
from dream_trainer.data.stream import Window
from dream_trainer.distributed.relay import relayed
from dream_trainer.distributed.signals import exit_code, is_interactive
from dream_trainer.errors import HookError, StepError
from dream_trainer.modules.determinism import deterministic
from dream_trainer.modules.precision import float32_products
from dream_trainer.trainer.data_setup import follow_train_dataloader, steps_in_epoch
from dream_trainer.trainer.intermission import WINDOWS_WITHOUT_STEP
from dream_trainer.trainer.session import Session
from dream_trainer.trainer.step.nonfinite import RetryWindow
from dream_trainer.trainer.step.rerun import MovedByForward
from dream_trainer.trainer.watch import watched


class BaseTrainer(Session):
    """The training loop: accumulation, validation, limits, events, and agreement between ranks.

    Alone it trains a model that `setup` assigns, in one process. SetupMixin builds models and runs on many ranks.

    Example:
        ```python
        class Fit(BaseTrainer):
            def setup(self):
                self.model = nn.Linear(2, 1)
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

            def configure_dataloaders(self):
                return [(torch.randn(8, 2), torch.randn(8, 1)) for _ in range(4)], None

            def training_step(self, batch, batch_idx):
                x, y = batch
                loss = F.mse_loss(self.model(x), y)
                self.backward(loss)
                if not self.is_accumulating_gradients:
                    self.step(self.model, self.optimizer)
                return {"loss": loss}
        ```
    """

    _required_hooks: ClassVar[dict[str, str]] = {
        "training_step": "the loop calls it with each batch; run forward, self.backward(loss), self.step(...) there.",
        "configure_dataloaders": "the loop trains on what it returns; return (train_loader, val_loader or None).",
    }
    _config_class: ClassVar[type | None] = BaseTrainerConfig

    def __init__(self, config: BaseTrainerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._is_first_window = True
        # Optimizer steps that end an epoch whatever the data holds; None: the data's end does.
        self._epoch_limit = steps_in_epoch(config.training_parameters, None)

    # -- what the user calls

    def fit(self) -> None:
        """Trains until the first limit is reached, a stop is requested, or a signal comes.

        Launches and sets up on the first call. A finished run returns at once, and says so. Called again after an
        exception or Ctrl-C that the program outlived, it goes on after the last finished step.

        Raises:
            SystemExit: A signal ended the run: 128 + its number, or 0 under torchrun, which sets its own exit code. Not
                after Ctrl-C at a prompt or in a notebook, where `fit` saves and returns.
            StepError: The trainer is closed, or was left where no step was finished.
        """
        agreement = self._agreement
        agreement.begin_training()
        with self._failing_for_all(), agreement.signals.handled():
            self._start()
            self._go_on()
            with relayed(agreement.signals, self.world.connect_to_store()), watched(self):
                self._is_training = True
                self._train()
                self._is_training = False
            self._stop_reason = None
            returns = agreement.ended_by == signal.SIGINT and is_interactive() and self.world.world_size == 1
            if returns:
                print(f"interrupted after step {self.global_step}; fit() goes on from there", file=sys.stderr)
            elif agreement.ended_by is not None:
                with agreement.signals.ending(exit_code(agreement.ended_by)):
                    self.close()
        if agreement.ended_by is not None and not returns:
            raise SystemExit(exit_code(agreement.ended_by))

    def backward(
        self, loss: Tensor | None, *, weight: Tensor | float | None = None, model: nn.Module | None = None
    ) -> None:
        """Accumulates the gradients of `loss`. Use it instead of `loss.backward()`.

        Without `weight` each micro-batch counts alike: the step's gradient is the mean over the window's micro-batches
        and the data-parallel ranks. With it the gradient is `sum(weight_i * grad_i) / sum(weight_i)` over all
        micro-batches and ranks, exactly. Never waits for the device.

        Args:
            loss: Scalar; the micro-batch's mean. None: nothing to learn from this batch (one data-parallel rank only).
            weight: Number of tokens or samples the mean was taken over; a number or 0-dim tensor.
            model: Whose weight it is, where several models are trained with weights.

        Raises:
            StepError: Weighted and unweighted calls mix in one window, the call cannot be exact, or it added to
                gradients that the loss of another model, stepped since, has left (`frozen` keeps it from leaving any).
        """
        if not self._is_ready:
            raise StepError("backward() was called outside of training. Call it in training_step, under fit().")
        self._accumulation.backward(loss, weight, model)

    def forward_backward(
        self,
        model: nn.Module,
        inputs: tuple[Any, ...],
        loss_fn: Callable[[Any], Tensor],
        *,
        weight: Tensor | float | None = None,
    ) -> Tensor:
        """`loss = loss_fn(model(*inputs))`, then `backward(loss, weight=weight, model=model)`; returns the loss."""
        loss = loss_fn(model(*inputs))
        self.backward(loss, weight=weight, model=model)
        return loss

    def step(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        scheduler: Any | Sequence[Any] | None = None,
    ) -> Tensor:
        """Finishes the window: normalises, clips, applies the non-finite policy, steps, and zeroes the gradients.

        A second `step` of an optimizer in a window is of the last micro-batch alone, and normalised by it. At the end
        of the window no optimizer may be left with gradients that it has not stepped.

        Args:
            model: The model whose weights the window's `backward` calls gave.
            optimizer: One optimizer, or several that share one gradient norm.
            scheduler: One, or several, stepped after the optimizer, once per optimizer step.

        Returns:
            The gradient norm before clipping, over all these optimizers' parameters and ranks; a 0-dim device tensor.

        Raises:
            StepError: Called in the middle of an accumulation window.
            NonFiniteError: The norm is not finite and the policy says to raise.
        """
        if not self._is_ready:
            raise StepError("step() was called outside of training. Call it in training_step, under fit().")
        optimizers = (optimizer,) if isinstance(optimizer, Optimizer) else _several(model, optimizer)
        schedulers = () if scheduler is None else scheduler if isinstance(scheduler, list | tuple) else (scheduler,)
        return self._accumulation.step(model, optimizers, schedulers)

    # -- the loop

    def _train(self) -> None:
        agreement = self._agreement
        self._cadence.start(self.progress)
        agreement.exchange()  # a limit, signal or request may have come before the first step
        if self._is_done():
            if agreement.ended_by is not None:
                self._save_if_due(stepped=False, epoch_ended=False, is_last=True, requested=False)
                self._notify("on_interrupt")
            elif not agreement.stopped:
                self._say_that_it_is_finished()
            self._cadence.stop()
            return
        tf32 = float32_products(self.config.device_parameters, self.world.device, self._say_once)
        with deterministic(self.config.training_parameters.deterministic), tf32:
            self._validate_for_sanity()
            if not agreement.stopped:
                self._notify("pre_fit")
                self._note_weights()
                self._finish_what_is_owed()
                while not self._is_done():
                    self._train_epoch()
            self.settle()
        # A signal may have come to one rank after the ranks last spoke.
        agreement.exchange()
        self._cadence.stop()
        if agreement.ended_by is not None:
            self._notify("on_interrupt")
        self._notify("post_fit")

    def _train_epoch(self) -> None:
        self._notify("pre_epoch")
        follow_train_dataloader(self)
        is_over = self._epoch_limit == 0
        if is_over:
            self._end_epoch()
        while not is_over:
            window = self._agreed_window()
            if self._agreement.stopped:
                self._window_finished(is_last=True)
                self._save_if_due(stepped=False, epoch_ended=False, is_last=True, requested=False)
                return
            if window is None:  # a pass without a window; two in a row are an error
                continue
            self._run_window(window)
            is_over = self._window.epoch_ends
            if self._between_windows(epoch_ended=is_over):
                return

    def _agreed_window(self) -> Window | None:
        """The next window, when every rank holds its part of it and knows whether to go on.

        A save that was asked for is made here, with the same state on all ranks as after the last window.
        """
        agreement, feed = self._agreement, self._feed
        agreement.signals.wait_for_data(feed.fetch, self._save_while_waiting)
        if agreement.stopped:
            return None
        self._count_samples(feed.window)
        while True:
            flags = self._window.flags = agreement.exchange(samples=self._window.samples, short=feed.is_short)
            if agreement.stopped:
                return None
            if flags.save:
                self._save_if_due(stepped=False, epoch_ended=False, is_last=False, requested=True)
            if not flags.waiting:
                break
        if flags.short:
            feed.agree()
            self._count_samples(feed.window)
            samples = self.world.all_reduce(torch.tensor([self._window.samples])).item()
            self._window.flags = flags._replace(samples=int(samples))
        return feed.take()

    def _save_while_waiting(self) -> bool:
        """Answers a signal that asks for a save, from within the wait for data; returns whether to wait on."""
        flags = self._agreement.exchange(waiting=True)
        if flags.save and not self._agreement.stopped:
            self._save_if_due(stepped=False, epoch_ended=False, is_last=False, requested=True)
        return not self._agreement.stopped

    def _count_samples(self, window: Window | None) -> None:
        """What this rank adds to the count of a window's samples; of all ranks, where the stream can tell."""
        self._window.sizes, self._window.samples = None, 0
        if window is None:
            return
        if window.samples is not None:
            self._window.samples = window.samples
            return
        self._window.sizes = window.sizes
        if self._window.sizes is not None and self.world.counts_data:
            self._window.samples = sum(self._window.sizes)

    def _run_window(self, window: Window) -> None:
        """Trains one accumulation window and advances the counters."""
        self._window_started()
        if self.config.training_parameters.nonfinite != "retry":
            self._run_batches(window)
            return
        before = self.progress.batch_idx, self._window.local_batches
        moved = MovedByForward(self)
        while True:
            try:
                return self._run_batches(window)
            except RetryWindow:
                self.progress.batch_idx, self._window.local_batches = before
                moved.put_back()
                self._window_dropped()
                self._local_gradients.drop_what_waits()
                for optimizer in self.named_optimizers().values():
                    optimizer.zero_grad()

    def _run_batches(self, window: Window) -> None:
        accumulation, progress, device = self._accumulation, self.progress, self.world.device
        state = self._window
        before, after = self._events["pre_train_batch"], self._events["post_train_batch"]
        after_window, sizes = self._events["post_train_step"], state.sizes
        training_step = self._training_step
        accumulation.start_window(window.size, is_uneven=window.is_uneven)
        state.first_batch_idx = progress.batch_idx
        for index, batch in enumerate(window.batches, start=1):
            is_last = index == window.size
            batch_idx = progress.batch_idx
            batch = state.batch = self.move_batch(batch, device)
            state.batch_samples = None if sizes is None else sizes[index - 1]
            if is_last is not state.gradients_sync:
                self._sync_gradients(is_last)
                state.gradients_sync = is_last
            state.is_accumulating = not is_last
            accumulation.start_batch(is_last=is_last)
            for listener in before:
                listener(batch, batch_idx)
            result = training_step(batch, batch_idx)
            if not isinstance(result, dict):
                raise HookError(
                    f"training_step returned {type(result).__name__}. Return a dict of values to log; {{}} for none."
                )
            progress.batch_idx += 1
            state.local_batches += 1
            if is_last:
                self._complete_window(window)
            self._log_step("train", result, accumulation.batch_weight)
            if after:
                result = detach(result)
                for listener in after:
                    listener(result, batch_idx)
        for listener in after_window:
            listener()

    def _complete_window(self, window: Window) -> None:
        """The one place where completed work is counted, before anybody is told of it."""
        stepped = self._accumulation.finish_window()
        self._average_statistics()
        self._feed.trained(window)
        samples = self._window.samples if self._ranks_are_even else self._window.flags.samples
        self.progress.finish_window(stepped=stepped, samples=samples, end=window.end)
        self.progress.is_pass_over = self._feed.is_pass_over
        self._window.epoch_ends = self._epoch_is_over()
        self._note_what_follows(epoch_ended=self._window.epoch_ends)
        if not self._has_trained:
            if self._is_first_window:
                self._is_first_window = False
                self.world.first_step_is_done()
            self._has_stepped = self._has_stepped or stepped
            self._has_trained = self._accumulation.had_gradients
            if self.progress.epoch_steps % WINDOWS_WITHOUT_STEP == 0:
                self._say_if_nothing_is_trained()

    # -- when training ends

    def _epoch_is_over(self) -> bool:
        steps = self._epoch_limit
        return self._feed.is_pass_over if steps is None else self.progress.epoch_steps >= steps

    def _is_done(self) -> bool:
        return self._agreement.stopped or (
            self.progress.owed is None and self._limit_reached(epochs=self.current_epoch)
        )


def _several(model: Any, optimizers: Any) -> tuple[Optimizer, ...]:
    """The optimizers that `step` was given; raises StepError if it was given something else."""
    if isinstance(model, Optimizer) or not isinstance(optimizers, list | tuple):
        raise StepError(
            f"step() was called with ({type(model).__name__}, {type(optimizers).__name__}). Call "
            "self.step(model, optimizer), or with a list of optimizers."
        )
    return tuple(optimizers)
