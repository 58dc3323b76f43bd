"""PipelineParallelMixin: each rank holds some of the model's layers, and micro-batches go from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dream_trainer.compat.pytorch import AnyBatchNorm
from dream_trainer.config.device_parameters import PipelineParallelConfigMixin, PipelineParallelParameters
from dream_trainer.errors import ConfigError, StepError
from dream_trainer.modules.precision import half_dtype, without_autocast
from dream_trainer.parallel.axis import PIPELINE, Parallelism
from dream_trainer.parallel.sharding import fsdp_modules, is_cut, remember_cut, ties_of
from dream_trainer.trainer.abstract import AbstractTrainer
from dream_trainer.trainer.step.tied_gradients import connect_copies

if TYPE_CHECKING:
    from dream_trainer.config.device_parameters import DeviceParameters
    from dream_trainer.parallel.pipeline import Pipeline, Stages


class PipelineParallelMixin(AbstractTrainer):
    """Pipeline-parallel training. Override `pipeline_stages` to choose each stage's parts.

    The model's forward reads names that its stage may lack: lists then omit the blocks of other stages, and other names
    are None. Its return value there is the next stage's argument.
    """

    _config_class: ClassVar[type | None] = PipelineParallelConfigMixin
    _parallelism: ClassVar[Parallelism | None] = PIPELINE

    __pipelines: Mapping[nn.Module, Pipeline] = MappingProxyType({})

    def model_blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """As without a pipeline; of a model that was cut, those that are left, be it a single one."""
        if is_cut(model):
            stages: Stages = self._runtime.parallel.stages[model]
            return stages.kept_blocks
        return super().model_blocks(model)

    def pipeline_stages(self, model: nn.Module, n_stages: int) -> Sequence[Sequence[str]] | None:
        """The names of each stage's parts of `model` (as in `named_modules`) and parameters. Each parameter is in one
        stage. None keeps the model whole on each rank.

        Default: equal numbers of blocks, by `model_blocks`. Modules registered before the blocks are in the first
        stage, later ones in the last, and those between two stages' blocks in the earlier one. None for a model of
        fewer blocks.
        """
        from dream_trainer.parallel.pipeline_stages import even_stages

        blocks = self.model_blocks(model)
        return even_stages(model, blocks, n_stages) if len(blocks) >= n_stages else None

    def apply_pipeline_parallel(self, mesh: DeviceMesh) -> None:
        """Cuts each model that is trained down to the stages of this rank. Those that `pipeline_stages` gives None for
        stay whole on each rank, and so do frozen ones, such as a teacher.

        Args:
            mesh: The ranks of the pipeline, in order.

        Raises:
            ConfigError: No trained model can be cut into that number of stages, two stages share a parameter, or
                the config asks for a feature that a pipeline does not support.
            HookError: `pipeline_stages` does not name each parameter once.
        """
        from dream_trainer.compat.pipelining import ranks_of_stages
        from dream_trainer.parallel.pipeline import Stages
        from dream_trainer.parallel.pipeline_stages import keep_only, number_lists, stages_of_models

        for callback in self.callbacks:
            if callback.needs_whole_models:
                raise ConfigError(
                    f"{type(callback).__name__} with pipeline_parallel={mesh.size()} is not supported: it needs whole "
                    "models. Leave it out, or use pipeline_parallel=1."
                )
        parameters: PipelineParallelParameters = self._runtime.config.pipeline_parallel_parameters
        ranks = ranks_of_stages(parameters.schedule, mesh.size(), parameters.stages_of_each_rank)
        here = self.world.stage_rank
        cuts = stages_of_models(self.named_models(), self.pipeline_stages, self.model_blocks, len(ranks))
        for model, stages in cuts.items():
            of_samples = [(name, part) for name, part in model.named_modules() if isinstance(part, AnyBatchNorm)]
            # Frozen ones are taken to be in evaluation.
            norms = [name for name, part in of_samples if part.weight is None or part.weight.requires_grad]
            if norms:
                self.warn_once(
                    "batch norms in stages",
                    f"{', '.join(norms[:3])} of {type(model).__name__} normalise each micro-batch of a pipeline by "
                    "itself, but one process normalises its whole batch: results depend on microbatches. Use norms "
                    "that act on each sample, such as nn.GroupNorm or nn.LayerNorm.",
                )
            number_lists(model, stages)
            blocks = self.model_blocks(model)
            remember_cut(model, ties_of(model, stages, ranks, here), blocks)
            keep_only(model, [name for names, of in zip(stages, ranks, strict=True) if of == here for name in names])
            kept = {id(module) for module in model.modules()}
            self._runtime.parallel.stages[model] = Stages(stages, ranks, [one for one in blocks if id(one) in kept])

    def _finish_setup(self) -> None:
        super()._finish_setup()
        if self.world.stages == 1:
            return
        from dream_trainer.parallel.pipeline import Pipeline

        parameters: PipelineParallelParameters = self._runtime.config.pipeline_parallel_parameters
        microbatches = parameters.microbatches or 2 * self.world.stages
        connect_copies(self._runtime.registry, self.world, self._runtime.parallel.gradients)
        models, stages_of_models = self.named_models(), self._runtime.parallel.stages.values()
        whole = [model for model in models.values() if not is_cut(model)]
        self._runtime.accumulation.goes_back_here = self.world.stage_rank == next(iter(stages_of_models)).ranks[-1]
        self._runtime.accumulation.trains_whole_models = any(map(self.get_optimizers_by_model, whole))
        pipelines: dict[nn.Module, Pipeline] = {}
        verification = self._runtime.parallel.verification
        devices: DeviceParameters = self._runtime.config.device_parameters
        is_plain = devices.activation_checkpointing == "none" and devices.float8 == "none" and not devices.compile
        for name, model in models.items():
            if is_cut(model):
                is_cast = half_dtype(devices) is not None and bool(fsdp_modules(model))
                pipelines[model] = Pipeline(
                    model,
                    self._runtime.parallel.stages[model],
                    self.world,
                    name=f"self.{name}",
                    schedule=parameters.schedule,
                    microbatches=microbatches,
                    # Ranks that share experts run them as often, and may have batches of other sizes.
                    most_without_gradients=1 if devices.expert_parallel > 1 else microbatches,
                    backward_context=without_autocast(devices, self.world.device)(),
                    output_dtype=torch.float32 if is_cast else None,
                    aside=self._runtime.outside_forward,
                    beside=pipelines,
                    splits_backwards=is_plain,  # gradients of weights apart from those of inputs
                    whole=whole if parameters.computes_weights_apart else [],
                    verify=None if verification is None else partial(verification.run, name, model),
                )
        self.__pipelines = pipelines

    def forward_backward(
        self,
        model: nn.Module,
        inputs: tuple[Any, ...],
        targets: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        weight: Callable[[Any], Tensor | float] | Tensor | float | None = None,
    ) -> Tensor:
        """See MixinHooks; with stages, the batch's micro-batches pass through them."""
        pipeline = self.__pipelines.get(model)
        if pipeline is None:
            return super().forward_backward(model, inputs, targets, loss_fn, weight=weight)
        if weight is not None and not callable(weight):
            raise StepError(
                f"forward_backward() was given weight={type(weight).__name__} under pipeline_parallel="
                f"{self.world.stages}, but each micro-batch needs its own. Pass a function of targets, as in "
                "weight=lambda targets: (targets != -100).sum()."
            )
        pipeline.refuse_inside_another()
        batch: tuple[Any, dict[str, Any]] = (inputs, {})
        if not self.training or not torch.is_grad_enabled():
            return pipeline.evaluate(batch, targets, loss_fn, weight)
        weights = pipeline.accept(batch, targets, weight)
        total = None if weights is None else sum(weights[1:], start=weights[0])
        accumulation, own_time = self._runtime.accumulation, self._runtime.parallel.gradients.own_time
        reduces, scale = accumulation.is_last, accumulation.loss_scale
        scaled = None if scale is None else partial(scale.scaled, is_weighted=weights is not None)

        def run() -> Tensor:
            with own_time:  # a stage mostly waits for other stages
                return pipeline.train(batch, targets, loss_fn, weights, scaled=scaled, reduces=reduces)

        return accumulation.run_schedule(run, total, model)
