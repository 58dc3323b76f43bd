"""BaseTrainer: the loop, read top to bottom.

    launch -> configure -> setup -> resume -> sanity validation
    for each epoch: for each window of batches:
        to the device -> training_step (backward; step at the window's end) -> counters -> events
        -> log -> validation when due -> checkpoint when due; never inside a window

It calls hooks at named phases and defines none of them. Every decision that must be the same on all ranks (stop, save,
validate by the clock, the last window) is made between windows, from numbers that are equal on all ranks: the pulse. A
signal may end a validation, and an exception any phase: a checkpoint says what is left; a resumed run does it first.
"""

from __future__ import annotations

import copy
import math
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self, get_type_hints

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from dream_trainer.checkpoint.model_state import model_buffers, take_shapes
from dream_trainer.config.parameter_class import is_ours, own_annotations
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.data.feed import on_device
from dream_trainer.data.sample_count import whole_number
from dream_trainer.data.window import Window
from dream_trainer.distributed.seeds import random_state, set_random_state
from dream_trainer.distributed.signals import Interrupted, exit_code, is_interactive, may_be_restarted, relayed
from dream_trainer.distributed.watchdog import Watchdog
from dream_trainer.errors import ConfigError, DataError, HookError, StepError
from dream_trainer.events.collection import BaseCallback
from dream_trainer.events.sanity_checks import SanityChecks
from dream_trainer.modules.forward_state import ForwardState
from dream_trainer.modules.metrics import MetricStates
from dream_trainer.modules.precision import deterministic, float32_products
from dream_trainer.nested import detach
from dream_trainer.screen import show
from dream_trainer.trainer.abstract import AbstractTrainer
from dream_trainer.trainer.counters import UnfinishedWork
from dream_trainer.trainer.data_setup import follow_train_dataloader
from dream_trainer.trainer.event_table import anyone_listens, describe, listening_callbacks, tell_end
from dream_trainer.trainer.runtime import Runtime
from dream_trainer.trainer.session import Limits, failing_for_all, go_on, start
from dream_trainer.trainer.step.nonfinite import RetryWindow
from dream_trainer.trainer.validation import validate


