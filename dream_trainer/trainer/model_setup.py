"""The stages of `SETUP` (mixins/setup.py) that change modules on meta, before they are sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dream_trainer.errors import HookError
from dream_trainer.modules.sharded_model import shardable_bytes
from dream_trainer.modules.sharding import keeping_tied_and_frozen
from dream_trainer.trainer.user_class.overrides import definers, is_ours

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from dream_trainer.trainer.abstract import AbstractTrainer
    from dream_trainer.trainer.mixins.setup import SetupMixin
    from dream_trainer.trainer.verify import Verification


def verified_against_now(trainer: SetupMixin) -> Verification | None:
    """Of models with what they are now, in one piece, where ranks will share that."""
    from dream_trainer.trainer.verify import Verification, is_verifiable

    return Verification(trainer) if is_verifiable(trainer.config.device_parameters) else None


def cut_into_stages(trainer: SetupMixin) -> None:
    if trainer.world.stages > 1:
        trainer.apply_pipeline_parallel(parameter_mesh(trainer)["pp"])


def split_layers(trainer: SetupMixin) -> None:
    ranks, models = trainer.config.device_parameters.tensor_parallel, trainer.named_models()
    if ranks == 1:
        return
    from torch.distributed.tensor import DTensor

    with keeping_tied_and_frozen(models):
        trainer.apply_tensor_parallel(parameter_mesh(trainer)["tp"])
    trainer._build.marks.put_back(models)
    if not any(isinstance(parameter, DTensor) for model in models.values() for parameter in model.parameters()):
        names = " or ".join(f"self.{name}" for name in models)
        raise HookError(
            f"{type(trainer).__name__}.apply_tensor_parallel split no parameter of {names}: each of the {ranks} ranks "
            "would do the whole work. Split layers there with parallelize_module(model, mesh, plan), whose plan names "
            "them as the model does, or set tensor_parallel=1."
        )


def split_mixtures(trainer: SetupMixin) -> None:
    ranks, models = trainer.config.device_parameters.expert_parallel, trainer.named_models()
    if ranks == 1:
        return
    from dream_trainer.distributed.world import lay_expert_mesh
    from dream_trainer.modules.expert_sharding import divide_rows, keep_out_of_graphs, modules_of_experts, shard_experts

    mesh = lay_expert_mesh(trainer.world, ranks)
    with keeping_tied_and_frozen(models):
        trainer.apply_expert_parallel(mesh["ep"])
    trainer._build.marks.put_back(models)
    if not any(trainer.world.all_gather_object(bool(modules_of_experts(models.values())))):
        raise HookError(
            f"{type(trainer).__name__}.apply_expert_parallel split no experts: each of the {ranks} ranks would have "
            "all of them. Call split_experts there for each module of stacked weights, or set expert_parallel=1."
        )
    if trainer.world.data_copies > 1:
        divide_rows(models.values(), parameter_mesh(trainer)["tp"])
    if trainer.config.device_parameters.compile:
        keep_out_of_graphs(models.values())
    shard_experts(models, mesh, trainer._sharding_policies())
    gradients, copies = trainer._parallel.gradients, mesh["dp_replicate"]
    gradients.shares_experts, gradients.expert_copies = True, copies.get_group() if copies.size() > 1 else None


def multiply_in_float8(trainer: SetupMixin) -> None:
    if trainer.config.device_parameters.float8 != "none":
        trainer.apply_float8()


def recompute_blocks(trainer: SetupMixin) -> None:
    if trainer.config.device_parameters.activation_checkpointing != "none":
        trainer.apply_activation_checkpointing()


def compile_blocks(trainer: SetupMixin) -> None:
    if trainer.config.device_parameters.compile:
        trainer.apply_compile()


def is_whole_in_steps(trainer: AbstractTrainer, model: nn.Module) -> bool:
    """Whether a model that FSDPMixin shards is small enough to be whole in steps, and nothing asks for blocks."""
    if not trainer._shards_parameters or trainer.world.parameter_shape.dp_shard == 1:
        return False
    config: Any = trainer.config  # which has the field that FSDPMixin asks for
    devices, parameters = config.device_parameters, config.fsdp_parameters
    is_plain = devices.pipeline_parallel * devices.tensor_parallel * devices.expert_parallel == 1
    asks_for_blocks = parameters.separate_reduce_group or parameters.symmetric_memory or devices.cpu_offload
    is_by_hand = not all(is_ours(part) for part in definers(type(trainer), "apply_fully_shard"))
    is_small = shardable_bytes(model) < parameters.min_group_mib * 2**20
    return is_plain and not asks_for_blocks and devices.float8 == "none" and not is_by_hand and is_small


def parameter_mesh(trainer: SetupMixin) -> DeviceMesh:
    mesh = trainer.world.parameter_mesh
    assert mesh is not None  # at world size > 1 there is one
    return mesh
