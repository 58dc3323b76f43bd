"""A trainer that is set up, trains two windows, and is measured; it saves, logs and resumes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from dream_trainer.checks import refuse
from dream_trainer.compat.lone_rank import FakeTensorMode
from dream_trainer.compat.pipelining import sent_is_held
from dream_trainer.compat.pytorch import has_values
from dream_trainer.config.device_parameters import DeviceParameters
from dream_trainer.distributed.world import World
from dream_trainer.errors import ConfigError
from dream_trainer.nested import leaves, map_tensors
from dream_trainer.planning.planned_world import PlannedWorld, Valueless
from dream_trainer.planning.tracker import StepMeasure, Tracker
from dream_trainer.testing.program import Program, overridden
from dream_trainer.trainer.base import BaseTrainer, next_window
from dream_trainer.trainer.event_table import event_table
from dream_trainer.trainer.mixins.setup import Build, SetupStage
from dream_trainer.trainer.session import start

LEFT_OUT = ("pretrained weights", "resuming", "validation", "saves", "loggers", "callbacks", "verification")


def _copied(move_batch: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, whose batch is a copy of the loader's, as it would be on another device."""

    def moved(self: Any, batch: Any, device: torch.device) -> Any:
        copy = map_tensors(self._copy, move_batch(self, batch, device))
        self._tracker.mark(leaves(copy), "inputs")
        return copy

    return moved


class MeasuredTrainer(BaseTrainer):
    """Stands before the user's class. `fit` sets up, trains two windows, and hands on the one with the higher peak."""

    _around: ClassVar = {"move_batch": _copied}
    _changes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Of each of the config's groups the values to change."""
    _program: ClassVar[Program] = Program()
    """Where the trainer comes from; its arguments change a config that no script has parsed."""
    _scratch: ClassVar[str]
    _done: ClassVar[Callable[[Any, StepMeasure], None]]
    _tracker: Tracker
    left_out_compilation: bool

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        config = overridden(config, self._program)
        config.callbacks = []
        config.runs_dir = self._scratch
        devices = config.device_parameters
        refuse(devices.cpu_offload, "cpu_offload=True cannot be planned: a plan counts the memory of one device.")
        refuse(devices.float8 != "none", f"float8={devices.float8!r} cannot be planned: its kernels are not the CPU's.")
        vars(self)["left_out_compilation"] = devices.compile
        config.device_parameters = replace(devices, device="cpu", verify=False, compile=False)
        for group, changes in self._changes.items():
            setattr(config, group, replace(getattr(config, group), **changes))
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
            self._tracker.phase, self._tracker.is_users_turn = "activations", True
            inner(batch, batch_idx)
            self._tracker.is_users_turn = False
            return {}

        return run

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @override
    def step(
        self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], scheduler: Any | Sequence[Any] | None = None
    ) -> Tensor | None:
        for path, part in self._parts():
            self._tracker.mark((parameter.grad for parameter in part.parameters(recurse=False)), "gradients", path)
        self._tracker.phase, self._tracker.is_users_turn = "temporaries", False
        norm = super().step(model, optimizer, scheduler)
        self._tracker.phase, self._tracker.is_users_turn = "activations", True
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

    _numbers: ClassVar[list[int] | None] = None
    """What stages of a pipeline tell the next one of what they send."""
    _made: Valueless

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        vars(self)["_made"] = Valueless(FakeTensorMode(allow_non_fake_inputs=True))
        super().__init__(config, *args, **kwargs)

    @override
    def _join_world(self, parameters: DeviceParameters, workers: Any) -> World:
        world = PlannedWorld(parameters, shard_by_default=self._shards_parameters, workers=workers)
        world.known_numbers = self._numbers
        return world

    @override
    @contextmanager
    def _values(self) -> Iterator[None]:
        with self._made.mode, sent_is_held():
            yield

    @override
    def _copy(self, tensor: Tensor) -> Tensor:
        return cast(Tensor, self._made.mode.from_tensor(tensor)) if has_values(tensor) else tensor.clone()

    def _run_stage(self, stage: SetupStage, build: Build) -> None:
        of_user: Any = super()  # SetupMixin's, which comes after
        if stage.name == "materialise":
            assert build.plan is not None
            build.plan.values = self._made
            with self._made.mode:
                of_user._run_stage(stage, build)
        elif stage.name in ("configure_optimizers", "configure_schedulers", "configure_metrics"):
            with self._made.mode:
                of_user._run_stage(stage, build)
        elif stage.name != "load_pretrained":
            of_user._run_stage(stage, build)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            "a plan is of fit(), and the program calls evaluate() before. Give a function that returns "
            "the trainer: PROGRAM:FUNCTION."
        )
