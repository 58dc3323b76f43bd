"""SetupMixin: builds the models, parallelises and materialises them, then data, optimizers, schedulers and metrics. The
order is three lists, `CONFIGURE`, the parallelisms (parallel/axis.py) and `SETUP`, with the reason for each place;
`describe()` prints them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from dream_trainer.config.device_parameters import DeviceParameters, SetupConfigMixin
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.errors import ConfigError, HookError
from dream_trainer.meta.realize import Plan, default_init, materialize, refuse_hidden, refuse_lazy, remember
from dream_trainer.meta.tape import Tape
from dream_trainer.modules.forward_state import ParameterMarks
from dream_trainer.modules.metrics import parts
from dream_trainer.modules.precision import half_dtype, norms_in_float32, sharding_policy
from dream_trainer.optim.muon import Muon
from dream_trainer.optim.optimizers import refuse_unshardable
from dream_trainer.parallel.axis import AXES, AxisSetup, Parallelism
from dream_trainer.parallel.joined_buffers import JoinedBuffers, make_equal
from dream_trainer.parallel.sharding import (
    keep_recurrent_weights_in_place,
    move_what_is_whole,
    refuse_unsupported,
    shard_by_blocks,
)
from dream_trainer.trainer.abstract import AbstractTrainer
from dream_trainer.trainer.data_setup import connect_data
from dream_trainer.trainer.hooks import Hooks, MixinHooks
from dream_trainer.trainer.rank_differences import refuse_different_modules, refuse_different_optimizers
from dream_trainer.trainer.registry import refuse_private_models
from dream_trainer.trainer.runtime import Runtime, is_whole_in_steps
from dream_trainer.trainer.user_class import parallelisms_of
from dream_trainer.weights.first_values import forget_first_values, frozen_draws, remember_first_values

if TYPE_CHECKING:
    from dream_trainer.parallel.verify import Verification


class SetupMixin(AbstractTrainer):
    """Builds and parallelises everything a trainer trains, on any number of ranks.

    Override `configure_models` and `configure_optimizers`; `init_weights`, `configure_schedulers`, `configure_metrics`,
    `load_pretrained`, `model_blocks` and `apply_replicate` where the defaults do not fit.
    """

    _required_hooks: ClassVar[dict[str, str]] = {
        "configure_models": "assign your modules to self there.",
        "configure_optimizers": "assign your optimizers to self there.",
    }
    _config_class: ClassVar[type | None] = SetupConfigMixin
    _keeps_ranks_equal: ClassVar[bool] = True

    def __init__(self, config: BaseTrainerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        axes = dict.fromkeys((*AXES, *parallelisms_of(type(self))))
        self._runtime.parallel.axes = tuple(sorted(axes, key=lambda axis: axis.order or 0))
        for axis in self._runtime.parallel.active_axes(config):
            axis.validate(type(self), config)
        self.__build = Build(Tape(config.seed))

    def configure(self) -> None:
        """Builds the models and records their initialisation; nothing is on a device yet."""
        super().configure()
        for stage in CONFIGURE:
            stage.run(self._runtime, self.__build)

    def setup(self) -> None:
        """Runs the stages after `configure`, up to but without the resume."""
        super().setup()
        models, build = self.named_models(), self.__build
        refuse_different_modules(self.world, "models", models)
        self._runtime.parallel.buffers = JoinedBuffers(models, self.buffer_policies())
        refuse_unsupported(models, self.world.world_size, are_wrapped=_are_wrapped(self._runtime))
        # What was built before `configure_models`, or is real otherwise, may differ by rank.
        if differ := make_equal(models, self.world):
            self.warn_once(
                "real weights",
                "weights that the trainer did not make are not the same on all ranks, as of a model built before "
                f"configure_models. Rank 0's values are taken on all ranks: {', '.join(differ[:3])} differed.",
            )
        build.plan = remember(models, build.tape)
        self._runtime.parallel.verification = verification = verified_against_now(self._runtime)
        for stage in setup_stages(self._runtime):
            self._run_stage(stage, self.__build)
        if verification is not None:
            verification.begin()
        del self.__build

    def _run_stage(self, stage: SetupStage, build: Build) -> None:
        stage.run(self._runtime, build)

    @property
    def planned_steps(self) -> int:
        """`total_steps`, for schedules that need one: `CosineAnnealingLR(self.optimizer, self.planned_steps)`.

        Raises:
            ConfigError: Nobody knows where the run ends, or not yet: the data is not set up.
        """
        if self.total_steps is None:
            raise ConfigError(
                "the run has no planned number of steps: nothing that counts steps ends it, or the data is not set up "
                "yet. Set max_steps, or n_epochs over data that has a length, and ask in configure_optimizers or later."
            )
        return self.total_steps

    def apply_replicate(self, mesh: DeviceMesh) -> None:
        """Replicates every model on every rank: it stays as it is, and `step` averages its gradients.

        Models are wrapped in `fully_shard` with `cpu_offload`, which moves them block by block, and with tensor
        parallelism, whose layers have DTensors.

        Args:
            mesh: Two dimensions, the second of size 1: `fully_shard` over it is replication.
        """
        super().apply_replicate(mesh)
        if not _wraps_replicas(self._runtime):
            return
        config, is_part = {"mesh": mesh} | sharding_keywords(self._runtime), self._runtime.parallel.gradients.part
        for model in self._runtime.registry.trainable_models():
            shard_by_blocks(model, self.model_blocks(model), config, config, is_part)

    def _setup_stages(self) -> list[tuple[str, str]]:
        stages_with_reasons = [(stage.name, stage.why_here) for stage in (*CONFIGURE, *setup_stages(self._runtime))]
        return [*super()._setup_stages(), *stages_with_reasons, ("resume", "last, over everything it restores")]


@dataclass
class Build:
    """Results that one stage passes to later ones."""

    tape: Tape  # until the models are real
    assigned: set[str] = field(default_factory=set)
    plan: Plan = field(init=False)  # from the end of `configure` on
    marks: ParameterMarks = field(default_factory=lambda: ParameterMarks({}))


class SetupStage(NamedTuple):
    name: str  # as `describe()` shows it
    why_here: str  # why it comes after the stages before it, and before those after it
    run: Callable[[Runtime, Build], None]  # does it


def _configure_models(runtime: Runtime, build: Build) -> None:
    before = set(vars(runtime.hooks))
    with build.tape.recording():
        runtime.hooks.configure_models()
    build.assigned = set(vars(runtime.hooks)) - before
    refuse_private_models({name: value for name, value in vars(runtime.hooks).items() if name in build.assigned})
    if not runtime.registry.models():
        raise HookError("configure_models assigned no module with parameters to self: self.model = ...")
    refuse_lazy(runtime.registry.models())


def _init_weights(runtime: Runtime, build: Build) -> None:
    if type(runtime.hooks).init_weights is Hooks.init_weights:
        for model in runtime.registry.models().values():
            default_init(model, build.tape)
    else:
        with torch.no_grad(), build.tape.recording():
            runtime.hooks.init_weights()
    build.marks = ParameterMarks(runtime.registry.models())


def _shard_or_replicate(runtime: Runtime, build: Build) -> None:
    world = runtime.world
    if world.world_size == 1:
        return
    mesh, shape = world.parameter_mesh, world.parameter_shape
    assert mesh is not None  # at world size > 1 there is one
    if _are_wrapped(runtime):
        for model in runtime.registry.parameterised_models():
            keep_recurrent_weights_in_place(model)
            if not is_whole_in_steps(runtime, model) and half_dtype(runtime.config.device_parameters) is not None:
                norms_in_float32(model, world.device)
    if shape.dp_shard == 1:
        if world.workers > 1 and type(runtime.hooks).apply_replicate is not SetupMixin.apply_replicate:
            raise ConfigError(
                f"{type(runtime.hooks).__name__}.apply_replicate replicates over all ranks, and "
                f"workers={world.workers} step on their own. Leave it out, or use workers=1."
            )
        runtime.hooks.apply_replicate(mesh["dp_replicate", "dp_shard"])
        return
    dims = ("dp_replicate", "dp_shard") if shape.dp_replicate > world.workers else ("dp_shard",)
    runtime.hooks.apply_fully_shard({"mesh": mesh[dims]} | sharding_keywords(runtime))


def _are_wrapped(runtime: Runtime) -> bool:
    """Whether `fully_shard` will wrap the models, here or in a user's `apply_replicate`."""
    shape = runtime.world.parameter_shape
    is_overridden = type(runtime.hooks).apply_replicate is not SetupMixin.apply_replicate
    return runtime.world.world_size > 1 and (shape.dp_shard > 1 or is_overridden or _wraps_replicas(runtime))


