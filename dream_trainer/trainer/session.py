"""How a trainer begins and ends: it launches, sets up and resumes once, ends all ranks' work, and closes. Between two
calls of `fit` limits may change: the run continues like a restart with the new ones."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn, TypedDict

from dream_trainer.compat.pytorch import enable_flight_recorder
from dream_trainer.config.checkpoint_parameters import ALL_KEPT
from dream_trainer.config.trainer_config import change_training_parameters, let_go
from dream_trainer.distributed.job import is_lost_connection
from dream_trainer.distributed.ranks import refuse_differences
from dream_trainer.distributed.seeds import hash_seed, seed_everything
from dream_trainer.distributed.world import choose_device, close_at_exit, environment_ranks
from dream_trainer.errors import ConfigError, NonFiniteError, StepError, call_each, followed_by, in_a_line
from dream_trainer.events.collection import Timed
from dream_trainer.optim.learning_rates import TokenLR
from dream_trainer.screen import logger
from dream_trainer.trainer.data_setup import connect_data, planned_steps
from dream_trainer.trainer.event_table import anyone_listens, event_table, notify
from dream_trainer.trainer.rank_differences import refuse_different_configs
from dream_trainer.trainer.resumed_rates import copied, set_rate
from dream_trainer.trainer.runtime import Runtime
from dream_trainer.trainer.step.accumulation import Accumulation
from dream_trainer.trainer.step.nonfinite import NonFiniteGuard
from dream_trainer.trainer.step.optimizer_step import OptimizerStep
from dream_trainer.trainer.user_class import uncalled_hooks
from dream_trainer.weights.first_values import warn_of_unloaded_bases


def start(runtime: Runtime) -> None:
    session = runtime.session
    if session.is_closed or session.is_half_set_up:
        _refuse_to_go_on("closed" if session.is_closed else "left half set up by an exception")
    if not session.is_ready:
        try:
            _launch_and_set_up(runtime)
        except BaseException:
            session.has_failed = session.is_half_set_up = True
            raise
    if not session.is_training:  # in a notebook the user may have redefined a step since the last call
        runtime.window.training_step = runtime.hooks._wrap_step(runtime.hooks.training_step)
        runtime.window.validation_step = runtime.hooks._wrap_step(runtime.hooks.validation_step)


def _launch_and_set_up(runtime: Runtime) -> None:
    notify(runtime, "pre_launch")
    launch(runtime)
    notify(runtime, "post_launch")
    notify(runtime, "pre_configure")
    runtime.hooks.configure()
    notify(runtime, "post_configure")
    notify(runtime, "pre_setup")
    runtime.hooks.setup()
    if runtime.data.stream is None:
        for model in runtime.registry.models().values():
            model.to(runtime.world.device)
        connect_data(runtime)
    _build_step(runtime)
    runtime.rates.note_built()
    runtime.session.is_ready = True
    runtime.hooks._finish_setup()
    timed = [callback for callback in runtime.config.callbacks if isinstance(callback, Timed)]
    runtime.coordinator.begin(runtime.world, runtime.saver, runtime.parallel.gradients, timed)
    notify(runtime, "post_setup")
    # Layers draw different numbers on each data-parallel rank; a resume replaces this by each rank's saved state.
    seed_everything(hash_seed(b"rank", runtime.config.seed, runtime.world.data_rank))
    runtime.session.is_resumed = True
    runtime.hooks._resume()
    registry = runtime.registry
    warn_of_unloaded_bases(runtime.frozen_draws, registry.models(), registry.optimizers().values(), runtime.warn_once)
    runtime.frozen_draws.clear()


def go_on(runtime: Runtime) -> None:
    """After an exception, or a signal that ended a wait for data: back to the end of the last finished window."""
    session = runtime.session
    if session.has_failed:
        if session.is_nonfinite:
            _refuse_to_go_on("left by gradients that were not finite, and later steps changed nothing")
        if runtime.accumulation.is_open:
            _refuse_to_go_on("left in the middle of a step by an exception")
        for model in runtime.registry.models().values():
            model.zero_grad(set_to_none=True)
        runtime.parallel.drop_gradients()
    signals = runtime.coordinator.signals
    if session.has_failed or signals.broke_a_wait:
        feed, progress = runtime.data.feed, runtime.progress
        state = feed.state_at(progress.data)
        feed.seek(progress.data, feed.rank_state, is_pass_over=progress.is_pass_over, state=state)
    session.has_failed = signals.broke_a_wait = False


def _refuse_to_go_on(state: str) -> NoReturn:
    raise StepError(f"this trainer is {state}. Build a new one to train on; it resumes from the checkpoints.")


@contextmanager
def failing_for_all(runtime: Runtime) -> Iterator[None]:
    """Turns an exception on this rank into the end of the job; refused where only one rank runs."""
    session = runtime.session
    if runtime.launched is not None:
        runtime.launched.refuse_if_forbidden()
    is_inside_fit = session.is_training and not session.has_failed
    try:
        yield
    except BaseException as exc:
        if is_inside_fit and runtime.launched is not None and runtime.launched.world_size == 1:
            raise  # a callback may catch it; if none does, `fit` comes here
        # Outside training nothing is left that disturbs later calls: an evaluation restores everything.
        session.has_failed |= session.is_training
        try:
            # calls all listeners to `on_exception`, even if some of them fail: most release something there
            for listener in runtime.events["on_exception"]:
                try:
                    listener(exc)
                except Exception as later:
                    exc.add_note(f"on_exception failed after this: {in_a_line(later)}")
        finally:
            if runtime.launched is not None and runtime.launched.world_size > 1:
                runtime.launched.fail(exc)
            if session.is_training:
                _leave_training(runtime, exc)
        raise


def _leave_training(runtime: Runtime, exc: BaseException) -> None:
    """In a world of one: drops a window that was interrupted, and saves the last finished step."""
    runtime.session.is_nonfinite |= isinstance(exc, NonFiniteError)
    if runtime.accumulation.is_open:
        runtime.progress.batch_idx = runtime.window.first_batch_idx
        if runtime.log is not None:
            runtime.log.training.window_dropped()
        runtime.accumulation.drop_window()
    if isinstance(exc, Exception) and not runtime.accumulation.is_open and runtime.progress.global_step > 0:
        runtime.saver.save_after_exception(runtime.progress.global_step)
    runtime.session.is_training = False


def close(runtime: Runtime) -> None:
    session, world = runtime.session, runtime.launched
    let_go(runtime.config, runtime)
    if session.is_closed or world is None:
        return
    session.is_closed, has_failed = True, session.has_failed
    try:
        with failing_for_all(runtime), followed_by(runtime.data.close), followed_by(runtime.hooks._close):
            call_each(runtime.events["teardown"])
    except Exception as error:
        if not has_failed:
            raise
        runtime.warn_once(in_a_line(error), f"the trainer could not be closed: {in_a_line(error)}")
    try:
        world.close()
    except RuntimeError as error:
        if is_lost_connection(error):
            world.fail(error)
        raise


def _build_step(runtime: Runtime) -> None:
    config, world, registry, parallel = runtime.config, runtime.world, runtime.registry, runtime.parallel
    accumulation = Accumulation(config.device_parameters, world, registry, parallel, runtime.warn_once)
    loss_scale = accumulation.loss_scale
    guard = NonFiniteGuard(config.training_parameters, world, runtime.progress, loss_scale, runtime.warn_once)
    runtime.accumulation = accumulation
    runtime.optimizer_step = OptimizerStep(
        config.training_parameters,
        config.device_parameters,
        world,
        registry,
        parallel,
        accumulation,
        guard,
        before=runtime.events["pre_optimizer_step"],
        after=runtime.events["post_optimizer_step"],
        is_heard=(anyone_listens(runtime, "pre_optimizer_step"), anyone_listens(runtime, "post_optimizer_step")),
    )


def launch(runtime: Runtime) -> None:
    """Gives the trainer its world and the event table of its rank, and seeds all generators, the same on all ranks."""
    cls = type(runtime.hooks)
    # has NCCL write down its last collectives when one times out; its groups read that as they are made
    _, local_rank, world_size = environment_ranks()
    if world_size > 1 and choose_device(runtime.config.device_parameters.device, local_rank).type == "cuda":
        enable_flight_recorder(runtime.run_dir / "flight_recorder")
    world = runtime.launched = runtime.hooks._join_world(runtime.config.device_parameters, runtime.workers)
    if world.world_size > 1 and not cls._keeps_ranks_equal:
        raise ConfigError(
            f"{cls.__name__} runs on {world.world_size} ranks, but nothing in it keeps them equal. "
            "Add SetupMixin to the trainer (and SetupConfigMixin to its config), or start one process."
        )
    reference = weakref.ref(runtime)
    if world.world_size == 1:
        atexit.register(_close_if_alive, reference)
    else:
        close_at_exit(world)
    world.tell_where(lambda: "the end" if (alive := reference()) is None else f"step {alive.progress.global_step}")
    refuse_different_configs(runtime)
    for hook, mixin in uncalled_hooks(cls):
        runtime.warn_once(hook, f"{cls.__name__}.{hook} is never called: only {mixin} does. Add {mixin}.")
    runtime.events = event_table(runtime, is_main=world.is_main)
    seed_everything(hash_seed(b"setup", runtime.config.seed))


def _close_if_alive(reference: weakref.ref[Runtime]) -> None:
    runtime = reference()
    if runtime is not None:
        runtime.hooks.close()


class Limits(TypedDict, total=False):
    """Where training ends, as in `TrainingParameters`: the first that is reached counts, None sets no limit."""

    n_epochs: int | None  # epochs of the whole run
    max_steps: int | None  # optimizer steps of the whole run
    max_time: timedelta | None  # time of training, that of earlier processes included
    max_samples: int | None  # samples of the whole run
    max_tokens: int | None  # tokens of the whole run


def set_limits(runtime: Runtime, limits: Limits) -> None:
    """Changes where the next `fit` ends; a collective once the trainer is set up."""
    unknown = [name for name in limits if name not in Limits.__annotations__]
    if unknown:
        raise TypeError(f"set_limits() has no limit {unknown[0]!r}. Use {', '.join(Limits.__annotations__)}.")
    if runtime.session.is_training:
        raise StepError("set_limits() was called inside fit(). Call it between two calls; request_stop() ends one.")
    before = runtime.config.training_parameters
    parameters = replace(before, **limits)
    if runtime.launched is not None:
        refuse_differences(runtime.launched, dict(limits), "Set the same limits on every rank.")
    change_training_parameters(runtime.config, runtime, parameters)
    runtime.schedule.follow(parameters)
    if not runtime.session.is_ready:
        return
    steps = runtime.state.total_steps
    runtime.state.total_steps = planned_steps(runtime)
    is_changed = runtime.state.total_steps != steps or before.max_tokens != parameters.max_tokens
    if is_changed and runtime.registry.schedulers():
        _build_schedulers_again(runtime, before=f"total_steps={steps} and max_tokens={before.max_tokens}")


def _build_schedulers_again(runtime: Runtime, *, before: str) -> None:
    """Their form follows `total_steps`; where they are in it is kept."""
    rates = runtime.rates
    states = {name: scheduler.state_dict() for name, scheduler in runtime.registry.schedulers().items()}
    shared: dict[str, Any] = {**rates.state(), "schedulers": states}
    groups = [group for optimizer in runtime.registry.optimizers().values() for group in optimizer.param_groups]
    options = [{key: copied(value) for key, value in group.items() if key != "params"} for group in groups]
    rates.build_again()
    schedulers = runtime.registry.schedulers()
    if runtime.world.is_main:
        logger.warning(
            "the run has total_steps=%s and max_tokens=%s instead of %s: its schedules (%s) were rebuilt for that, and "
            "continue from step %d like a restart with these limits.",
            runtime.state.total_steps,
            runtime.config.training_parameters.max_tokens,
            before,
            ", ".join(schedulers),
            runtime.progress.global_step,
        )
    for group, kept in zip(groups, options, strict=True):
        rate = kept.pop("lr")
        group.update(kept)
        set_rate(group, rate)  # in place: a captured step has the tensor
    for name, scheduler in schedulers.items():
        if isinstance(scheduler, TokenLR):
            scheduler.origin[0] = shared["token_origins"].get(name, 0)
    for line in rates.go_on(shared, ALL_KEPT):
        if runtime.world.is_main:
            logger.warning("%s", line)