class BaseTrainer(AbstractTrainer):
    """The training loop: accumulation, validation, limits, events, and agreement between ranks.

    By itself it trains a model that `setup` assigns, in one process. SetupMixin builds models and runs on many ranks.

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
                self.step(self.model, self.optimizer)
                return {"loss": loss}
        ```
    """

    _required_hooks: ClassVar[dict[str, str]] = {
        "training_step": "the loop calls it with each batch; run forward, self.backward(loss), self.step(...) there.",
        "configure_dataloaders": "the loop trains on what it returns; return (train_loader, val_loader or None).",
    }
    _config_class: ClassVar[type | None] = BaseTrainerConfig
    _default_callbacks: ClassVar[Sequence[type[BaseCallback]]] = (SanityChecks,)

    # -- called by the user

    @classmethod
    def from_cli(
        cls, config: BaseTrainerConfig | type[BaseTrainerConfig] | None = None, args: Sequence[str] | None = None
    ) -> Self:
        """Builds the trainer with a config from the command line, as `dream_trainer.parse` reads it.

        Args:
            config: Default values, or a class. None: the class in the trainer's annotation, `config: MyConfig`.
            args: The arguments. None takes the program's.

        Raises:
            ConfigError: The class statement has no config class.
            SystemExit: As raised by `parse`.
        """
        from dream_trainer.config.command_line import parse  # loads tyro

        named = config
        for part in cls.__mro__ if named is None else ():
            if "config" in own_annotations(part) and not is_ours(part):
                alone = {"__annotations__": {"config": own_annotations(part)["config"]}, "__module__": part.__module__}
                named = get_type_hints(type(part.__name__, (), alone))["config"]
                break
        if named is None:
            raise ConfigError(
                f"{cls.__name__}.from_cli() does not know which config to build. Write `config: MyConfig` in the "
                "class, or give one: from_cli(MyConfig)."
            )
        return cls(parse(named, args))

    def fit(self) -> None:
        """Trains until the first limit is reached, a stop is requested, or a signal comes.

        Launches and sets up on the first call. A finished run returns at once, with a message. Called again after an
        exception or Ctrl-C that did not end the program, it continues after the last finished step.

        Raises:
            SystemExit: A signal ended the run: 128 + its number, or 0 under torchrun (see `exit_status`). Not raised
                after Ctrl-C at a prompt or in a notebook, where `fit` saves and returns.
            StepError: The trainer is closed, or an exception left it in the middle of a step.
            CheckpointError: Another trainer of this process has trained the run on since this one did.
        """
        runtime, session, coordinator = self._runtime, self._runtime.session, self._runtime.coordinator
        coordinator.begin_training()
        with coordinator.signals.handled(), failing_for_all(runtime):
            start(runtime)
            go_on(runtime)
            with relayed(coordinator.signals, self.world.connect_to_store()), watched(runtime):
                session.is_training = True
                self._train()
                session.is_training = False
            coordinator.requests.stop_reason = None
            code = exit_status(runtime)
            returns = coordinator.ended_by == signal.SIGINT and is_interactive() and self.world.world_size == 1
            if returns:
                show(f"interrupted after step {self.global_step}; fit() continues from there", sys.stderr)
            elif coordinator.ended_by is not None:
                with coordinator.signals.ending(code):
                    self.close()
        if coordinator.ended_by is not None and not returns:
            raise SystemExit(code)

    def launch_and_resume(self) -> None:
        """Launches, sets up and resumes now, as the first `fit`, `evaluate`, `predict` or `export` does; once."""
        with failing_for_all(self._runtime):
            start(self._runtime)

    def fit_epoch(self) -> None:
        """Trains to the end of the running epoch, or the next one, regardless of limits; schedules stay as planned."""
        self.launch_and_resume()
        schedule, configured = self._runtime.schedule, self.config.training_parameters
        limits: Limits = dict.fromkeys(Limits.__annotations__)  # type: ignore[assignment]
        schedule.follow(replace(configured, **limits | {"n_epochs": self.current_epoch + 1}))
        try:
            self.fit()
        finally:
            schedule.follow(configured)

    def backward(
        self, loss: Tensor | None, *, weight: Tensor | float | None = None, model: nn.Module | None = None
    ) -> None:
        """Accumulates the gradients of `loss`. Use it instead of `loss.backward()`.

        Without `weight` all micro-batches count the same: the gradient is the mean over the window's micro-batches
        and the data-parallel ranks. With it the gradient is `sum(weight_i * grad_i) / sum(weight_i)` over all
        micro-batches and ranks, exactly. Never waits for the device.

        Args:
            loss: Scalar; the micro-batch's mean. None if this batch trains nothing (one data-parallel rank only).
            weight: Number of tokens or samples that the mean was computed over; a number or 0-dim tensor.
            model: The model that the weight belongs to, if several models are trained with weights.

        Raises:
            StepError: Weighted and unweighted calls are mixed in one window, or the call cannot be exact. Or it added
                to gradients that were left by the loss of another model, which has stepped since; `frozen` prevents it.
        """
        if not self._runtime.session.is_ready:
            raise StepError("backward() was called outside of training. Call it in training_step, under fit().")
        self._runtime.accumulation.backward(loss, weight, model)

    def step(
        self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], scheduler: Any | Sequence[Any] | None = None
    ) -> Tensor | None:
        """Finishes the window: normalises, clips, applies the non-finite policy, steps, and zeroes the gradients.

        Call it after each `backward`: before the window's last micro-batch it does nothing and returns None. A second
        `step` of an optimizer in a window uses the gradients of the last micro-batch only. At the end of the window no
        optimizer may have gradients that it has not stepped.

        Args:
            model: The model whose weights the window's `backward` calls gave.
            optimizer: One optimizer, or several that share one gradient norm.
            scheduler: One, or several, stepped after the optimizer, once per optimizer step.

        Returns:
            The gradient norm before clipping, over all these optimizers' parameters and ranks: a 0-dim device tensor.
            None while gradients are accumulated; nothing is logged for a None in the returned dict.

        Raises:
            StepError: Called outside training, or twice for an optimizer in a micro-batch before the last; or the
                step cannot be exact.
            NonFiniteError: The norm is not finite and the policy says to raise.
        """
        if not self._runtime.session.is_ready:
            raise StepError("step() was called outside of training. Call it in training_step, under fit().")
        if isinstance(model, Optimizer) or not isinstance(optimizer, Optimizer | list | tuple):
            raise StepError(
                f"step() was called with ({type(model).__name__}, {type(optimizer).__name__}). Call "
                "self.step(model, optimizer), or with a list of optimizers."
            )
        optimizers = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
        if not self._runtime.accumulation.is_last:
            self._runtime.accumulation.wait_for_last(optimizers)
            return None
        schedulers = () if scheduler is None else scheduler if isinstance(scheduler, list | tuple) else (scheduler,)
        optimizer_step = self._runtime.optimizer_step
        with self._runtime.outside_forward(), optimizer_step.context():
            return optimizer_step.step(model, optimizers, schedulers)

    def reduce_gradients(self, *optimizers: Optimizer) -> None:
        """Makes `p.grad` the gradient of the global batch now, for code that reads or changes it before `step`.

        In a window's last micro-batch, after its last `backward`; a collective. Until then the gradients of replicas,
        and of sharded models that are whole in steps, are this rank's own sums. `step` uses them as this code leaves
        them. For a second pass (SAM), drop them by `zero_grad()`, and call `backward` again.

        Args:
            *optimizers: All that will be stepped together.

        Raises:
            StepError: Called in the middle of an accumulation window, or after code has changed gradients.
        """
        if not self._runtime.session.is_ready:
            raise StepError("reduce_gradients() was called outside of training. Call it in training_step, under fit().")
        with self._runtime.outside_forward():
            self._runtime.optimizer_step.reduce_gradients(optimizers)

    def describe(self) -> str:
        """Prints and returns, as Markdown, the setup order and the listeners of each event. Works before launch."""
        text = describe(self._runtime)
        show(text)
        return text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, *_: object) -> None:
        world = self._runtime.launched
        if kind is None:
            self.close()
        elif world is not None and world.world_size > 1 and isinstance(exc, Exception):
            world.fail_unless_all_do(exc)
        elif world is not None and world.world_size == 1:
            self._runtime.session.has_failed |= issubclass(kind, Exception)
            self.close()

    # -- the loop

    def _train(self) -> None:
        runtime, coordinator, schedule = self._runtime, self._runtime.coordinator, self._runtime.schedule
        schedule.start()
        coordinator.exchange()  # a limit, signal or request may have come before the first step
        if self._is_done():
            if coordinator.ended_by is not None:
                _save_if_due(runtime, is_last=True)
                self._notify("on_interrupt")
            elif not coordinator.stopped:
                runtime.recorder.nothing_to_train(schedule.reached_limits())
            schedule.stop()
            return
        runtime.saver.begin_training()
        runtime.parallel.forget_whole()
        tf32 = float32_products(self.config.device_parameters, self.world.device, self.warn_once)
        with deterministic(self.config.training_parameters.deterministic), tf32:
            self._validate_for_sanity()
            if not coordinator.stopped:
                self._notify("pre_fit")
                # does what the last run could not do after its last window, because of a signal or an exception
                if self.global_step > 0:
                    self._window_finished(is_last=False)
                if self.progress.owed is not None:
                    self._conclude(self.progress.owed)
                while not self._is_done():
                    self._train_epoch()
            self.settle()
        # A signal may have come to one rank after the last exchange.
        coordinator.exchange()
        schedule.stop()
        if coordinator.ended_by is not None:
            self._notify("on_interrupt")
        self._notify("post_fit")
        if runtime.log is not None:
            runtime.log.fit_ended(self.global_step)

    def _train_epoch(self) -> None:
        runtime, progress = self._runtime, self._runtime.progress
        with keeping_state(runtime) if progress.epoch_steps > 0 else nullcontext():
            self._notify("pre_epoch")
        follow_train_dataloader(runtime)
        is_over = runtime.schedule.epoch_steps == 0
        if is_over:
            self._end_epoch()
        while not is_over:
            window = next_window(runtime)
            if runtime.coordinator.stopped:
                self._window_finished(is_last=True)
                _save_if_due(runtime, is_last=True)
                return
            if window is None:  # a pass without a window; two in a row are an error
                continue
            self._run_window(window)
            is_over = progress.owed is not None and progress.owed.epoch_ended
            if self._between_windows():
                return

    def _run_window(self, window: Window) -> None:
        runtime, progress, state = self._runtime, self._runtime.progress, self._runtime.window
        self._window_started()
        state.first_batch_idx, batches_before = progress.batch_idx, state.local_batches
        moved: list[ForwardState | MetricStates] = []  # by forwards: otherwise the window would count twice
        if self.config.training_parameters.on_nonfinite == "retry":
            models, metrics = runtime.registry.models().values(), runtime.registry.metrics().values()
            moved = [ForwardState(models), MetricStates(list(metrics))]
        while True:
            try:
                if not runtime.parallel.changes_in_steps:
                    return self._run_batches(window)
                with runtime.parallel.whole(stays_fresh=True):
                    return self._run_batches(window)
            except RetryWindow:
                progress.batch_idx, state.local_batches = state.first_batch_idx, batches_before
                for one in moved:
                    one.put_back()
                if runtime.log is not None:
                    runtime.log.training.window_dropped()
                runtime.parallel.drop_gradients()
                runtime.accumulation.forget_what_left()
                for optimizer in self.named_optimizers().values():
                    optimizer.zero_grad()

    def _run_batches(self, window: Window) -> None:
        runtime, progress = self._runtime, self._runtime.progress
        state, accumulation, device = runtime.window, runtime.accumulation, runtime.world.device
        before, after = runtime.events["pre_train_batch"], runtime.events["post_train_batch"]
        after_window, sizes = runtime.events["post_train_step"], state.sizes
        training_step, log = state.training_step, runtime.log
        accumulation.start_window(window.size, is_uneven=window.is_uneven)
        index = 0
        for batch in on_device(window.batches, self.move_batch, device, runtime.data.copy_stream):
            index += 1  # noqa: SIM113  # `enumerate` keeps a batch while the next but one is moved
            is_last = index == window.size
            batch_idx = progress.batch_idx
            state.batch = batch
            state.batch_samples = sizes[index - 1]
            if is_last is not state.gradients_sync:
                runtime.parallel.sync_gradients(is_last)
                state.gradients_sync = is_last
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
            if log is not None:
                log.batch_finished(result, accumulation.batch_weight, state.batch_samples)
            if after:
                result = detach(result)
                for listener in after:
                    listener(result, batch_idx)
            if not is_last:
                batch = state.batch = None  # the next but one takes its place on the device
        for listener in after_window:
            listener()

    def _complete_window(self, window: Window) -> None:
        """The one place where completed work is counted, before any listener is called."""
        runtime, progress = self._runtime, self._runtime.progress
        state, feed, schedule = runtime.window, runtime.data.feed, runtime.schedule
        stepped = runtime.accumulation.finish_window()
        runtime.optimizer_step.guard.settle_when_full()
        runtime.parallel.join_buffers()
        feed.trained(window)
        progress.finish_window(stepped=stepped, samples=state.samples, tokens=state.tokens, end=window.end)
        state.tokens = 0
        progress.is_pass_over = feed.is_pass_over
        # Work due after it is noted now, for a checkpoint that is saved before that.
        epoch_ended = schedule.epoch_is_over(is_pass_over=feed.is_pass_over)
        validates = bool(runtime.data.validation) and schedule.validation_is_due(
            stepped=stepped, epoch_ended=epoch_ended, by_the_clock=bool(state.flags.validate)
        )
        schedule.owe(stepped=stepped, epoch_ended=epoch_ended, validates=validates)
        if runtime.session.is_first_window:
            runtime.session.is_first_window = False
            runtime.world.first_step_is_done()

    # -- between two windows: log, validate, end the epoch, save; in this order, on all ranks

    def _between_windows(self) -> bool:
        """Does the work after the window just counted, and returns whether it was the last of the run."""
        owed, stepped = self.progress.owed, self._runtime.accumulation.stepped
        is_last = self._runtime.schedule.is_last_window()
        self._window_finished(is_last=is_last)
        if is_last or owed is not None:
            return self._conclude(owed or UnfinishedWork(stepped, epoch_ended=False, validates=False))
        _save_if_due(self._runtime, stepped=stepped)
        return False

    def _conclude(self, owed: UnfinishedWork) -> bool:
        runtime = self._runtime
        is_last = runtime.schedule.is_last_window()
        if owed.validates and not self._validate(stepped=owed.stepped, epoch_ended=owed.epoch_ended):
            return True
        if owed.epoch_ended:
            self._end_epoch()
        # Requests made in their events (early stopping) take effect now; so do those of the run's last window.
        runtime.coordinator.exchange()
        if runtime.coordinator.stopped and not is_last:
            is_last = True
            self._window_finished(is_last=True)
        _save_if_due(runtime, stepped=owed.stepped, epoch_ended=owed.epoch_ended, is_last=is_last)
        return is_last

    def _end_epoch(self) -> None:
        self.progress.finish_epoch()
        self.progress.owed = None
        tell_end(self._runtime, "post_epoch")

    def _validate(self, *, stepped: bool, epoch_ended: bool) -> bool:
        """Validates; returns False if a signal ended the run before the validation was finished."""
        runtime, schedule = self._runtime, self._runtime.schedule
        self.settle()
        if runtime.log is not None:
            runtime.log.land()
        coordinator, loaders = runtime.coordinator, runtime.data.validation
        while True:
            try:
                metrics = validate(runtime, loaders, schedule.validation_batches, hears_signals=True)
                break
            except Interrupted:
                for batches in loaders.values():
                    batches.close()  # its workers may be in a long task
                if coordinator.stopped:
                    self._window_finished(is_last=True)
                _save_if_due(runtime, is_last=coordinator.stopped)
                if coordinator.stopped:
                    return False
        schedule.owe(stepped=stepped, epoch_ended=epoch_ended, validates=False)
        schedule.validations.restart()
        step = runtime.progress.global_step
        runtime.best.validated(metrics, self._best_modes(), step)
        if runtime.log is not None:
            runtime.log.validated(metrics)
        runtime.saver.expect_best_metric(metrics)
        runtime.saver.validated(step, metrics)
        self._validated(metrics)
        tell_end(runtime, "post_val_epoch", metrics)
        return True

    def _validate_for_sanity(self) -> None:
        runtime = self._runtime
        batches = self.config.training_parameters.num_sanity_val_steps
        coordinator, loaders = runtime.coordinator, runtime.data.validation
        if not batches or not loaders or self.local_batches > 0:
            return
        runtime.state.is_sanity_validation = True
        try:
            metrics = validate(runtime, loaders, batches, hears_signals=True)
            runtime.saver.expect_best_metric(metrics)
            tell_end(runtime, "post_val_epoch", metrics)
        except Interrupted:
            _save_if_due(runtime, is_last=coordinator.stopped)
        finally:
            runtime.state.is_sanity_validation = False

    def _is_done(self) -> bool:
        return self._runtime.coordinator.stopped or self._runtime.schedule.is_finished()


