"""The stages of `SETUP` (mixins/setup.py) that change modules on meta, before they are sharded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dream_trainer.compat.pytorch import is_dtensor
from dream_trainer.distributed.world import lay_expert_mesh
from dream_trainer.errors import HookError
from dream_trainer.meta.realize import Plan
from dream_trainer.meta.tape import Tape
from dream_trainer.modules.parameter_marks import ParameterMarks
from dream_trainer.modules.precision import sharding_policy
from dream_trainer.parallel.expert_exchange import divide_rows, keep_out_of_graphs, modules_of_experts, shard_experts
from dream_trainer.parallel.sharded_model import shardable_bytes
from dream_trainer.parallel.sharding import keeping_tied_and_frozen
from dream_trainer.trainer.user_class.overrides import definers, is_ours

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from dream_trainer.config.device_parameters import DeviceParameters
    from dream_trainer.parallel.verify import Verification
    from dream_trainer.trainer.runtime import Runtime


@dataclass
class Build:
    """What one stage leaves to later ones."""

    tape: Tape | None
    built_early: dict[str, nn.Module] = field(default_factory=dict)
    assigned: set[str] = field(default_factory=set)
    plan: Plan | None = None
    frozen_draws: set[str] = field(default_factory=set)
    marks: ParameterMarks = field(default_factory=lambda: ParameterMarks({}))


def verified_against_now(runtime: Runtime) -> Verification | None:
    """Of models with what they are now, in one piece, where ranks will share that."""
    from dream_trainer.parallel.verify import Verification, is_verifiable

    devices: DeviceParameters = runtime.config.device_parameters
    if not is_verifiable(devices):
        return None

    def is_in_step() -> bool:
        return runtime.state.training and runtime.session.is_ready and runtime.accumulation.is_open

    models, world, blocks_of = runtime.registry.models(), runtime.world, runtime.hooks.model_blocks
    return Verification(models, blocks_of, devices, world, runtime.warn_once, is_in_step, lambda: runtime.takeover)


def cut_into_stages(runtime: Runtime, build: Build) -> None:
    if runtime.world.stages > 1:
        runtime.hooks.apply_pipeline_parallel(parameter_mesh(runtime)["pp"])


def split_layers(runtime: Runtime, build: Build) -> None:
    ranks, models = runtime.config.device_parameters.tensor_parallel, runtime.registry.models()
    if ranks == 1:
        return
    with keeping_tied_and_frozen(models):
        runtime.hooks.apply_tensor_parallel(parameter_mesh(runtime)["tp"])
    build.marks.put_back(models)
    if not any(is_dtensor(parameter) for model in models.values() for parameter in model.parameters()):
        names = " or ".join(f"self.{name}" for name in models)
        raise HookError(
            f"{type(runtime.hooks).__name__}.apply_tensor_parallel split no parameter of {names}: each of the {ranks} "
            "ranks would do the whole work. Split layers there with parallelize_module(model, mesh, plan), whose plan "
            "names them as the model does, or set tensor_parallel=1."
        )


def split_mixtures(runtime: Runtime, build: Build) -> None:
    ranks, models = runtime.config.device_parameters.expert_parallel, runtime.registry.models()
    if ranks == 1:
        return
    mesh = lay_expert_mesh(runtime.world, ranks)
    with keeping_tied_and_frozen(models):
        runtime.hooks.apply_expert_parallel(mesh["ep"])
    build.marks.put_back(models)
    if not any(runtime.world.all_gather_object(bool(modules_of_experts(models.values())))):
        raise HookError(
            f"{type(runtime.hooks).__name__}.apply_expert_parallel split no experts: each of the {ranks} ranks would "
            "have all of them. Call split_experts there for each module of stacked weights, or set expert_parallel=1."
        )
    if runtime.world.data_copies > 1:
        divide_rows(models.values(), parameter_mesh(runtime)["tp"])
    if runtime.config.device_parameters.compile:
        keep_out_of_graphs(models.values())
    shard_experts(models, mesh, sharding_keywords(runtime))
    gradients, copies = runtime.parallel.gradients, mesh["dp_replicate"]
    gradients.shares_experts, gradients.expert_copies = True, copies.get_group() if copies.size() > 1 else None


def sharding_keywords(runtime: Runtime) -> dict[str, Any]:
    """Keyword arguments of `fully_shard` beside the mesh."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    # Of a pipeline's stage gathered once for all micro-batches of a batch: given back between them, some schedules'
    # gradients are wrong without an error.
    policies: dict[str, Any] = {"reshard_after_forward": False} if runtime.world.stages > 1 else {}
    mixed = sharding_policy(runtime.config.device_parameters)
    if mixed is not None:
        policies["mp_policy"] = mixed
    if runtime.config.device_parameters.cpu_offload:
        policies["offload_policy"] = CPUOffloadPolicy(pin_memory=runtime.world.device.type != "cpu")
    return policies


def multiply_in_float8(runtime: Runtime, build: Build) -> None:
    if runtime.config.device_parameters.float8 != "none":
        runtime.hooks.apply_float8()


def recompute_blocks(runtime: Runtime, build: Build) -> None:
    if runtime.config.device_parameters.activation_checkpointing != "none":
        runtime.hooks.apply_activation_checkpointing()


def compile_blocks(runtime: Runtime, build: Build) -> None:
    if runtime.config.device_parameters.compile:
        runtime.hooks.apply_compile()


def is_whole_in_steps(runtime: Runtime, model: nn.Module) -> bool:
    """Whether a model that FSDPMixin shards is small enough to be whole in steps, and nothing asks for blocks."""
    if not runtime.hooks._shards_parameters or runtime.world.parameter_shape.dp_shard == 1:
        return False
    config: Any = runtime.config  # which has the field that FSDPMixin asks for
    devices, parameters = config.device_parameters, config.fsdp_parameters
    is_plain = devices.pipeline_parallel * devices.tensor_parallel * devices.expert_parallel == 1
    asks_for_blocks = parameters.separate_reduce_group or parameters.symmetric_memory or devices.cpu_offload
    is_by_hand = not all(is_ours(part) for part in definers(type(runtime.hooks), "apply_fully_shard"))
    is_small = shardable_bytes(model) < parameters.min_group_mib * 2**20
    return is_plain and not asks_for_blocks and devices.float8 == "none" and not is_by_hand and is_small


def parameter_mesh(runtime: Runtime) -> DeviceMesh:
    mesh = runtime.world.parameter_mesh
    assert mesh is not None  # at world size > 1 there is one
    return mesh
