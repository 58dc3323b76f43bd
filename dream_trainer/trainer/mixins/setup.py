"""SetupMixin: builds the models, parallelises and materialises them, then data, optimizers, schedulers and metrics.

The order is one list, `STAGES`, with the reason for each place; `describe()` prints it. Models are built on the meta
device: the constructor's computation runs for real, parameters do not exist until each rank cuts its own shard from a
full tensor that is freed before the next (dream_trainer.meta). At world size > 1 this mixin replicates; FSDPMixin
shards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn as nn

from dream_trainer.config.device_parameters import SetupConfigMixin
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.errors import HookError
from dream_trainer.meta.initialise import default_init
from dream_trainer.meta.realize import materialize, remember
from dream_trainer.meta.tape import Tape
from dream_trainer.modules.entry_points import enter_by_methods, enter_by_parts
from dream_trainer.modules.equal_weights import make_equal, real_tensors
from dream_trainer.modules.metrics import parts
from dream_trainer.modules.norm_precision import norms_in_float32
from dream_trainer.modules.precision import half_dtype, sharding_policy
from dream_trainer.modules.recurrent import keep_recurrent_weights_in_place
from dream_trainer.modules.sharding import (
    keeping_tied_and_frozen,
    move_what_is_whole,
    refuse_unsupported,
    shard_by_blocks,
)
from dream_trainer.optim.sharded import refuse_unshardable
from dream_trainer.trainer.abstract import AbstractTrainer
from dream_trainer.trainer.data_setup import connect_data
from dream_trainer.trainer.hooks import Hooks
from dream_trainer.trainer.rank_differences import refuse_different_optimizers
from dream_trainer.trainer.registry import refuse_private_models, refuse_returned, refuse_strangers
from dream_trainer.trainer.user_class.class_checks import refuse_unused_parallelism

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


STAGES: tuple[tuple[str, str], ...] = (
    ("configure_models", "first, so that every later stage has modules; parameters stay on the meta device"),
    ("init_weights", "recorded while tensors are whole, so that initial weights do not depend on the mesh"),
    ("tensor parallel", "first of what changes modules: it names layers as the model's author did"),
    ("activation checkpointing", "inside compilation, so that the compiler sees what is computed twice"),
    ("compile", "before sharding: a sharded block compiles to almost nothing"),
    (
        "fully_shard / replicate",
        "before anything is real, so that no rank ever holds more than its shard and one tensor",
    ),
    ("materialise", "each rank replays one full tensor at a time and keeps its own part"),
    ("load_pretrained", "over initialised weights, so that a partial load leaves nothing undefined"),
    ("configure_dataloaders", "before optimizers and schedulers, which may need total_steps"),
    ("configure_optimizers", "over real, sharded parameters, which they will update in place"),
    ("configure_schedulers", "over the optimizers, with total_steps known"),
    ("configure_metrics", "before a resume, which may restore them"),
    ("resume", "last, over everything it restores"),
)


@dataclass
class _Build:
    """What `configure` leaves to `setup`.

    Attributes:
        tape: The recorded initialisation.
        built_early: Models that were there before `configure_models`.
    """

    tape: Tape
    built_early: dict[str, nn.Module] = field(default_factory=dict)


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
        refuse_unused_parallelism(type(self), config.device_parameters)
        self._build = _Build(Tape(config.seed))

    def configure(self) -> None:
        """Builds the models and records their initialisation; nothing is on a device yet."""
        super().configure()
        before = set(vars(self))
        tape = self._build.tape
        self._build.built_early = self.named_models()
        with tape.recording():
            refuse_returned("configure_models", "self.model", self.configure_models())  # type: ignore[func-returns-value]
        refuse_private_models({name: value for name, value in vars(self).items() if name not in before})
        models = self.named_models()
        if not models:
            raise HookError("configure_models assigned no module with parameters to self.")
        if type(self).init_weights is Hooks.init_weights:
            for model in models.values():
                default_init(model, tape)
        else:
            with torch.no_grad(), tape.recording():
                self.init_weights()

    def setup(self) -> None:
        """Runs the stages after `configure`, up to but without the resume."""
        super().setup()
        models = self.named_models()
        refuse_unsupported(models, self.world.world_size)
        self._make_real_weights_equal()
        plan = remember(models, self._build.tape)
        devices = self.config.device_parameters
        if devices.tensor_parallel > 1:
            with keeping_tied_and_frozen(models):
                self.apply_tensor_parallel(self._mesh["tp"])
        if devices.activation_checkpointing != "none":
            self.apply_activation_checkpointing()
        if devices.compile:
            self.apply_compile()
        if self.world.world_size > 1:
            for model in self._parameterised_models():
                enter_by_methods(model, self.forward_methods(model), self.world.refuse_if_forbidden)
                keep_recurrent_weights_in_place(model)
                if half_dtype(devices) is not None:
                    norms_in_float32(model, self.world.device)
            self._shard_or_replicate()
        materialize(models, plan, self.world.parameter_device)
        del self._build  # its tape keeps what the constructors computed
        if self.world.world_size > 1:
            for model in models.values():
                if self.world.parameter_device != self.world.device:
                    move_what_is_whole(model, self.world.device)
                enter_by_parts(model, self.forward_methods)
            self._parallel.watch(models.values(), self.world, self.config.training_parameters.sync_policy)
        self.load_pretrained()
        connect_data(self)
        self._parallel.reshard()
        refuse_returned("configure_optimizers", "self.optimizer", self.configure_optimizers())  # type: ignore[func-returns-value]
        if not self.named_optimizers():
            raise HookError("configure_optimizers assigned no optimizer to self.")
        refuse_strangers(self, plan.parameters)
        for optimizer in self.named_optimizers().values():
            refuse_unshardable(optimizer)
        self.configure_schedulers()
        refuse_different_optimizers(self)
        self.configure_metrics()
        for metric in self.named_metrics().values():
            metric.to(self.world.device)
            for part in parts(metric):
                part.process_group = self.world.data_group

    def _make_real_weights_equal(self) -> None:
        """What was built before `configure_models`, or is real otherwise, may differ by rank; rank 0's counts."""
        early = [f"self.{name}" for name, model in self._build.built_early.items() if real_tensors({"": model})]
        differ = make_equal(real_tensors(self.named_models()), self.world)
        taken = f" Rank 0's values are taken on all ranks: {', '.join(differ[:3])} differed." if differ else ""
        if early:
            self.warn_once(
                "built early",
                f"{', '.join(early)} was built before configure_models, where no seed of the run's holds: unless its "
                f"weights come from elsewhere, each start has others. Build it in configure_models.{taken}",
            )
        elif differ:
            self.warn_once(
                "real weights", f"weights that configure_models made real are not the same on all ranks.{taken}"
            )

    @property
    def _mesh(self) -> DeviceMesh:
        mesh = self.world.mesh
        assert mesh is not None  # at world size > 1 there is one
        return mesh

    def _shard_or_replicate(self) -> None:
        mesh, shape = self._mesh, self.world.mesh_shape
        if shape.dp_shard == 1:
            self.apply_replicate(mesh["dp_replicate", "dp_shard"])
            return
        dims = ("dp_replicate", "dp_shard") if shape.dp_replicate > 1 else ("dp_shard",)
        self.apply_fully_shard({"mesh": mesh[dims]} | self._sharding_policies())

    def _sharding_policies(self) -> dict[str, Any]:
        """Keyword arguments of `fully_shard` beside the mesh."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        policies: dict[str, Any] = {}
        mixed = sharding_policy(self.config.device_parameters)
        if mixed is not None:
            policies["mp_policy"] = mixed
        if self.config.device_parameters.cpu_offload:
            policies["offload_policy"] = CPUOffloadPolicy(pin_memory=self.world.device.type != "cpu")
        return policies

    def apply_replicate(self, mesh: DeviceMesh) -> None:
        """Keeps every model whole on every rank; `step` averages its gradients.

        Args:
            mesh: Two dimensions, the second of size 1: `fully_shard` over it is replication.
        """
        super().apply_replicate(mesh)
        config = {"mesh": mesh} | self._sharding_policies()
        for model in self._trainable_models():
            shard_by_blocks(model, self.model_blocks(model), config, config)

    def _setup_stages(self) -> list[tuple[str, str]]:
        return [*super()._setup_stages(), *STAGES]
