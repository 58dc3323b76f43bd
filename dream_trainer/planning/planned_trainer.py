"""A rank without the others, whose trainer is set up and trains two windows; tensors have no values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from dream_trainer.checks import refuse
from dream_trainer.compat.fully_shard import take_note
from dream_trainer.compat.lone_rank import DynamicOutputShapeException, FakeTensor, FakeTensorMode, make_group_alone
from dream_trainer.compat.pipelining import sent_is_held
from dream_trainer.compat.pytorch import has_values
from dream_trainer.config.device_parameters import DeviceParameters
from dream_trainer.distributed.world import World
from dream_trainer.errors import ConfigError, DreamTrainerError
from dream_trainer.meta.realize import MetaPlace, Replay, put
from dream_trainer.meta.tape import Tape
from dream_trainer.nested import leaves, map_tensors
from dream_trainer.parallel.sharding import fsdp_modules
from dream_trainer.planning.tracker import StepMeasure, Tracker
from dream_trainer.testing.program import Program, change, overridden
from dream_trainer.trainer.base import BaseTrainer, next_window
from dream_trainer.trainer.event_table import event_table
from dream_trainer.trainer.mixins.setup import Build, SetupStage
from dream_trainer.trainer.session import start


class PlanError(DreamTrainerError):
    """A program cannot be planned, or has an error that a run would have too."""


class PlannedWorld(World):
    """A rank whose collectives return at once: all the others say what this one says."""

    sent_numbers: list[int] | None = None  # those that this stage of a pipeline sent to the next
    known_numbers: list[int] | None = None  # those of the first stage, taken for all

    @override
    def _make_default_group(self, timeout: timedelta) -> None:
        make_group_alone(self.rank, self.world_size)

    @override
    def _make_cpu_group(self, timeout: timedelta) -> dist.ProcessGroup:
        return cast("dist.ProcessGroup", dist.new_group())

    @override
    def _set_time_outs(self, seconds: float) -> None: ...

    @override
    def send_numbers(self, numbers: list[int], to: int, group: dist.ProcessGroup) -> tuple[dist.Work, Tensor]:
        self.sent_numbers = numbers
        return super().send_numbers(numbers, to, group)

    @override
    def receive_numbers(self, count: int, source: int, group: dist.ProcessGroup) -> list[int]:
        return cast("list[int]", self.known_numbers or self.sent_numbers)

    @override
    def all_gather_object(self, value: Any, /) -> list[Any]:
        return [value] * self.world_size

    @override
    def gather_object(self, value: Any, /) -> list[Any] | None:
        return [value] * self.world_size if self.is_main else None

    @override
    def scatter_object(self, values: Sequence[Any] | None, /) -> Any:
        return None if values is None else values[self.rank]

    @override
    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        return value

    @override
    def all_reduce(self, values: Tensor, op: str = "sum") -> Tensor:
        return values.mul_(self.world_size) if op == "sum" else values

    @override
    def all_gather(self, values: Tensor) -> Tensor:
        return values.repeat(self.world_size, *[1] * values.ndim)


class Valueless(Replay):
    """Makes the tensors of models without values, in the places of those on meta and of real ones."""

    def __init__(self, mode: AbstractContextManager[Any]) -> None:
        self.mode: Any = mode
        self._like = cache(self._without_values)

    @override
    def fill(self, group: list[MetaPlace], tape: Tape, device: torch.device) -> None:
        """Gives the places of one storage tensors over one storage."""
        n_bytes = tape.history.storages[group[0].note.ref.storage].meta.nbytes()
        storage = torch.UntypedStorage(n_bytes, device="meta")
        for place in group:
            if place.part is not None:
                put(place, place.part)
            else:
                real: Any = FakeTensor(self.mode, place.note.ref.view(storage), device)
                real._is_param = isinstance(place.tensor, nn.Parameter)
                put(place, real)

    @override
    def settle(self, model: nn.Module, device: torch.device) -> None:
        """Also replaces plain parameters and buffers that have values, as those of a model built elsewhere."""
        for module in model.modules():
            for slots in (module._parameters, module._buffers):
                for name, tensor in slots.items():
                    if tensor is not None and type(tensor) in (Tensor, nn.Parameter):
                        slots[name] = self._like(tensor)
        for wrapped in fsdp_modules(model):
            take_note(wrapped)

    def _without_values(self, tensor: Tensor) -> Any:
        like = self.mode.from_tensor(tensor)
        return nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like


Changes = Mapping[str, Any]  # values of a config by their place, such as `device.dp_shard`


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """A rank to plan."""

    program: Program
    rank: int = 0
    world_size: int = 1
    ranks_per_host: int = 8
    changes: Changes = field(default_factory=dict)
    numbers: list[int] | None = None  # what the first stage of a pipeline tells the next one of what it sends


_OF_TENSORS = ("materialise", "configure_optimizers", "configure_schedulers", "configure_metrics")  # stages of setup
LEFT_OUT = "pretrained weights, resuming, validation, saves, loggers, callbacks, verification, compilation"


class MeasuredTrainer(BaseTrainer):
    """Stands before the user's class. `fit` sets up, trains two windows, and hands on the one with the higher peak."""

    _job: ClassVar[RankJob] = RankJob(program=Program())
    _scratch: ClassVar[str]
    _done: ClassVar[Callable[[Any, StepMeasure], None]]
    _tracker: Tracker

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        config = overridden(config, self._job.program)
        config.callbacks = []
        config.runs_dir = self._scratch
        devices = config.device_parameters
        refuse(devices.cpu_offload, "cpu_offload=True cannot be planned: a plan counts the memory of one device.")
        refuse(devices.float8 != "none", f"float8={devices.float8!r} cannot be planned: its kernels are not the CPU's.")
        change(config, device={"device": "cpu", "verify": False, "compile": False})
        for place, value in self._job.changes.items():
            group, _, name = place.partition(".")
            change(config, **{group: {name: value}})
        super().__init__(config, *args, **kwargs)
        self._runtime.recorder = cast(Any, SimpleNamespace(listeners=lambda event, is_main: ()))
        self._runtime.events = event_table(self._runtime, is_main=True)
        vars(self)["_tracker"] = Tracker()

    @override
    def fit(self) -> None:
        runtime = self._runtime
        start(runtime)
        runtime.coordinator.begin_training()
        runtime.schedule.start()
        runtime.parallel.forget_whole()
        self._notify("pre_fit")
        self._notify("pre_epoch")
        for path, part in self._parts():
            self._tracker.mark(part.parameters(recurse=False), "parameters", path)
            self._tracker.mark(part.buffers(recurse=False), "buffers", path)
        steps: list[StepMeasure] = []
        for _ in range(2):
            window = next_window(runtime)
            if window is None:
                raise ConfigError("the training data end before two steps. A plan trains two.")
            with self._values():
                with self._tracker.window(self._parts()):
                    self._run_window(window)
                steps.append(self._tracker.measured(self.world))
        type(self)._done(self, max(steps, key=lambda each: each.peak))

    def _values(self) -> AbstractContextManager[Any]:
        """The context in which tensors are made."""
        return nullcontext()

    @override
    def _wrap_step(self, step: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        inner = super()._wrap_step(step)

        def run(batch: Any, batch_idx: int) -> Any:
            self._tracker.is_users_turn = True
            inner(batch, batch_idx)
            self._tracker.is_users_turn = False
            return {}

        return run

    @override
    def move_batch(self, batch: Any, device: torch.device) -> Any:
        """A copy of the loader's, as it would be on another device."""
        copy = map_tensors(self._copy, super().move_batch(batch, device))
        self._tracker.mark(leaves(copy), "inputs")
        return copy

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @override
    def step(
        self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], scheduler: Any | Sequence[Any] | None = None
    ) -> Tensor | None:
        for path, part in self._parts():
            self._tracker.mark((parameter.grad for parameter in part.parameters(recurse=False)), "gradients", path)
        self._tracker.is_users_turn = False
        norm = super().step(model, optimizer, scheduler)
        self._tracker.is_users_turn = True
        for each in self._runtime.registry.optimizers().values():
            for parameter, state in each.state.items():
                self._tracker.mark(leaves(dict(state)), "optimizer state", self._tracker.module_of(parameter))
        return norm

    def _parts(self) -> Iterator[tuple[str, nn.Module]]:
        for name, model in self._runtime.registry.models().items():
            yield from model.named_modules(prefix=name)

    def _leave_out(self, *args: Any, **kwargs: Any) -> None: ...

    log = log_dict = _make_saver = _resume = _window_finished = _close = _leave_out


