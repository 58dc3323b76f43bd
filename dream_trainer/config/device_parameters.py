"""Which devices train, and how their ranks divide the work: the five-dimensional mesh, and the parameters of sharding,
of each kind of parallelism, of float8, activation checkpointing and compilation."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Self

from dream_trainer.checks import check_between, check_names, divisors, refuse, spell
from dream_trainer.compat.pytorch import EXPENSIVE_OPERATIONS, operation
from dream_trainer.config.combinations import refuse_combinations
from dream_trainer.config.parameter_class import PositiveFloat, PositiveInt, parameters
from dream_trainer.errors import ConfigError

DeviceType = Literal["auto", "cpu", "cuda", "mps", "xpu"]
PipelineSchedule = Literal["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
_INTERLEAVED = ("Interleaved1F1B", "InterleavedZeroBubble")
_SETTINGS = {"pp": "pipeline_parallel", "cp": "context_parallel", "tp": "tensor_parallel"}


@parameters
class DeviceParameters:
    """Device and parallelism of a run. The default fits one process and any `torchrun`.

    `single_device()`, `ddp()`, `fsdp()` and `hsdp()` set `dp_replicate` and `dp_shard`, and the fields that they get.

    Raises:
        ConfigError: A value is invalid on any machine. `resolve_mesh` checks whether it fits this world.
    """

    device: DeviceType = "auto"
    """Kind of device. "auto" takes the machine's accelerator, or the CPU if there is none."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Precision of forward and backward. "fp32": the parameters' own type, so float64 models train in float64. "tf32":
    the same, with float32 matrix products on tensor cores if there are any. "bf16" and "fp16": half precision over
    float32 parameters; fp16 uses a loss scale."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Type of the gradients that data-parallel ranks exchange. None: float32 under bf16 and fp16, otherwise the
    parameters' type."""
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Scaling of the linear layers in blocks that multiply in float8 (Float8Mixin); all else uses `precision`. "none"
    disables, "tensorwise" has one scale per tensor (fastest), "rowwise" one per row and column (more exact)."""
    overlap_reduce: bool = False
    """Whether the exchange of replicas' gradients starts while their backward still runs, not in `step`. Helps if
    devices and links work at the same time. It takes the memory of another copy of the gradients, and allows one
    `backward` per micro-batch and set of optimizers. Shards are always reduced in backward."""
    pipeline_parallel: PositiveInt = 1
    """Pipeline stages: groups of ranks that each hold some of the model's layers and pass micro-batches to the next
    (PipelineParallelMixin). They see the same data."""
    dp_replicate: PositiveInt | Literal["auto"] = "auto"
    """Copies of the model, each with its own data. "auto" takes the ranks that sharding leaves; if both are "auto", one
    copy per host."""
    dp_shard: PositiveInt | Literal["auto"] = "auto"
    """Ranks that share one copy of the model (FSDP). "auto" takes all with FSDPMixin, and one without. If both are
    "auto" on several hosts, the ranks of a host."""
    context_parallel: PositiveInt = 1
    """Ranks that share the positions of each sequence (ContextParallelMixin). They see parts of the same samples.
    Sharded parameters are sharded over these ranks too."""
    expert_parallel: PositiveInt = 1
    """Ranks that share the experts of each mixture (ExpertParallelMixin). They are neighbours among the data-parallel
    ranks, so this size is not a factor of the number of processes."""
    tensor_parallel: PositiveInt = 1
    """Ranks that share the work of each layer (TensorParallelMixin). They see the same data."""
    cpu_offload: bool = False
    """Whether parameters, gradients and optimizer state stay in host memory and visit the device block by block. Needs
    FSDP2 and at least two ranks."""
    compile: bool = False
    """Whether blocks are compiled (CompileMixin)."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Activations that blocks recompute in backward (ActivationCheckpointingMixin): none, all, or all except expensive
    operations."""
    verify: bool = True
    """Whether the first training step verifies that ranks which share layers, sequences, experts or stages compute the
    same as one process: block outputs and parameter gradients in evaluation mode. If they differ, all ranks raise
    StepError. This takes the memory of one more forward and backward of whole sequences (in a pipeline, of one
    micro-batch through the whole model), with the weights of one block. Forward hooks see these forwards. Has no
    effect under `float8`, and under `pipeline_parallel` with `context_parallel`."""
    start_timeout_seconds: PositiveFloat = 1800.0
    """Seconds a collective may take from launch to the end of the first step. Compiling and loading are slow."""
    step_timeout_seconds: PositiveFloat = 600.0
    """Seconds a collective may take after the first step. A longer wait means that a rank is lost."""
    host_timeout_seconds: PositiveFloat | None = 10.0
    """On several hosts, seconds of silence after which a host counts as lost and the job ends; six times longer until
    the first step is done. None treats a lost host like any lost rank, after a collective's time-out. Shorter values
    cost nothing."""
    hang_timeout_seconds: PositiveFloat | Literal["auto"] | None = "auto"
    """Seconds without a batch after which a rank ends the job, with every rank's stacks in the run directory. None
    disables. "auto" is 0.9 of `step_timeout_seconds`, so that stacks come before a collective gives up. Until the first
    step is done, and while waiting for a save, it is 0.9 of `start_timeout_seconds` if that is longer."""

    def __post_init__(self) -> None:
        refuse_combinations(vars(self))

    @classmethod
    def single_device(cls, **fields: Any) -> Self:
        """One process and one device; more ranks are an error. `dp_replicate=1, dp_shard=1`, and `fields`."""
        return cls(dp_replicate=1, dp_shard=1, **fields)

    @classmethod
    def ddp(cls, **fields: Any) -> Self:
        """Every rank has the whole model; gradients are averaged. `dp_replicate="auto", dp_shard=1`, and `fields`."""
        return cls(dp_replicate="auto", dp_shard=1, **fields)

    @classmethod
    def fsdp(cls, **fields: Any) -> Self:
        """One copy of the model, sharded over all ranks (FSDPMixin). `dp_replicate=1, dp_shard="auto"` and `fields`."""
        return cls(dp_replicate=1, dp_shard="auto", **fields)

    @classmethod
    def hsdp(cls, dp_shard: int = 8, **fields: Any) -> Self:
        """Groups of `dp_shard` ranks, such as the GPUs of a host, share a copy of the model each (FSDPMixin).
        `dp_replicate="auto"`, and `fields`."""
        return cls(dp_replicate="auto", dp_shard=dp_shard, **fields)


class MeshShape(NamedTuple):
    """Ranks along each mesh dimension, in the mesh's order."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int

    def setting(self, dimension: str) -> str:
        """A dimension's config setting, for messages: "tensor_parallel=2"."""
        return f"{_SETTINGS.get(dimension, dimension)}={getattr(self, dimension)}"


