"""Parameters of sharding, of each kind of parallelism, of float8, activation checkpointing and compilation."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

from dream_trainer.checks import check_between, check_names, refuse, spell
from dream_trainer.compat.pytorch import EXPENSIVE_OPERATIONS, operation
from dream_trainer.config.parameter_class import PositiveFloat, PositiveInt, parameters
from dream_trainer.errors import ConfigError

ContextAttention = Literal["gathered", "ulysses"]
PipelineSchedule = Literal["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
_INTERLEAVED = ("Interleaved1F1B", "InterleavedZeroBubble")


@parameters
class FSDPParameters:
    """How models are sharded."""

    min_group_mib: Annotated[float, partial(check_between, low=0)] = 256
    """Models with fewer MiB of parameters are sharded as one group, which is gathered for whole steps: within a step
    their parameters are whole, plain tensors. Larger models are gathered block by block, as are all models with 0, and
    with tensor, pipeline or expert parallelism, float8 or `cpu_offload`."""

    reshard_after_forward: bool | int = True
    """Whether blocks free their gathered parameters after forward. True saves memory, False saves a second gather in
    backward, an int keeps them sharded over that many ranks of a host."""

    def __post_init__(self) -> None:
        value = self.reshard_after_forward
        refuse(
            not isinstance(value, int) or (value < 2 and not isinstance(value, bool)),
            f"reshard_after_forward={value!r} is not understood. Use True, False or an integer above 1.",
        )


@dataclass(kw_only=True)
class FSDPConfigMixin:
    fsdp_parameters: FSDPParameters = field(default_factory=FSDPParameters)


@parameters
class PipelineParallelParameters:
    """How a batch passes through the stages; `device_parameters.pipeline_parallel` is their number."""

    schedule: PipelineSchedule = "1F1B"
    """Order of work in the stages. "1F1B": each stage runs backward of a micro-batch as soon as possible, and keeps at
    most one micro-batch's activations per stage of the pipeline (PipeDream-Flush; Narayanan et al., 2021,
    arXiv:2006.09503). "GPipe": all forwards come first, and a stage keeps the activations of all micro-batches (Huang
    et al., 2019, arXiv:1811.06965). The others have several stages per rank: they wait less and send more.
    "Interleaved1F1B" (Narayanan et al.). "InterleavedZeroBubble" also computes weight gradients during waits, like the
    V-shaped "ZBVZeroBubble" (Qi et al., 2023, arXiv:2401.10241), "DualPipeV" (DeepSeek-AI, 2024, arXiv:2412.19437)."""
    stages_per_rank: PositiveInt | None = None
    """Stages per rank of an interleaved schedule, at least 2. None is 2. V-shaped schedules have 2, the first two 1."""
    microbatches: PositiveInt | None = None
    """Equal parts that `forward_backward` cuts each batch into, at least one per stage. None is two per stage. A stage
    waits (stages - 1) / (microbatches + stages - 1) of the time."""

    def __post_init__(self) -> None:
        given, is_interleaved = self.stages_per_rank, self.schedule in _INTERLEAVED
        wanted = "2 or more" if is_interleaved else str(self.stages_of_each_rank)
        refuse(
            given not in (None, self.stages_of_each_rank) or (is_interleaved and given == 1),
            f"stages_per_rank={given} with schedule={self.schedule!r}: it has {wanted}. Leave stages_per_rank out, "
            f"or choose {spell(map(repr, _INTERLEAVED))}, which may have any number of stages from 2 on.",
        )

    @property
    def stages_of_each_rank(self) -> int:
        if self.schedule in _INTERLEAVED:
            return self.stages_per_rank or 2
        return 1 if self.schedule in ("1F1B", "GPipe") else 2

    @property
    def computes_weights_apart(self) -> bool:
        """Whether gradients of weights are computed apart from those that the previous stage waits for."""
        return self.schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@dataclass(kw_only=True)
class PipelineParallelConfigMixin:
    pipeline_parallel_parameters: PipelineParallelParameters = field(default_factory=PipelineParallelParameters)


@parameters
class ContextParallelParameters:
    """How attention sees the whole sequence; `device_parameters.context_parallel` ranks share it."""

    attention: ContextAttention = "gathered"
    """"gathered": each rank gathers all keys and values, and attends with its own queries, laid out for equal causal
    work (Llama 3, 2024, arXiv:2407.21783). Lengths must be multiples of twice `context_parallel`. "ulysses": each rank
    attends with its share of the heads over all positions (Jacobs et al., 2023, arXiv:2309.14509). `context_parallel`
    must divide lengths and both numbers of heads."""


@dataclass(kw_only=True)
class ContextParallelConfigMixin:
    context_parallel_parameters: ContextParallelParameters = field(default_factory=ContextParallelParameters)


@parameters
class TensorParallelParameters:
    """Options of a tensor-parallel plan in addition to splitting layers; `apply_tensor_parallel` reads them."""

    sequence_parallel: bool = True
    """Whether the plan should split norms and residuals along the sequence. `tensor_parallel` must then divide its
    length (Korthikanti et al., 2022, arXiv:2205.05198)."""
    loss_parallel: bool = False
    """Whether logits stay split over the vocabulary. `training_step` and `validation_step` then run inside PyTorch's
    `loss_parallel`, so `cross_entropy` takes them as they are."""


@dataclass(kw_only=True)
class TensorParallelConfigMixin:
    tensor_parallel_parameters: TensorParallelParameters = field(default_factory=TensorParallelParameters)


@parameters
class LocalSGDParameters:
    """How groups of ranks (workers) train independently, and how their models are combined."""

    every_n_steps: PositiveInt = 100
    """Optimizer steps of a round. The workers' parameters are averaged at its end: when `global_step` is a multiple of
    this."""
    workers: PositiveInt | Literal["hosts"] = "hosts"
    """Number of workers (groups of neighbouring ranks). "hosts" makes each host a worker."""
    outer: Literal["sgd"] | None = None
    """Use of the average. None: it becomes the model (Local SGD). "sgd": the parameters at the start of the round minus
    the average are a gradient, and SGD applies it to the former (DiLoCo)."""
    outer_lr: PositiveFloat = 0.7
    """Learning rate of `outer="sgd"`. This and the next default come from the DiLoCo paper."""
    outer_momentum: Annotated[float, partial(check_between, low=0.0, high=1.0, below=True)] = 0.9
    """Momentum of `outer="sgd"`, from 0 to below 1."""
    nesterov: bool = True
    """Whether that momentum is Nesterov's."""


