"""The parallelisms of this package, as entries of the list that setup iterates over (parallel/axis.py)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from dream_trainer.compat.async_collectives import options_of_mode, waited, why_memory_is_not_shared
from dream_trainer.compat.pytorch import is_dtensor
from dream_trainer.errors import ConfigError, HookError
from dream_trainer.modules.class_change import Changed, change_class
from dream_trainer.parallel.axis import AxisSetup, MeshParallelism, Parallelism
from dream_trainer.parallel.mixture_of_experts import ExpertBalance, modules_of_experts, shard_experts, whole_experts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dream_trainer.distributed.world import World


def options_of_overlap(mode: str | None) -> dict[str, Any]:
    """The compiler's options that overlap products of split layers with their collectives, and those of `mode`."""
    return {**options_of_mode(mode), "_micro_pipeline_tp": True}


class Traced(Changed):
    """Calls its own forward from here: the compiler would pass over PyTorch's own files and layers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Waiting(Traced):
    """Is called with what collectives have finished, before its compiled code begins."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*map(waited, args), **{name: waited(value) for name, value in kwargs.items()})


class PipelineParallelism(MeshParallelism):
    """Stages of a model on different ranks."""

    def apply(self, setup: AxisSetup) -> None:
        """Makes the hook cut models; ties between stages are its own to keep."""
        self.split(setup, self.mesh(setup))


class TensorParallelism(MeshParallelism):
    """Layers divided among ranks that see the same data."""

    def apply(self, setup: AxisSetup) -> None:
        super().apply(setup)
        if not any(is_dtensor(parameter) for model in setup.models.values() for parameter in model.parameters()):
            names = " or ".join(f"self.{name}" for name in setup.models)
            raise HookError(
                f"{type(setup.hooks).__name__}.{self.hook} split no parameter of {names}: each of the "
                f"{self.value(setup.config)} ranks would do the whole work. Call parallelize_module(model, mesh, plan) "
                f"there with a plan that names layers as the model does, or set {self.setting}=1."
            )

    def compile_options(self, config: Any, world: World | None) -> dict[str, Any]:
        """Layers that are split cannot be of variable shapes, as None would make them."""
        parameters = config.compile_parameters
        if not parameters.async_tensor_parallel or world is None or world.mesh is None:
            return {"dynamic": False}
        group = world.mesh[self.dimension].get_group()
        if (why_not := why_memory_is_not_shared(group, world.device)) is not None:
            raise ConfigError(
                f"compile_parameters.async_tensor_parallel=True: {why_not}. It needs GPUs that read each other's "
                "memory, as those that NVLink connects do. Use False elsewhere."
            )
        return {"dynamic": False, "mode": None, "options": options_of_overlap(parameters.mode)}

    def compile_block(self, block: nn.Module, options: Mapping[str, Any]) -> bool:
        """Finishes collectives that are under way before compiled code begins."""
        change_class(block, Waiting)
        return False


class ContextParallelism(Parallelism):
    """Sequences divided among ranks; its mixin cuts each batch."""

    def compile_block(self, block: nn.Module, options: Mapping[str, Any]) -> bool:
        from dream_trainer.parallel.context_attention import compile_with_shared_attention

        compile_with_shared_attention(block, options["backend"], options["mode"], options["options"])
        return True


class ExpertParallelism(MeshParallelism):
    """Experts of mixtures divided among ranks that see different data."""

    def split(self, setup: AxisSetup, mesh: DeviceMesh) -> None:
        super().split(setup, mesh)
        models, world = setup.models, setup.world
        parts = modules_of_experts(models.values())
        if not any(world.all_gather_object(bool(parts))):
            raise HookError(
                f"{type(setup.hooks).__name__}.{self.hook} split no experts: each rank would have all of them. Call "
                f"split_experts there for each module of stacked weights, or set {self.setting}=1."
            )
        for part in parts:
            if world.data_copies > 1 and world.parameter_mesh is not None:  # ranks that share layers have the same rows
                vars(part)["exchange"].divide_rows(world.parameter_mesh["tp"])
            if setup.config.device_parameters.compile:  # sizes of the exchange change in each forward
                forward = torch.compiler.disable(type(part).forward)
                change_class(part, Changed, key="out of graphs", forward=forward)
        shard_experts(models, mesh, dict(setup.sharding))

    def connect(self, setup: AxisSetup) -> None:
        """Mixtures of experts balance them by the loads of all ranks, be they divided or not."""
        balance = ExpertBalance(setup.models, setup.world, setup.log)
        if balance:
            setup.parallel.after_steps.append(balance.update)
        balanced = [path for path, layer in balance.layers.items() if layer.balance_rate]
        if setup.world.workers > 1 and balanced:
            raise ConfigError(
                f"{balanced[0]} balances its experts by the loads of all ranks, and workers meet only every "
                f"{setup.config.local_sgd_parameters.every_n_steps} steps. Use balance_rate=0."
            )

    def whole(self, model: nn.Module) -> AbstractContextManager[None]:
        return whole_experts(model)


PIPELINE = PipelineParallelism(
    "pipeline parallel",
    "first of all changes to modules: other ranks' parts are gone before anything is done to them",
    order=10,
    setting="pipeline_parallel",
    dimension="pp",
    mixin="PipelineParallelMixin",
    hook="apply_pipeline_parallel",
    other_hooks=("pipeline_stages",),
)
TENSOR = TensorParallelism(
    "tensor parallel",
    "before what wraps modules: it names layers as the model's author did",
    order=20,
    setting="tensor_parallel",
    dimension="tp",
    mixin="TensorParallelMixin",
    hook="apply_tensor_parallel",
    advice="Split each model's layers there with parallelize_module.",
)
FLOAT8 = Parallelism(
    "float8",
    "over layers that are split already, whose parts have the sizes that count",
    order=30,
    setting="float8",
    mixin="Float8Mixin",
    hook="apply_float8",
)
CONTEXT = ContextParallelism(
    "context parallel",
    setting="context_parallel",
    dimension="cp",
    mixin="ContextParallelMixin",
    hook="cut_batch",
    advice="Cut each batch along its sequences there.",
)
EXPERT = ExpertParallelism(
    "expert parallel",
    "as tensor parallelism; experts are sharded here, inside of the blocks that are sharded later",
    order=40,
    setting="expert_parallel",
    dimension="ep",
    is_among_data=True,
    mixin="ExpertParallelMixin",
    hook="apply_expert_parallel",
)
RECOMPUTATION = Parallelism(
    "activation checkpointing",
    "inside compilation, so that the compiler sees what is computed twice",
    order=50,
    setting="activation_checkpointing",
    mixin="ActivationCheckpointingMixin",
    hook="apply_activation_checkpointing",
)
COMPILATION = Parallelism(
    "compile",
    "before sharding: a sharded block compiles to almost nothing",
    order=60,
    setting="compile",
    mixin="CompileMixin",
    hook="apply_compile",
)
AXES = (PIPELINE, TENSOR, FLOAT8, CONTEXT, EXPERT, RECOMPUTATION, COMPILATION)
