"""Session: how a trainer begins and ends. It launches, sets up and resumes once, ends all ranks' work, and closes."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NoReturn

from dream_trainer.cleanup import call_each, followed_by, in_a_line
from dream_trainer.compat.pytorch import enable_flight_recorder
from dream_trainer.config.trainer_config import let_go
from dream_trainer.distributed.lost_ranks import is_lost_connection
from dream_trainer.distributed.seeds import hash_seed, seed_everything
from dream_trainer.distributed.world import World, choose_device, close_at_exit, environment_ranks
from dream_trainer.errors import ConfigError, NonFiniteError, StepError
from dream_trainer.trainer.data_setup import connect_data
from dream_trainer.trainer.event_table import event_table, heard_of
from dream_trainer.trainer.prefetcher import Prefetcher
from dream_trainer.trainer.rank_differences import refuse_different_configs
from dream_trainer.trainer.step.accumulation import Accumulation
from dream_trainer.trainer.step.nonfinite import NonFiniteGuard
from dream_trainer.trainer.step.optimizer_step import OptimizerStep
from dream_trainer.trainer.user_class.class_checks import uncalled_hooks, uncalled_methods

if TYPE_CHECKING:
    from dream_trainer.distributed.watchdog import Watchdog
    from dream_trainer.trainer.abstract import AbstractTrainer


class Session:
    def __init__(self, trainer: AbstractTrainer) -> None:
        self._trainer = trainer
        self.is_ready = self.is_training = self.has_failed = False
        self.is_first_window = True  # whether no window was trained yet in this process
        self.watchdog: Watchdog | None = None  # while `fit` is in its loop
        self._is_closed = self._is_half_set_up = False
        self._is_nonfinite = False  # whether it failed because of that

    # -- begins

    def start(self) -> None:
        trainer = self._trainer
        if self._is_closed or self._is_half_set_up:
            self._refuse_to_go_on("closed" if self._is_closed else "left half set up by an exception")
        if not self.is_ready:
            try:
                self._launch_and_set_up()
            except BaseException:
                self.has_failed = self._is_half_set_up = True
                raise
        if not self.is_training:  # in a notebook the user may have redefined a step since the last call
            trainer._window.training_step = trainer._wrap_step(trainer.training_step)
            trainer._window.validation_step = trainer._wrap_step(trainer.validation_step)

    def _launch_and_set_up(self) -> None:
        trainer = self._trainer
        trainer._notify("pre_launch")
        launch(trainer)
        trainer._notify("post_launch")
        trainer._notify("pre_configure")
        trainer.configure()
        trainer._notify("post_configure")
        trainer._notify("pre_setup")
        trainer.setup()
        if trainer._data.stream is None:
            for model in trainer.named_models().values():
                model.to(trainer.world.device)
            connect_data(trainer)
        trainer._registry.refuse_closures()
        trainer._data.open_feed(trainer.world, trainer.accumulation_steps)
        _build_step(trainer)
        trainer._rates.note_built()
        self.is_ready = True  # whether it has launched and set up
        trainer._finish_setup()
        _build_coordination(trainer)
        trainer._notify("post_setup")
        # Layers draw different numbers on each rank with data of its own; a resume replaces this by each rank's state.
        seed_everything(hash_seed(b"rank", trainer.config.seed, trainer.world.data_rank))
        trainer._resume()
        trainer._unloaded_bases.warn(trainer)

    def go_on(self) -> None:
        """After an exception, or a signal that ended a wait for data: back to the end of the last finished window."""
        trainer = self._trainer
        if self.has_failed:
            if self._is_nonfinite:
                self._refuse_to_go_on("left by gradients that were not finite, and later steps changed nothing")
            if trainer._accumulation.is_open:
                self._refuse_to_go_on("left in the middle of a step by an exception")
            for model in trainer.named_models().values():
                model.zero_grad(set_to_none=True)
            trainer._parallel.drop_gradients()
        signals = trainer._coordinator.signals
        if self.has_failed or signals.broke_a_wait:
            feed, progress = trainer._data.feed, trainer.progress
            feed.seek(
                progress.data,
                feed.rank_state,
                is_pass_over=progress.is_pass_over,
                state=feed.state_at(progress.data),
            )
        self.has_failed = signals.broke_a_wait = False

    def _refuse_to_go_on(self, state: str) -> NoReturn:
        raise StepError(f"this trainer is {state}. Build a new one to train on; it resumes from the checkpoints.")

    def patience(self) -> AbstractContextManager[None]:
        """For phases without batches that may take long: the watchdog gives them more time."""
        return nullcontext() if self.watchdog is None else self.watchdog.patient()

    # -- fails

    @contextmanager
    def failing_for_all(self) -> Iterator[None]:
        """Turns an exception on this rank into the end of the job; refused where only one rank runs."""
        trainer = self._trainer
        if trainer._world is not None:
            trainer._world.refuse_if_forbidden()
        is_inside_fit = self.is_training and not self.has_failed
        try:
            yield
        except BaseException as exc:
            if is_inside_fit and trainer._world is not None and trainer._world.world_size == 1:
                raise  # a callback may catch it; if none does, `fit` comes here
            # Outside of training nothing is left that disturbs later calls: an evaluation restores everything.
            self.has_failed |= self.is_training
            try:
                self._tell_of(exc)
            finally:
                if trainer._world is not None and trainer._world.world_size > 1:
                    trainer._world.fail(exc)
                if self.is_training:
                    self._leave_training(exc)
            raise

    def _leave_training(self, exc: BaseException) -> None:
        """In a world of one: drops a window that was interrupted, and saves the last finished step."""
        trainer = self._trainer
        self._is_nonfinite |= isinstance(exc, NonFiniteError)
        if trainer._accumulation.is_open:
            trainer.progress.batch_idx = trainer._window.first_batch_idx
            trainer._window_dropped()
            trainer._accumulation.drop_window()
        is_whole = not trainer._accumulation.is_open
        if isinstance(exc, Exception) and is_whole and trainer.global_step > 0:
            trainer._saver.save_after_exception(trainer.global_step)
        self.is_training = False  # whether `fit` is in its loop

    def _tell_of(self, exc: BaseException) -> None:
        """Calls all listeners to `on_exception`, even if some of them fail: most release something there."""
        for listener in self._trainer._events["on_exception"]:
            try:
                listener(exc)
            except Exception as later:
                exc.add_note(f"on_exception failed after this: {in_a_line(later)}")

    # -- ends

    def leave(self, kind: type[BaseException] | None, exc: BaseException | None) -> None:
        """The end of a `with`, which an exception may have caused."""
        world = self._trainer._world
        if kind is None:
            self._trainer.close()
        elif world is not None and world.world_size > 1 and isinstance(exc, Exception):
            world.fail_unless_all_do(exc)
        elif world is not None and world.world_size == 1:
            self.has_failed |= issubclass(kind, Exception)
            self._trainer.close()

    def close(self) -> None:
        trainer = self._trainer
        world = trainer._world
        let_go(trainer.config, trainer)
        if self._is_closed or world is None:
            return
        self._is_closed, has_failed = True, self.has_failed
        try:
            with self.failing_for_all(), followed_by(trainer._data.close), followed_by(trainer._close):
                call_each(trainer._events["teardown"])
        except Exception as error:
            if not has_failed:
                raise
            trainer.warn_once(in_a_line(error), f"the trainer could not be closed: {in_a_line(error)}")
        try:
            world.close()
        except RuntimeError as error:
            if is_lost_connection(error):
                world.fail(error)
            raise


def _build_step(trainer: AbstractTrainer) -> None:
    config, world, registry, parallel = trainer.config, trainer.world, trainer._registry, trainer._parallel
    accumulation = Accumulation(config.device_parameters, world, registry, parallel, trainer.warn_once)
    loss_scale = accumulation.loss_scale
    guard = NonFiniteGuard(config.training_parameters, world, trainer.progress, loss_scale, trainer.warn_once)
    before, after = heard_of(trainer, "pre_optimizer_step"), heard_of(trainer, "post_optimizer_step")
    trainer._accumulation = accumulation
    trainer._optimizer_step = OptimizerStep(
        config, world, registry, parallel, accumulation, guard, before=before, after=after
    )


def _build_coordination(trainer: AbstractTrainer) -> None:
    world, saver, coordinator = trainer.world, trainer._saver, trainer._coordinator
    coordinator.begin(world, saver, trainer._parallel.gradients, trainer.callbacks)
    trainer._prefetcher = Prefetcher(
        coordinator,
        world,
        saver,
        trainer._window,
        trainer._data.count,
        (trainer.batch_tokens, f"{type(trainer).__name__}.batch_tokens"),
        trainer._schedule,
    )


def launch(trainer: AbstractTrainer) -> None:
    """Gives `trainer` its world and the event table of its rank, and seeds all generators, the same on all ranks."""
    cls = type(trainer)
    _record_collectives(trainer)
    world = trainer._world = trainer._coordinator.world = World(
        trainer.config.device_parameters, shard_by_default=cls._shards_parameters, workers=trainer._workers
    )
    if world.world_size > 1 and not cls._keeps_ranks_equal:
        raise ConfigError(
            f"{cls.__name__} runs on {world.world_size} ranks, but nothing in it keeps them equal. "
            "Add SetupMixin to the trainer (and SetupConfigMixin to its config), or start one process."
        )
    if world.world_size == 1:
        atexit.register(_close_if_alive, weakref.ref(trainer))
    else:
        close_at_exit(world)
    reference = weakref.ref(trainer)
    world.tell_where(lambda: _where(reference))
    refuse_different_configs(trainer)
    for hook in uncalled_hooks(cls):
        trainer.warn_once(hook, f"{cls.__name__}.{hook} is never called: only SetupMixin does. Add SetupMixin.")
    for message in uncalled_methods(trainer):
        trainer.warn_once(message, message)
    trainer._events = event_table(trainer, is_main=world.is_main)
    seed_everything(hash_seed(b"setup", trainer.config.seed))


def _record_collectives(trainer: AbstractTrainer) -> None:
    """Has NCCL write down its last collectives when one times out; its groups read that as they are made."""
    _, local_rank, world_size = environment_ranks()
    device = trainer.config.device_parameters.device
    if world_size > 1 and choose_device(device, local_rank).type == "cuda":
        enable_flight_recorder(trainer.run_dir / "flight_recorder")


def _where(reference: weakref.ref[AbstractTrainer]) -> str:
    trainer = reference()
    return "the end" if trainer is None else f"step {trainer.global_step}"


def _close_if_alive(reference: weakref.ref[AbstractTrainer]) -> None:
    trainer = reference()
    if trainer is not None:
        trainer.close()