@dataclass(kw_only=True)
class LocalSGDConfigMixin:
    local_sgd_parameters: LocalSGDParameters = field(default_factory=LocalSGDParameters)


@parameters
class Float8Parameters:
    """Which layers compute in float8, and how; `device_parameters.float8` enables it."""

    skip: Annotated[tuple[str, ...], partial(check_names, example="router$", are_patterns=True)] = ("router$",)
    """Regular expressions searched for in a layer's name. Matching layers are not converted, nor is anything outside
    `model_blocks`, such as the head. `"wk$"` finds `layers.0.attention.wk`. Default: routers of mixtures, since small
    differences make them choose other experts."""
    all_gather: bool = False
    """Whether the all-gather of blocks sends shards in float8, a quarter of float32's bytes. Needs
    `float8="tensorwise"`. No effect if parameters are not sharded."""
    emulate: bool = False
    """Whether products are computed in float32 from operands rounded to float8. Works on any device, slowly, to see the
    effect of float8 on training."""


@dataclass(kw_only=True)
class Float8ConfigMixin:
    float8_parameters: Float8Parameters = field(default_factory=Float8Parameters)


@parameters
class ActivationCheckpointingParameters:
    """Which activations are kept."""

    keep: Annotated[tuple[str, ...], partial(check_names, example="aten.mm.default")] = EXPENSIVE_OPERATIONS
    """Under "selective": operations whose outputs are kept, by PyTorch's names such as "aten.mm.default".
    Default: matrix products, convolutions, attention and collectives."""
    every_n_blocks: PositiveInt = 1
    """Every n-th block recomputes. 1 is all of them."""

    def __post_init__(self) -> None:
        refuse(not self.keep, 'keep=() keeps nothing. Use activation_checkpointing="full" for that.')
        for name in self.keep:
            try:
                operation(name)
            except ValueError as error:
                raise ConfigError(f"keep: {error}") from error


@dataclass(kw_only=True)
class ActivationCheckpointingConfigMixin:
    activation_checkpointing_parameters: ActivationCheckpointingParameters = field(
        default_factory=ActivationCheckpointingParameters
    )


@parameters
class CompileParameters:
    """How blocks are compiled; see `torch.compile`."""

    backend: str = "inductor"
    """Name of the compiler backend."""
    fullgraph: bool = False
    """Whether a graph break is an error."""
    dynamic: bool | None = None
    """Whether shapes are compiled as variable: True, False, or None for shapes that turn out to vary. With
    `tensor_parallel` each shape is compiled separately: None becomes False, and True raises an error."""
    mode: str | None = None
    """Mode of inductor, such as "max-autotune-no-cudagraphs"."""
    async_tensor_parallel: bool = False
    """With `tensor_parallel`, whether matrix products run in pieces that overlap the collectives of sequence
    parallelism before or after them. Needs inductor, and GPUs that read each other's memory."""

    def __post_init__(self) -> None:
        refuse(
            self.async_tensor_parallel and self.backend != "inductor",
            f"async_tensor_parallel=True with backend={self.backend!r}: only inductor overlaps products with "
            "collectives. Use backend='inductor', or False.",
        )


@dataclass(kw_only=True)
class CompileConfigMixin:
    compile_parameters: CompileParameters = field(default_factory=CompileParameters)