def resolve_mesh(
    parameters: DeviceParameters, world_size: int, shard_by_default: bool, ranks_per_host: int | None = None
) -> MeshShape:
    """Divides ranks as `parameters` says; with `shard_by_default` (FSDPMixin) "auto" means shards within a host."""
    data_ranks = world_size
    taken: list[str] = []
    for name, short in (("pipeline_parallel", "pp"), ("tensor_parallel", "tp"), ("context_parallel", "cp")):
        size = int(vars(parameters)[name])
        left = f" ({', '.join(taken)} leave{'s' * (len(taken) == 1)} {data_ranks})" if taken else ""
        refuse(
            data_ranks % size,
            f"{name}={size} does not divide world_size={world_size}{left}. Use {spell(divisors(data_ranks))}, or "
            "start another number of processes.",
        )
        taken += [f"{short}={size}"] * (size > 1)
        data_ranks //= size
    replicate, shard = _data_parallel(parameters, world_size, data_ranks, shard_by_default, ranks_per_host)
    refuse(
        shard > 1 and not shard_by_default,
        f"dp_replicate={parameters.dp_replicate}, dp_shard={parameters.dp_shard} at world_size={world_size} asks for "
        f"copies sharded over {shard} ranks, which this trainer cannot do. Add FSDPMixin to the trainer's bases, or "
        'use dp_replicate="auto", dp_shard=1.',
    )
    left = f"{data_ranks} are left for data parallelism" if taken else "that is to be their product"
    pipeline, tensor, context = parameters.pipeline_parallel, parameters.tensor_parallel, parameters.context_parallel
    refuse(
        replicate * shard != data_ranks,
        f"dp_replicate={replicate} x dp_shard={shard} makes {replicate * shard} ranks, but world_size={world_size} "
        f"(pp={pipeline}, cp={context}, tp={tensor}): {left}. {_what_fits(data_ranks, shard_by_default)}",
    )
    mesh = MeshShape(pp=pipeline, dp_replicate=replicate, dp_shard=shard, cp=context, tp=tensor)
    on = parameter_shape(parameters, mesh, shard_by_default)
    name, ranks = ("dp_shard", on.dp_shard) if on.dp_shard > 1 else ("dp_replicate", on.dp_replicate)
    refuse(
        ranks % parameters.expert_parallel,
        f"expert_parallel={parameters.expert_parallel} does not divide the {ranks} ranks of {name}, which would share "
        f"experts. Use {spell(divisors(ranks))}, another {name}, or another number of processes.",
    )
    return mesh


