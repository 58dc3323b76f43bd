"""Coordinator: decisions of all ranks together, such as to stop. All learn them at the same time, by the pulse."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import NoReturn

import torch

from dream_trainer.checkpoint.saving import Saving
from dream_trainer.distributed.pulse import Flags, Requests, exchange
from dream_trainer.distributed.signals import Interrupted, Signals
from dream_trainer.distributed.world import World
from dream_trainer.errors import StepError
from dream_trainer.events.collection import Timed
from dream_trainer.gradient_state import GradientState
from dream_trainer.screen import logger
from dream_trainer.trainer.counters import Counters, Schedule


class Coordinator:
    """One rank's side of decisions that all ranks make together, between windows and between validation batches."""

    def __init__(self, schedule: Schedule, progress: Counters) -> None:
        self._schedule, self._progress = schedule, progress
        self.requests = Requests()  # the requests made on this rank, to save or to stop
        self.signals = Signals(self.requests)  # the signals this process gets
        self.trains = self.stopped = False
        self.stopped_because: str | None = None
        self.ended_by: signal.Signals | None = None  # the signal that stops training, if any
        self.exchanges = 0  # number of exchanges so far; grows as long as the run continues

    def begin(self, world: World, saver: Saving, gradients: GradientState, timed: Sequence[Timed]) -> None:
        self._world, self._saver, self._gradients = world, saver, gradients
        self._is_alone, self._is_main = world.world_size == 1, world.is_main
        gradients.own_time.is_wanted = world.world_size > 1
        self._is_one_stage = world.stages == 1  # stages run other blocks than each other
        self._timed, self._asks = timed, bool(timed) and world.is_main
        self._clocks = 0

    def begin_training(self) -> None:
        """`fit` was called: forgets why an earlier call ended."""
        self.trains, self.stopped = True, False
        self.stopped_because = self.ended_by = None
        self.requests.forget_signals()

    def callback_is_due(self, callback: Timed) -> bool:
        """Whether it was due by rank 0's clock before the window just completed; the same on all ranks."""
        return bool(self._clocks >> self._timed.index(callback) & 1)

    def exchange(self, *, samples: int = 0, tokens: int = 0, short: bool = False, waiting: bool = False) -> Flags:
        """Between windows: the ranks exchange what each of them knows, and all act on it in the same way."""
        asked, schedule = self.requests, self._schedule
        goes_by_the_clock = schedule.goes_by_the_clock
        due, saving, save_failed = self._saver.flags()
        self.exchanges += 1
        # Not Flags(stop=...): in each step, keyword arguments would cost more than everything else here.
        local_flags = Flags._make(
            (
                asked.stop_reason is not None,
                asked.terminated,
                asked.interrupted,
                goes_by_the_clock and schedule.time_is_up(),
                asked.save_requested or asked.save_signalled or due,
                saving,
                save_failed,
                goes_by_the_clock and self._is_main and schedule.validations.is_due_by_the_clock(),
                waiting,
                short,
                sum(one.is_due_by_the_clock() << n for n, one in enumerate(self._timed)) if self._asks else 0,
                samples,
                tokens,
                (order := self._gradients.order if self._is_one_stage else self._gradients.steps),
                order * order,
            )
        )
        flags = local_flags
        if not self._is_alone:
            flags = exchange(self._world, local_flags)
            if flags.order_squared * self._world.world_size != flags.order * flags.order:
                refuse_unlike_order(self._world, self._progress.global_step)
        self._clocks = flags.clocks
        if flags.save:
            asked.heard_of_save()
        if flags.stop or flags.terminate or flags.interrupt or flags.timeout:
            self._stop(flags)
        self._saver.heard(flags.saving, flags.save_failed)
        return flags

    def check_order(self) -> None:
        """Before a save: checks that all ranks ran sharded blocks and stages in one order; a collective."""
        world = self._world
        if world.parameter_shape.dp_shard > 1 or world.stages > 1:
            own = torch.tensor([[self._gradients.order, self._gradients.steps]])
            orders = world.all_gather(own).view(world.stages, -1, 2)
            if (orders[..., 0] != orders[:, :1, 0]).any() or (orders[..., 1] != orders[0, 0, 1]).any():
                refuse_unlike_order(world, self._progress.global_step)

    def go_on(self, *, has_batch: bool, hears_signals: bool) -> bool:
        """In a validation, once each rank has its batch: whether some rank has one."""
        asked, flags = self.requests, Flags(short=not has_batch)
        if hears_signals:
            flags = flags._replace(terminate=asked.terminated, interrupt=asked.interrupted, save=asked.save_signalled)
        self.exchanges += 1
        flags = exchange(self._world, flags)
        if flags.save:
            asked.heard_of_save()
        if flags.terminate or flags.interrupt:
            self._stop(flags)
        if flags.terminate or flags.interrupt or flags.save:
            raise Interrupted
        return flags.short < self._world.world_size

    def _stop(self, flags: Flags) -> None:
        if not self.stopped:
            self.stopped_because = self.requests.why_stopped(flags)
            if self._is_main:
                logger.warning("stopping at step %d: %s", self._progress.global_step, self.stopped_because)
        self.stopped = True  # whether all ranks stop here
        if flags.terminate or flags.interrupt:
            self.ended_by = signal.SIGTERM if flags.terminate else signal.SIGINT


def refuse_unlike_order(world: World, step: int) -> NoReturn:
    """Raises StepError; all ranks call it, once they know."""
    if world.stages > 1:
        raise StepError(
            f"by step {step} the stages have called step() for other optimizers than each other, or in another "
            "order; no checkpoint has that. Call it for the same ones on every rank, in one order, also where a stage "
            "has nothing of one. Or ranks have run a stage's sharded blocks in different orders: run the same on each."
        )
    raise StepError(
        f"by step {step} the ranks have run blocks of a sharded model in different orders, or backward through "
        "different ones; no checkpoint has that. Run the same on every rank, in one order, and let the loss depend "
        "on each (add 0 * output.sum() of unwanted ones), or keep the model whole on each rank (dp_shard=1)."
    )