# -- loads the next window while the ranks decide whether to train it, and counts its samples and tokens


def next_window(runtime: Runtime) -> Window | None:
    """The next window, once every rank has its part of it and knows whether to continue."""
    state, coordinator, feed = runtime.window, runtime.coordinator, runtime.data.feed
    coordinator.signals.wait_for_data(feed.fetch, partial(_save_while_waiting, runtime))
    if coordinator.stopped:
        return None
    samples, tokens = _count(runtime, feed.window)
    while True:
        flags = state.flags = coordinator.exchange(samples=samples, tokens=tokens, short=feed.is_short)
        if coordinator.stopped:
            return None
        if flags.save:
            _save_if_due(runtime)
        if not flags.waiting:
            break
    state.samples, state.tokens = flags.samples, flags.tokens
    if flags.short:
        feed.agree()
        state.samples, state.tokens = runtime.world.all_reduce(torch.tensor(_count(runtime, feed.window))).tolist()
    window = feed.take()
    if window is not None and window.samples is not None:
        state.samples = window.samples
    return window


def _save_while_waiting(runtime: Runtime) -> bool:
    """Answers a signal that asks for a save during the wait for data; returns whether to keep waiting."""
    flags = runtime.coordinator.exchange(waiting=True)
    if flags.save and not runtime.coordinator.stopped:
        _save_if_due(runtime)
    return not runtime.coordinator.stopped


