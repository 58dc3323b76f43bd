"""Runtime: the parts that a trainer is made of, under one name each; Coordinator: decisions of all ranks together, such
as to stop, which all learn at the same time, by the pulse.

What sets up, trains, validates and saves takes the runtime, or the parts that it needs, and never the trainer. The
trainer is in it as `hooks`: the methods that its author and mixins override."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from dream_trainer.checkpoint.saving import Saving
from dream_trainer.data.feed import ConnectedData
from dream_trainer.distributed.pulse import Flags, Requests, exchange
from dream_trainer.distributed.signals import Interrupted, Signals
from dream_trainer.distributed.watchdog import Watchdog
from dream_trainer.distributed.world import World
from dream_trainer.errors import HookError, StepError
from dream_trainer.events.collection import Timed
from dream_trainer.gradient_state import GradientState
from dream_trainer.loggers.buffer import Records
from dream_trainer.modules.metrics import ValidationMetrics
from dream_trainer.parallel.axis import MeshParallelism
from dream_trainer.parallel.parallel_models import ParallelModels
from dream_trainer.screen import logger
from dream_trainer.trainer.counters import BestValues, Counters, Schedule, WindowState
from dream_trainer.trainer.hooks import MixinHooks, NoRounds
from dream_trainer.trainer.registry import Registry
from dream_trainer.trainer.resumed_rates import ResumedRates
from dream_trainer.trainer.state_registry import StateRegistry
from dream_trainer.trainer.step.accumulation import Accumulation
from dream_trainer.trainer.step.optimizer_step import OptimizerStep
from dream_trainer.trainer.user_class import definers, is_ours

if TYPE_CHECKING:
    from dream_trainer.loggers.run_log import RunLog
    from dream_trainer.parallel.context_attention import AttentionTakeover
    from dream_trainer.trainer.run_record import RunRecorder


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
        self._clocks = 0  # a bit for each timed callback that was due

    def begin(self, world: World, saver: Saving, gradients: GradientState, timed: Sequence[Timed]) -> None:
        self._world, self._saver, self._gradients = world, saver, gradients
        self._timed, self._asks = timed, bool(timed) and world.is_main

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
        asked, schedule, world = self.requests, self._schedule, self._world
        # stages run other blocks than each other
        order = self._gradients.order if world.stages == 1 else self._gradients.steps
        due, saving, save_failed = self._saver.flags()
        self.exchanges += 1
        # Not Flags(stop=...): in each step, keyword arguments would cost more than everything else here.
        flags = Flags._make(
            (
                asked.stop_reason is not None,
                asked.terminated,
                asked.interrupted,
                schedule.goes_by_the_clock and schedule.time_is_up(),
                asked.save_requested or asked.save_signalled or due,
                saving,
                save_failed,
                schedule.goes_by_the_clock and world.is_main and schedule.validations.is_due_by_the_clock(),
                waiting,
                short,
                sum(one.is_due_by_the_clock() << n for n, one in enumerate(self._timed)) if self._asks else 0,
                samples,
                tokens,
                order,
                order * order,
            )
        )
        flags = exchange(world, flags)
        if flags.order_squared * world.world_size != flags.order * flags.order:
            refuse_unlike_order(world, self._progress.global_step)
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
            if self._world.is_main:
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


@dataclass(slots=True)
class State:
    """The public, readable state of a trainer: its properties of the same names."""

    accumulation_steps: int
    total_steps: int | None = None
    steps_per_epoch: int | None = None
    train_dataloader: Any = None
    val_dataloaders: dict[str, Any] = field(default_factory=dict)
    training: bool = True
    is_padding_batch: bool = False
    is_sanity_validation: bool = False
    is_evaluating: bool = False
    val_name: str = ""


@dataclass(slots=True)
class Session:
    """How far a trainer has come between its constructor and `close`; trainer/session.py takes it there."""

    is_ready: bool = False  # whether it has launched and set up
    is_training: bool = False  # whether `fit` is in its loop
    has_failed: bool = False
    is_first_window: bool = True  # whether no window was trained yet in this process
    is_closed: bool = False
    is_half_set_up: bool = False
    is_resumed: bool = False  # whether a checkpoint was looked for, and loaded if there was one
    is_nonfinite: bool = False  # whether it failed because of gradients that were not finite
    watchdog: Watchdog | None = None  # while `fit` is in its loop

    def patience(self) -> AbstractContextManager[None]:
        """For phases without batches that may take long: the watchdog gives them more time."""
        return _NOTHING if self.watchdog is None else self.watchdog.patient()


_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(eq=False)
class Runtime:
    """Of a newly constructed trainer; parts that need ranks join at launch and setup (trainer/session.py)."""

    hooks: MixinHooks
    config: Any  # of the user's class, with the fields of the mixins
    run_dir: Path = field(init=False)  # as it was first: a closed trainer's config may be changed for the next one
    state: State = field(init=False)
    progress: Counters = field(default_factory=Counters)
    registry: Registry = field(init=False)  # models, optimizers and so on, by the trainer's attributes
    schedule: Schedule = field(init=False)
    rates: ResumedRates = field(init=False)
    coordinator: Coordinator = field(init=False)
    session: Session = field(default_factory=Session)
    data: ConnectedData = field(default_factory=ConnectedData)
    window: WindowState = field(default_factory=WindowState)
    records: Records = field(default_factory=Records)  # what `log` adds to
    log: RunLog | None = None  # of LoggerMixin
    validation_metrics: ValidationMetrics | None = None  # of EvalMixin
    parallel: ParallelModels = field(default_factory=ParallelModels)
    said_once: set[str] = field(default_factory=set)
    best: BestValues = field(default_factory=BestValues)
    parent: dict[str, Any] | None = None  # of a branch, the checkpoint or run that it began from
    resumed_from: str | None = None  # the checkpoint
    recorder: RunRecorder = field(init=False)
    events: Mapping[str, tuple[Callable[..., None], ...]] = field(init=False)  # of this rank, once it is known
    # From launch on
    launched: World | None = None
    # From setup on; mixins replace these
    accumulation: Accumulation = field(init=False)
    optimizer_step: OptimizerStep = field(init=False)
    frozen_draws: dict[str, Tensor] = field(default_factory=dict)  # some values of each, until the first resume
    state_registry: StateRegistry = field(init=False)  # checkpointed state other than weights, optimizers and data
    saver: Saving = field(default_factory=Saving)
    rounds: NoRounds = field(default_factory=NoRounds)
    workers: int | Literal["hosts"] = 1  # groups of ranks that step on their own
    takeover: AttentionTakeover | None = None  # on while a step runs whose sequences ranks share

    def __post_init__(self) -> None:
        hooks, parameters = self.hooks, self.config.training_parameters
        self.run_dir = self.config.run_dir
        self.state = State(parameters.gradient_accumulation_steps)
        self.registry = Registry(vars(hooks))
        self.schedule = Schedule(parameters, self.progress)
        self.rates = ResumedRates(self.registry.optimizers, self.registry.schedulers, hooks.configure_schedulers)
        self.coordinator = Coordinator(self.schedule, self.progress)
        self.state_registry, best = StateRegistry(self), self.best
        self.state_registry.register("evaluation", best.state_dict, best.load_state_dict, goes_with_counters=True)

    @property
    def world(self) -> World:
        """Raises HookError before launch."""
        if self.launched is None:
            raise HookError("self.world exists from launch on (fit, evaluate or predict). Do not read it in __init__.")
        return self.launched

    def outside_forward(self) -> AbstractContextManager[None]:
        """For operations of this package within a step, which call no attention."""
        return _NOTHING if self.takeover is None else self.takeover.aside()

    def warn_once(self, key: str, message: str) -> None:
        """As the trainer's method, which may be overridden."""
        self.hooks.warn_once(key, message)

    def refuse_inside_window(self, what: str) -> None:
        """Raises StepError if an accumulation window is running, whose gradients are not in any state."""
        if self.session.is_ready and self.accumulation.is_open:
            raise StepError(f"{what}() was called inside an accumulation window. Call it in post_train_step or later.")


def is_whole_in_steps(runtime: Runtime, model: nn.Module) -> bool:
    """Whether a model that FSDPMixin shards is small enough to be whole in steps, and nothing asks for blocks."""
    if not runtime.hooks._shards_parameters or runtime.world.parameter_shape.dp_shard == 1:
        return False
    config: Any = runtime.config  # which has the field that FSDPMixin asks for
    devices, parameters = config.device_parameters, config.fsdp_parameters
    is_plain = not any(isinstance(axis, MeshParallelism) for axis in runtime.parallel.active_axes(config))
    is_by_hand = not all(is_ours(part) for part in definers(type(runtime.hooks), "apply_fully_shard"))
    is_small = sum(p.numel() * p.element_size() for p in model.parameters()) < parameters.min_group_mib * 2**20
    return is_plain and not devices.cpu_offload and devices.float8 == "none" and not is_by_hand and is_small