def _wraps_replicas(runtime: Runtime) -> bool:
    return runtime.config.device_parameters.cpu_offload or runtime.world.data_copies > 1


def _materialise(runtime: Runtime, build: Build) -> None:
    models, world = runtime.registry.models(), runtime.world
    materialize(models, build.plan, world.parameter_device)
    refuse_hidden(models | {name: value for name, value in vars(runtime.hooks).items() if name in build.assigned})
    build.marks.put_back(models)
    remember_first_values(models, build.plan)
    del build.tape  # it keeps what the constructors computed
    runtime.frozen_draws = frozen_draws(models, build.plan)
    for axis in runtime.parallel.axes:
        axis.connect(axis_setup(runtime, build))
    if world.world_size == 1:
        return
    for model in models.values():
        if world.parameter_device != world.device:
            move_what_is_whole(model, world.device)
    policy = runtime.config.training_parameters.sync_policy
    runtime.parallel.watch(models.values(), world, policy, lambda: runtime.registry.optimizers().values())
    build.marks.refuse_lost_hooks(models)


def _load_pretrained(runtime: Runtime, build: Build) -> None:
    try:
        runtime.hooks.load_pretrained()
    finally:
        forget_first_values()


def _configure_optimizers(runtime: Runtime, build: Build) -> None:
    runtime.parallel.reshard()
    with runtime.parallel.configuring_optimizers():
        runtime.hooks.configure_optimizers()
    optimizers = runtime.registry.optimizers()
    if not optimizers:
        raise HookError("configure_optimizers assigned no optimizer to self: self.optimizer = ...")
    runtime.registry.refuse_strangers()
    for optimizer in optimizers.values():
        refuse_unshardable(optimizer)
        if isinstance(optimizer, Muon):
            optimizer.replicas = runtime.world.averaging_group()
    runtime.rates.note_options()