def _save_if_due(runtime: Runtime, *, stepped: bool = False, epoch_ended: bool = False, is_last: bool = False) -> None:
    """Saves where a step or an epoch has ended, the run ends, or all ranks have heard of a request since the last."""
    progress, requested = runtime.progress, runtime.coordinator.requests.take_save()
    step, epoch = progress.global_step if stepped else None, progress.current_epoch if epoch_ended else None
    runtime.saver.save_if_due(step=step, epoch=epoch, is_last=is_last, requested=requested)


def _count(runtime: Runtime, window: Window | None) -> tuple[int, int]:
    """This rank's samples of a window, 0 if those of all ranks are known, and its tokens, where it counts them."""
    count, hooks, tokens = runtime.data.count, runtime.hooks, 0
    if window is None:
        sizes: list[int] = []
    elif count.own is not None:  # as the user counts them
        sizes = [count(batch) for batch in window.batches]
    else:
        assert window.sizes is not None  # a trainer's stream counts
        sizes = window.sizes
    runtime.window.sizes = sizes
    if window is None or not runtime.world.counts_samples:
        return 0, 0
    for batch in window.batches:
        of_batch = hooks.batch_tokens(batch)
        if of_batch is not None:
            tokens += whole_number(of_batch, f"{type(hooks).__name__}.batch_tokens", batch)
        elif runtime.schedule.max_tokens < math.inf:
            raise DataError(
                f"max_tokens={runtime.schedule.max_tokens}, and batch_tokens gives None for a batch of type "
                f"{type(batch).__name__}: it has no documents, attention_mask or labels on the host. Override "
                "batch_tokens(batch) in your trainer."
            )
    return sum(sizes) if window.samples is None else 0, tokens


