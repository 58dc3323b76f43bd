"""The stages of `SETUP` (mixins/setup.py) that change modules on meta, before they are sharded."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from dream_trainer.meta.realize import Plan
from dream_trainer.meta.tape import Tape
from dream_trainer.modules.forward_state import ParameterMarks
from dream_trainer.modules.precision import sharding_policy
from dream_trainer.parallel.axis import AxisSetup, MeshParallelism, Parallelism
from dream_trainer.parallel.sharded_model import shardable_bytes
from dream_trainer.trainer.hooks import MixinHooks
from dream_trainer.trainer.user_class import definers, is_ours

if TYPE_CHECKING:
    from torch import nn

    from dream_trainer.config.device_parameters import DeviceParameters
    from dream_trainer.parallel.verify import Verification
    from dream_trainer.trainer.runtime import Runtime


@dataclass
class Build:
    """Results that one stage passes to later ones."""

    tape: Tape | None
    assigned: set[str] = field(default_factory=set)
    plan: Plan | None = None
    frozen_draws: set[str] = field(default_factory=set)
    marks: ParameterMarks = field(default_factory=lambda: ParameterMarks({}))


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


def is_whole_in_steps(runtime: Runtime, model: nn.Module) -> bool:
    """Whether a model that FSDPMixin shards is small enough to be whole in steps, and nothing asks for blocks."""
    if not runtime.hooks._shards_parameters or runtime.world.parameter_shape.dp_shard == 1:
        return False
    config: Any = runtime.config  # which has the field that FSDPMixin asks for
    devices, parameters = config.device_parameters, config.fsdp_parameters
    is_plain = not any(isinstance(axis, MeshParallelism) for axis in runtime.parallel.active_axes(config))
    asks_for_blocks = parameters.separate_reduce_group or parameters.symmetric_memory or devices.cpu_offload
    is_by_hand = not all(is_ours(part) for part in definers(type(runtime.hooks), "apply_fully_shard"))
    is_small = shardable_bytes(model) < parameters.min_group_mib * 2**20
    return is_plain and not asks_for_blocks and devices.float8 == "none" and not is_by_hand and is_small