def _data_parallel(
    parameters: DeviceParameters, world_size: int, data_ranks: int, can_shard: bool, ranks_per_host: int | None
) -> tuple[int, int]:
    """`(dp_replicate, dp_shard)` with "auto" filled in."""
    replicate, shard = parameters.dp_replicate, parameters.dp_shard
    pipeline, tensor, context = parameters.pipeline_parallel, parameters.tensor_parallel, parameters.context_parallel
    if isinstance(replicate, int) and isinstance(shard, int):
        return replicate, shard
    if isinstance(replicate, str) and isinstance(shard, str):
        per_host, same_samples = ranks_per_host or world_size, tensor * context
        hosts_are_equal = world_size // pipeline % per_host == per_host % same_samples == 0
        shard = (per_host // same_samples if hosts_are_equal else data_ranks) if can_shard else 1
        return data_ranks // shard, shard
    name, other = ("dp_shard", "dp_replicate") if isinstance(replicate, str) else ("dp_replicate", "dp_shard")
    size = int(vars(parameters)[name])
    refuse(
        data_ranks % size,
        f'{name}={size} does not divide world_size={world_size} (pp={pipeline}, {other}="auto", cp={context}, '
        f'tp={tensor} leave {data_ranks}). Use {name}="auto", or {spell(divisors(data_ranks))}.',
    )
    return (data_ranks // size, size) if name == "dp_shard" else (size, data_ranks // size)


def _what_fits(world_size: int, can_shard: bool) -> str:
    if world_size == 1:
        return "Start it under torchrun with that many processes, or use 1 x 1."
    if not can_shard:
        return f'Use dp_replicate="auto" or {world_size}.'
    pairs = spell(f"{world_size // shard} x {shard}" for shard in divisors(world_size))
    return f'Use "auto" for one of them, or {pairs}.'


def parameter_shape(parameters: DeviceParameters, shape: MeshShape, shard_by_default: bool) -> MeshShape:
    """Layout of parameters on the ranks: context-parallel ranks also share shards, or are replicas like any other."""
    if shape.dp_shard > 1 or (shard_by_default and parameters.dp_shard == "auto"):
        return shape._replace(dp_shard=shape.dp_shard * shape.cp, cp=1)
    return shape._replace(dp_replicate=shape.dp_replicate * shape.cp, cp=1)


def refuse_split_copies(shape: MeshShape, workers: int) -> None:
    """Raises ConfigError if a group of ranks that steps independently (LocalSGDMixin) would not hold a whole copy."""
    if workers == 1:
        return
    refuse(
        shape.pp > 1,
        f"workers={workers} with pipeline_parallel={shape.pp} is not supported: a worker would be a pipeline. Use one "
        "of the two.",
    )
    refuse(
        shape.dp_replicate % workers,
        f"workers={workers} does not divide the dp_replicate={shape.dp_replicate} copies of the model. Use "
        f"{spell(divisors(shape.dp_replicate))}, or another dp_replicate.",
    )
    refuse(
        shape.dp_shard > 1 and shape.dp_replicate > workers,
        f"workers={workers} would have {shape.dp_replicate // workers} copies each, sharded over "
        f"dp_shard={shape.dp_shard} ranks. Use dp_replicate={workers}, or dp_shard=1.",
    )


@dataclass(kw_only=True)
class SetupConfigMixin:
    """Config of SetupMixin. It adds no fields: the mesh is in `device_parameters`."""


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

    attention: Literal["gathered", "ulysses"] = "gathered"
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