def exit_status(runtime: Runtime) -> int:
    """0 if no signal has ended training; after SIGTERM a collective if a job has several hosts."""
    coordinator, world = runtime.coordinator, runtime.world
    number = coordinator.ended_by
    if number is None:
        return 0
    if number != signal.SIGTERM or world.n_hosts == 1 or not may_be_restarted():
        return exit_code(number)
    was_told = coordinator.requests.terminated and number not in coordinator.signals.relayed
    hosts = world.all_gather(torch.tensor([world.host_number if was_told else -1])).flatten().tolist()
    return exit_code(number, restart=world.host_number not in hosts)


@contextmanager
def watched(runtime: Runtime) -> Iterator[None]:
    """Ends the job, with every rank's stacks in `<run_dir>/stacks`, when training makes no progress inside."""
    devices, world = runtime.config.device_parameters, runtime.world
    if devices.hang_timeout_seconds is None:
        yield
        return
    after_start = devices.hang_timeout_seconds
    share = 0.9  # of the collectives' time-outs, so that stacks are written before them
    limit = share * devices.step_timeout_seconds if after_start == "auto" else after_start
    patient_limit = max(limit, share * devices.start_timeout_seconds)

    def where() -> str:
        phase = "training" if runtime.state.training else "validation"
        exchanges = runtime.coordinator.exchanges  # one before each window and at each validation batch
        alone = "" if world.forbidden is None else f", in {world.forbidden}"  # a collective there waits for ever
        stage = f", stage {world.stage_rank}" if world.stages > 1 else ""
        counted = f"step {runtime.progress.global_step}, batch {runtime.window.local_batches}, exchange {exchanges}"
        return f"{phase}, {counted}{stage}{alone}"

    runtime.session.watchdog = Watchdog(
        where,
        lambda: patient_limit if runtime.session.is_first_window else limit,
        patient_limit_seconds=patient_limit,
        directory=runtime.run_dir / "stacks",
        rank=world.rank,
        world_size=world.world_size,
        store=world.connect_to_store(),
    )
    try:
        with runtime.session.watchdog:
            yield
    finally:
        runtime.session.watchdog = None