class PlannedTrainer(MeasuredTrainer):
    """A rank without the others, whose tensors have no values."""

    _made: Valueless

    @override
    def _join_world(self, parameters: DeviceParameters, workers: Any) -> World:
        vars(self)["_made"] = Valueless(FakeTensorMode(allow_non_fake_inputs=True))
        world = PlannedWorld(parameters, shard_by_default=self._shards_parameters, workers=workers)
        world.known_numbers = self._job.numbers
        return world

    @override
    @contextmanager
    def _values(self) -> Iterator[None]:
        try:
            with self._made.mode, sent_is_held():
                yield
        except DynamicOutputShapeException as error:
            raise PlanError(
                "the shape of a result depends on values, which a plan does not have. Use operations whose shapes are "
                "known, such as torch.where and masks instead of indexing by a condition."
            ).with_traceback(error.__traceback__) from None

    @override
    def _copy(self, tensor: Tensor) -> Tensor:
        return cast(Tensor, self._made.mode.from_tensor(tensor)) if has_values(tensor) else tensor.clone()

    def _run_stage(self, stage: SetupStage, build: Build) -> None:
        of_user: Any = super()  # SetupMixin's, which comes after
        if stage.name == "materialise":
            build.plan.values = self._made
        with self._made.mode if stage.name in _OF_TENSORS else nullcontext():
            if stage.name != "load_pretrained":
                of_user._run_stage(stage, build)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            "a plan is of fit(), and the program calls evaluate() before. Give a function that returns "
            "the trainer: PROGRAM:FUNCTION."
        )
