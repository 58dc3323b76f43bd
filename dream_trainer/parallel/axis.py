"""Parallelism: one way to divide a model's work, as one object. Setup, messages and descriptions iterate over the list.
A mixin brings its own as `_parallelism`; so does one from another package (docs/your-own-parallelism.md). Those of this
package are `AXES`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dream_trainer.checks import divisors, refuse, spell
from dream_trainer.compat.compiler import options_of_mode, waited, why_memory_is_not_shared
from dream_trainer.compat.pytorch import is_dtensor
from dream_trainer.distributed.world import World, own_group
from dream_trainer.errors import ConfigError, HookError
from dream_trainer.gradient_state import ModelPart
from dream_trainer.modules.class_change import Changed, change_class
from dream_trainer.modules.forward_state import ParameterMarks
from dream_trainer.parallel.mixture_of_experts import ExpertBalance, modules_of_experts, shard_experts, whole_experts
from dream_trainer.parallel.parallel_models import ParallelModels
from dream_trainer.parallel.sharding import keeping_tied_and_frozen


@dataclass(frozen=True)
class AxisSetup:
    """The objects that a parallelism sets up."""

    models: Mapping[str, nn.Module]  # by the trainer's attributes
    config: Any  # the trainer's
    world: World
    parallel: ParallelModels
    hooks: Any  # the trainer's methods that its author may override
    marks: ParameterMarks  # of parameters, to put back where they were replaced
    sharding: Mapping[str, Any]  # keyword arguments of `fully_shard`
    log: Callable[[dict[str, Any]], None] | None  # numbers of the running step; None where nothing is logged


@dataclass(frozen=True)
class Parallelism:
    """One way to divide a model's work among ranks, or to change how its modules compute.

    Attributes:
        name: Name in messages and descriptions.
        order: Its place among those that change modules, before these are sharded; None if it changes none. Those of
            this package: 10 pipeline, 20 tensor, 30 float8, 40 expert parallelism, 50 activation checkpointing, 60
            compilation.
        reason: Why it has this place.
        setting: The field of `device_parameters` that turns it on; "" if `value` asks elsewhere.
        dimension: The mesh dimension of its ranks; "" if it has none.
        is_among_data: Whether its ranks are some of those that see different data. Its parameters then get a separate
            mesh, and their gradients are already sums over these ranks.
        mixin: The class that brings it, for messages.
        hook: The trainer's method that does it. A MeshParallelism passes it the mesh of `dimension`.
        advice: Remedy for a hook that is not overridden; "" if the mixin has a default.
        other_hooks: Further methods that only the mixin calls.
    """

    name: str
    reason: str = ""
    order: int | None = None
    setting: str = ""
    dimension: str = ""
    is_among_data: bool = False
    mixin: str = ""
    hook: str = ""
    advice: str = ""
    other_hooks: tuple[str, ...] = ()

    def value(self, config: Any) -> Any:
        """The config's value: a number of ranks if there is a dimension; 1, False and "none" are off."""
        return vars(config.device_parameters)[self.setting]

    def is_on(self, config: Any) -> bool:
        return (value := self.value(config)) is True or value not in (1, False, "none")

    def validate(self, trainer_class: type, config: Any) -> None:
        """Called where it is on, before launch. `trainer_class` may lack the mixin that brings this.

        Raises:
            ConfigError: The class cannot do what the config asks for.
        """
        bringer = next((part for part in trainer_class.__mro__ if vars(part).get("_parallelism") == self), None)
        asked = f"{self.setting}={self.value(config)!r}, but {trainer_class.__name__}"
        leave = f"Or leave it at {getattr(type(config.device_parameters), self.setting, 1)!r}."
        if bringer is None:
            raise ConfigError(f"{asked} has no {self.mixin}. Add it to the trainer's bases. {leave}")
        if self.advice and getattr(trainer_class, self.hook) is vars(bringer)[self.hook]:
            raise ConfigError(f"{asked} does not override {self.hook}. {self.advice} {leave}")

    def apply(self, setup: AxisSetup) -> None:
        """Changes the models, which are on meta; called where it is on. Default: the hook does it."""
        getattr(setup.hooks, self.hook)()

    def connect(self, setup: AxisSetup) -> None:
        """The models are real; called whether it is on or not."""

    def whole(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, each rank has the weights that it lacks of `model`, and forwards do not communicate. No gradients."""
        return nullcontext()

    def compile_options(self, config: Any, world: World | None) -> dict[str, Any]:
        """Arguments of `nn.Module.compile` that replace the config's while this parallelism is on."""
        return {}

    def compile_block(self, block: nn.Module, options: Mapping[str, Any]) -> bool:
        """Prepares `block` to be compiled, if this parallelism is on, or compiles it; returns whether it did that."""
        return False


class MeshParallelism(Parallelism):
    """One whose ranks have parts of the models' parameters: its hook splits them over the mesh."""

    def apply(self, setup: AxisSetup) -> None:
        """Makes the hook split parameters; what was tied, frozen or marked before is so after it."""
        mesh = self.mesh(setup)
        with keeping_tied_and_frozen(setup.models):
            self.split(setup, mesh)
        setup.marks.put_back(setup.models)

    def split(self, setup: AxisSetup, mesh: DeviceMesh) -> None:
        """Default: calls the hook with the mesh of one dimension."""
        getattr(setup.hooks, self.hook)(mesh[self.dimension])

    def mesh(self, setup: AxisSetup) -> DeviceMesh:
        """The parameters' mesh; for ranks that see different data, a new mesh that contains the dimension."""
        if not self.is_among_data:
            assert setup.world.parameter_mesh is not None  # there are several ranks
            return setup.world.parameter_mesh
        world, degree = setup.world, self.value(setup.config)
        mesh = lay_mesh_among_data(world, self.dimension, degree)
        copies: ProcessGroup | None = None  # the ranks with this one's place among those of the dimension
        if mesh["dp_shard"].size() > 1:
            groups = mesh.mesh.permute(0, 3, 1, 2).flatten(2).flatten(0, 1)
            copies = own_group(groups.tolist())
            world.further_groups.append(copies)
        elif mesh["dp_replicate"].size() > 1:
            copies = mesh["dp_replicate"].get_group()
        setup.parallel.gradients.parts[self.dimension] = ModelPart(copies, degree / world.data_copies)
        return mesh


def lay_mesh_among_data(world: World, dimension: str, degree: int) -> DeviceMesh:
    """A mesh whose last dimension has neighbours of those ranks that see different data; every rank calls it."""
    _, copies, shards, *_ = world.parameter_shape
    n_ranks = shards if shards > 1 else copies
    refuse(
        n_ranks % degree,
        f"{degree} ranks of {dimension} do not divide the {n_ranks} of {'dp_shard' if shards > 1 else 'dp_replicate'}, "
        f"among which they are. Use {spell(divisors(n_ranks))}.",
    )
    # Shards are cut first, and copies where nothing is sharded.
    shape = (copies, shards // degree, degree) if shards > 1 else (copies // degree, 1, degree)
    ranks = torch.arange(world.world_size).view(world.stages, *shape, world.mesh_shape.tp)
    ranks = ranks.movedim(-1, 2).flatten(1, 2)
    mesh = DeviceMesh(world.device.type, ranks, mesh_dim_names=("pp", "dp_replicate", "dp_shard", dimension))
    world.further_groups.extend(mesh.get_all_groups())  # so that they take its time-outs
    return mesh


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
                f"{type(setup.hooks).__name__}.{self.hook} split no experts: each rank would have all of them. Use "
                "layers of dream_trainer.modules.MoE, or call split_experts there for each module of stacked weights, "
                f"or set {self.setting}=1."
            )
        for part in parts:
            if world.data_copies > 1 and world.parameter_mesh is not None:  # ranks that share layers have the same rows
                vars(part)["exchange"].divide_rows(world.parameter_mesh["tp"])
            if setup.config.device_parameters.compile:  # sizes of the exchange change in each forward
                change_class(part, Changed, key="out of graphs", forward=torch.compiler.disable(type(part).forward))
        shard_experts(models, mesh, dict(setup.sharding))

    def connect(self, setup: AxisSetup) -> None:
        """Mixtures of experts balance them by the loads of all ranks, be they divided or not."""
        balance = ExpertBalance(setup.models, setup.world, setup.log)
        if balance.layers or balance.logged:
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