@contextmanager
def keeping_state(runtime: Runtime) -> Iterator[None]:
    """Around a `pre_epoch` that is repeated in a resumed epoch: afterwards state that checkpoints have is as before."""
    if not anyone_listens(runtime, "pre_epoch"):
        yield
        return
    hooks, device, models = runtime.hooks, runtime.world.device, runtime.registry.models()
    callbacks = listening_callbacks(runtime, "pre_epoch")
    shared, of_rank, of_callbacks = copy.deepcopy(
        (hooks.state_dict(), hooks.rank_state_dict(), [callback.state_dict() for callback in callbacks])
    )

    def tensors() -> list[dict[str, Tensor]]:
        return [model_buffers(models), *(callback.checkpoint_tensors() for callback in callbacks)]

    before = [{name: tensor.detach().clone() for name, tensor in of_one.items()} for of_one in tensors()]
    random = random_state(device)
    yield
    set_random_state(*random, device)
    take_shapes(models, before[0], {name: value.shape for name, value in before[0].items()})
    for now, then in zip(tensors(), before, strict=True):
        for name in now.keys() & then.keys():
            now[name].detach().copy_(then[name])
    for callback, state in zip(callbacks, of_callbacks, strict=True):
        callback.load_state_dict(state)
    hooks.load_state_dict(shared)
    hooks.load_rank_state_dict(of_rank)