def _configure_schedulers(runtime: Runtime, build: Build) -> None:
    runtime.hooks.configure_schedulers()
    refuse_different_optimizers(runtime)


def _configure_metrics(runtime: Runtime, build: Build) -> None:
    runtime.hooks.configure_metrics()
    for metric in runtime.registry.metrics().values():
        metric.to(runtime.world.device)
        for part in parts(metric):
            part.process_group = runtime.world.data_group
    refuse_different_modules(runtime.world, "metrics", runtime.registry.metrics())


CONFIGURE: tuple[SetupStage, ...] = (
    SetupStage(
        "configure_models",
        "first, so that every later stage has modules; parameters stay on the meta device",
        _configure_models,
    ),
    SetupStage(
        "init_weights",
        "recorded while tensors are whole, so that initial weights do not depend on the mesh",
        _init_weights,
    ),
)
SETUP: tuple[SetupStage, ...] = (
    SetupStage(
        "fully_shard / replicate",
        "before anything is real, so that no rank ever holds more than its shard and one tensor",
        _shard_or_replicate,
    ),
    SetupStage("materialise", "each rank replays one full tensor at a time and keeps its own part", _materialise),
    SetupStage(
        "load_pretrained", "over initialised weights, so that a partial load leaves nothing undefined", _load_pretrained
    ),
    SetupStage(
        "configure_dataloaders",
        "before optimizers and schedulers, which may need total_steps",
        lambda runtime, _: connect_data(runtime),
    ),
    SetupStage(
        "configure_optimizers", "over real, sharded parameters, which they will update in place", _configure_optimizers
    ),
    SetupStage("configure_schedulers", "over the optimizers, with total_steps known", _configure_schedulers),
    SetupStage("configure_metrics", "before a resume, which may restore them", _configure_metrics),
)


def setup_stages(runtime: Runtime) -> list[SetupStage]:
    axes = [axis for axis in runtime.parallel.axes if axis.order is not None]
    return [*(SetupStage(axis.name, axis.reason, partial(set_up_axis, axis)) for axis in axes), *SETUP]


def verified_against_now(runtime: Runtime) -> Verification | None:
    """Verifies models against their present form, in one piece, if ranks will split it."""
    from dream_trainer.parallel.verify import Verification, is_verifiable

    devices: DeviceParameters = runtime.config.device_parameters
    if not is_verifiable(devices):
        return None

    def is_in_step() -> bool:
        return runtime.state.training and runtime.session.is_ready and runtime.accumulation.is_open

    models, world, blocks_of = runtime.registry.models(), runtime.world, runtime.hooks.model_blocks
    return Verification(models, blocks_of, devices, world, runtime.warn_once, is_in_step, lambda: runtime.takeover)


def set_up_axis(axis: Parallelism, runtime: Runtime, build: Build) -> None:
    if axis.is_on(runtime.config):
        axis.apply(axis_setup(runtime, build))


def axis_setup(runtime: Runtime, build: Build) -> AxisSetup:
    is_logged = runtime.records.media is not None or type(runtime.hooks).log is not MixinHooks.log
    return AxisSetup(
        models=runtime.registry.models(),
        config=runtime.config,
        world=runtime.world,
        parallel=runtime.parallel,
        hooks=runtime.hooks,
        marks=build.marks,
        sharding=sharding_keywords(runtime),
        log=partial(runtime.hooks.log_dict, weight=1.0) if is_logged else None,
    )


def sharding_keywords(runtime: Runtime) -> dict[str, Any]:
    """Keyword arguments of `fully_shard` except the mesh."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    # A stage is gathered once for all micro-batches of a batch: given back between them, some schedules' gradients are
    # wrong without an error.
    policies: dict[str, Any] = {"reshard_after_forward": False} if runtime.world.stages > 1 else {}
    mixed = sharding_policy(runtime.config.device_parameters)
    if mixed is not None:
        policies["mp_policy"] = mixed
    if runtime.config.device_parameters.cpu_offload:
        policies["offload_policy"] = CPUOffloadPolicy(pin_memory=runtime.world.device.type != "cpu")
    return policies
