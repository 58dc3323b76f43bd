"""Which devices train, and how their ranks divide the work: the five-dimensional mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, get_args

from dream_trainer.checks import check_boolean, check_choice, check_integer, check_positive, divisors, spell
from dream_trainer.config.parameter_class import parameters
from dream_trainer.errors import ConfigError

DeviceType = Literal["auto", "cpu", "cuda", "mps", "xpu"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
ReduceType = Literal["fp32", "bf16", "fp16"]
Float8Recipe = Literal["none", "tensorwise", "rowwise"]
Recomputation = Literal["none", "full", "selective"]


@parameters
class DeviceParameters:
    """Device and parallelism of a run. The default fits one process and any `torchrun`.

    `single_device()`, `ddp()`, `fsdp()` and `hsdp()` set `dp_replicate` and `dp_shard` and leave every other field at
    its default; `dataclasses.replace(DeviceParameters.fsdp(), precision="bf16")` sets more.

    Raises:
        ConfigError: a value cannot work on any machine; what does not fit this world is found by `resolve_mesh`.
    """

    device: DeviceType = "auto"
    """Kind of device; "auto" takes the machine's accelerator, else the CPU."""
    precision: Precision = "fp32"
    """What forward and backward compute in. "fp32": the parameters' own type, so float64 models train in float64;
    "tf32": the same, with matrix products of float32 on tensor cores where there are any; "bf16" and "fp16": half
    precision over float32 parameters, fp16 with a loss scale."""
    reduce_dtype: ReduceType | None = None
    """Type in which gradients cross the data-parallel ranks; None: float32 under bf16 and fp16, else the parameters'
    own."""
    float8: Float8Recipe = "none"
    """Whether the linear layers of blocks multiply in float8, beside `precision` for the rest (Float8Mixin): "none",
    with one scale for each tensor ("tensorwise", the fastest), or for each row and column ("rowwise", more exact)."""
    overlap_reduce: bool = False
    """Whether replicas' gradients begin to cross ranks while the backward that computes them still runs, and not in
    `step`: for devices and links that work at the same time. It takes the memory of another copy of the gradients, and
    one `backward` per micro-batch and set of optimizers. Shards are always reduced in backward."""
    pipeline_parallel: int = 1
    """Groups of ranks that each hold some of the model's layers and hand micro-batches on (PipelineParallelMixin); they
    see the same data."""
    dp_replicate: int | Literal["auto"] = "auto"
    """Copies of the model, each on its own data; "auto" takes the ranks that sharding leaves; where both are "auto",
    one for each host."""
    dp_shard: int | Literal["auto"] = "auto"
    """Ranks that share one copy of the model (FSDP); "auto" takes all with FSDPMixin, one without; where both are
    "auto" on several hosts, those of a host."""
    context_parallel: int = 1
    """Ranks that share the positions of each sequence (ContextParallelMixin); they see parts of the same samples. Where
    parameters are sharded, they are over these ranks too."""
    expert_parallel: int = 1
    """Ranks that share the experts of each mixture (ExpertParallelMixin): neighbours among the data-parallel ranks, so
    that sizes multiply to the number of processes without it."""
    tensor_parallel: int = 1
    """Ranks that share the work of each layer (TensorParallelMixin); they see the same data."""
    cpu_offload: bool = False
    """Whether parameters, gradients and optimizer state lie in the host's memory and visit the device block by block,
    which FSDP2 does from two ranks on."""
    compile: bool = False
    """Whether blocks are compiled (CompileMixin)."""
    activation_checkpointing: Recomputation = "none"
    """What blocks compute again in backward instead of keeping it (ActivationCheckpointingMixin): nothing, everything,
    all but what is dear to compute, or each block what keeps them within a budget of memory."""
    compare_first_forward: bool = False
    """Whether, where ranks share layers, sequences or experts, each model's first forward in training is run in one
    piece as well, in evaluation and without gradients, and its blocks have to give the same. For a new model or plan:
    it finds what cannot be told from outside. Each rank needs the memory of a forward of whole sequences, and with
    split layers or experts that of the whole model; forward hooks of yours see these two forwards, too."""
    start_timeout_seconds: float = 1800.0
    """Seconds a collective may take from launch to the end of the first step; compiling and loading are slow."""
    step_timeout_seconds: float = 600.0
    """Seconds a collective may take after the first step; longer means that a rank is gone."""
    host_timeout_seconds: float | None = 10.0
    """Seconds of silence after which a host counts as lost and the job ends, where it has several, and six times as
    long until the first step is done; None: as any lost rank, after a collective's time-out. A shorter silence costs
    nothing."""
    hang_timeout_seconds: float | Literal["auto"] | None = "auto"
    """Seconds without a batch after which a rank ends the job, with every rank's stacks in the run directory; None:
    never. "auto" is 0.9 of `step_timeout_seconds`, so that stacks come before a collective gives up. Until the first
    step is done, and while waiting for a save, it is 0.9 of `start_timeout_seconds` if that is longer."""

    def __post_init__(self) -> None:
        check_choice("device", self.device, get_args(DeviceType))
        check_choice("precision", self.precision, get_args(Precision))
        check_choice("reduce_dtype", self.reduce_dtype, (*get_args(ReduceType), None))
        check_choice("float8", self.float8, get_args(Float8Recipe))
        check_boolean("cpu_offload", self.cpu_offload)
        check_boolean("overlap_reduce", self.overlap_reduce)
        if self.overlap_reduce and (self.cpu_offload or self.tensor_parallel != 1):
            other = "cpu_offload=True" if self.cpu_offload else f"tensor_parallel={self.tensor_parallel}"
            raise ConfigError(
                f"overlap_reduce=True with {other}: replicas are then wrapped in fully_shard, which gives their "
                "gradients at the end of a backward. Use one of the two."
            )
        for name, value in {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard}.items():
            if value != "auto":
                check_integer(name, value, minimum=1, hint=' "auto" takes the ranks that are left.')
        check_integer("tensor_parallel", self.tensor_parallel, minimum=1)
        check_integer("context_parallel", self.context_parallel, minimum=1)
        check_integer("pipeline_parallel", self.pipeline_parallel, minimum=1)
        self._refuse_beside_a_pipeline()
        check_integer("expert_parallel", self.expert_parallel, minimum=1)
        if self.expert_parallel > 1 and self.cpu_offload:
            raise ConfigError(
                f"cpu_offload=True with expert_parallel={self.expert_parallel} is not there yet: experts that ranks "
                "share are not among what fully_shard moves to the device and back. Use cpu_offload=False with more "
                "expert_parallel, or dp_shard beside it, which leave each rank less; or expert_parallel=1."
            )
        check_boolean("compile", self.compile)
        check_boolean("compare_first_forward", self.compare_first_forward)
        self._refuse_beside_a_comparison()
        check_choice("activation_checkpointing", self.activation_checkpointing, get_args(Recomputation))
        if self.compile and self.tensor_parallel > 1 and self.activation_checkpointing == "full":
            raise ConfigError(
                f'compile=True with tensor_parallel={self.tensor_parallel} and activation_checkpointing="full": '
                'PyTorch cannot compile split layers that are run again whole. Use "selective", or compile=False.'
            )
        check_positive("start_timeout_seconds", self.start_timeout_seconds)
        check_positive("step_timeout_seconds", self.step_timeout_seconds)
        if self.host_timeout_seconds is not None:
            check_positive("host_timeout_seconds", self.host_timeout_seconds)
        if self.hang_timeout_seconds is not None and self.hang_timeout_seconds != "auto":
            check_positive("hang_timeout_seconds", self.hang_timeout_seconds)

    def _refuse_beside_a_comparison(self) -> None:
        beside = {
            f"pipeline_parallel={self.pipeline_parallel}": self.pipeline_parallel > 1,  # no rank runs a whole forward
            f'float8="{self.float8}"': self.float8 != "none",  # parts are scaled by their own values
        }
        for what, is_asked_for in beside.items():
            if self.compare_first_forward and is_asked_for:
                raise ConfigError(
                    f"compare_first_forward=True with {what}, where a forward cannot be compared with one in one "
                    "piece. Compare once without it, and train with it."
                )

    def _refuse_beside_a_pipeline(self) -> None:
        if self.pipeline_parallel == 1:
            return
        beside = f"with pipeline_parallel={self.pipeline_parallel} is not there yet"
        if self.cpu_offload:
            raise ConfigError(
                f"cpu_offload=True {beside}: a stage's shards stay on the device through all micro-batches of a batch. "
                "Use more stages, or tensor_parallel, for weights that do not fit, or pipeline_parallel=1."
            )
        if self.overlap_reduce:
            raise ConfigError(
                f"overlap_reduce=True {beside}: a schedule runs many backwards of each parameter, and gradients could "
                "leave in the last alone. Use overlap_reduce=False, or pipeline_parallel=1."
            )

    @classmethod
    def single_device(cls) -> Self:
        """One process and one device; more ranks are an error. `dp_replicate=1, dp_shard=1`."""
        return cls(dp_replicate=1, dp_shard=1)

    @classmethod
    def ddp(cls) -> Self:
        """Every rank has the whole model; gradients are averaged. `dp_replicate="auto", dp_shard=1`."""
        return cls(dp_replicate="auto", dp_shard=1)

    @classmethod
    def fsdp(cls) -> Self:
        """One copy of the model, sharded over all ranks (FSDPMixin). `dp_replicate=1, dp_shard="auto"`."""
        return cls(dp_replicate=1, dp_shard="auto")

    @classmethod
    def hsdp(cls, dp_shard: int = 8) -> Self:
        """Groups of ranks share a copy of the model each (FSDPMixin); gradients are averaged between the groups.

        Args:
            dp_shard: Ranks of a group; it must divide the number of data-parallel ranks. 8 is the number of GPUs in a
                common host.
        """
        return cls(dp_replicate="auto", dp_shard=dp_shard)


class MeshShape(NamedTuple):
    """Ranks along each mesh dimension, in the mesh's order."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


def resolve_mesh(
    parameters: DeviceParameters, world_size: int, shard_by_default: bool, ranks_per_host: int | None = None
) -> MeshShape:
    """Divides `world_size` ranks as `parameters` asks.

    Args:
        parameters: of the run.
        world_size: ranks of the job.
        shard_by_default: whether the trainer can shard (it has FSDPMixin), so that "auto" means sharding.
        ranks_per_host: ranks of each host, where there are several: "auto" for both then shards inside of hosts and
            replicates between them. None: one host.

    Raises:
        ConfigError: the sizes do not multiply to `world_size`, or sharding is asked of a trainer that cannot.
    """
    pipeline, tensor, context = parameters.pipeline_parallel, parameters.tensor_parallel, parameters.context_parallel
    data_ranks = world_size
    taken: list[str] = []
    for name, short in (("pipeline_parallel", "pp"), ("tensor_parallel", "tp"), ("context_parallel", "cp")):
        size = int(vars(parameters)[name])
        if data_ranks % size != 0:
            left = f" ({', '.join(taken)} leave{'s' * (len(taken) == 1)} {data_ranks})" if taken else ""
            raise ConfigError(
                f"{name}={size} does not divide world_size={world_size}{left}. Use {spell(divisors(data_ranks))}, or "
                "start another number of processes."
            )
        if size > 1:
            taken.append(f"{short}={size}")
        data_ranks //= size
    replicate, shard = _data_parallel(parameters, world_size, shard_by_default, ranks_per_host or world_size)
    if shard > 1 and not shard_by_default:
        raise ConfigError(
            f"dp_replicate={parameters.dp_replicate}, dp_shard={parameters.dp_shard} at world_size={world_size} asks "
            f"for copies sharded over {shard} ranks, which this trainer cannot do. "
            f'Add FSDPMixin to the trainer\'s bases, or use dp_replicate="auto", dp_shard=1.'
        )
    if replicate * shard != data_ranks:
        shares = pipeline > 1 or tensor > 1 or context > 1
        left = f"{data_ranks} are left for data parallelism" if shares else "that is to be their product"
        raise ConfigError(
            f"dp_replicate={replicate} x dp_shard={shard} makes {replicate * shard} ranks, but world_size={world_size} "
            f"(pp={pipeline}, cp={context}, tp={tensor}): {left}. {_what_fits(data_ranks, shard_by_default)}"
        )
    mesh = MeshShape(pp=pipeline, dp_replicate=replicate, dp_shard=shard, cp=context, tp=tensor)
    _refuse_uneven_experts(parameters, parameter_shape(parameters, mesh, shard_by_default))
    return mesh


def _refuse_uneven_experts(parameters: DeviceParameters, shape: MeshShape) -> None:
    name, ranks = ("dp_shard", shape.dp_shard) if shape.dp_shard > 1 else ("dp_replicate", shape.dp_replicate)
    if ranks % parameters.expert_parallel != 0:
        raise ConfigError(
            f"expert_parallel={parameters.expert_parallel} does not divide the {ranks} ranks of {name}, which would "
            f"share experts. Use {spell(divisors(ranks))}, another {name}, or another number of processes."
        )


def parameter_shape(parameters: DeviceParameters, shape: MeshShape, shard_by_default: bool) -> MeshShape:
    """How parameters lie on the ranks: those that share sequences share shards too, or are replicas like any other.

    Args:
        parameters: of the run.
        shape: from `resolve_mesh`.
        shard_by_default: whether "auto" means sharding.
    """
    if shape.dp_shard > 1 or (shard_by_default and parameters.dp_shard == "auto"):
        return shape._replace(dp_shard=shape.dp_shard * shape.cp, cp=1)
    return shape._replace(dp_replicate=shape.dp_replicate * shape.cp, cp=1)


def ranks_per_worker(world_size: int, workers: int) -> int:
    """The ranks of each of `workers` groups that step on their own (LocalSGDMixin).

    Raises:
        ConfigError: They cannot be divided into so many.
    """
    if world_size % workers != 0:
        raise ConfigError(
            f"workers={workers} does not divide world_size={world_size}. Use {spell(divisors(world_size))}."
        )
    return world_size // workers


def refuse_split_copies(shape: MeshShape, workers: int) -> None:
    """Refuses groups of ranks that step on their own (LocalSGDMixin) where they would not hold whole copies.

    Raises:
        ConfigError: The replicas cannot be divided into so many groups, or a group would have several sharded copies,
            or a pipeline.
    """
    if workers == 1:
        return
    if shape.pp > 1:
        raise ConfigError(
            f"workers={workers} with pipeline_parallel={shape.pp} is not there yet: a worker would be a pipeline. Use "
            "one of the two."
        )
    if shape.dp_replicate % workers != 0:
        raise ConfigError(
            f"workers={workers} does not divide the dp_replicate={shape.dp_replicate} copies of the model. Use "
            f"{spell(divisors(shape.dp_replicate))}, or another dp_replicate."
        )
    if shape.dp_shard > 1 and shape.dp_replicate > workers:
        raise ConfigError(
            f"workers={workers} would have {shape.dp_replicate // workers} copies each, sharded over "
            f"dp_shard={shape.dp_shard} ranks. Use dp_replicate={workers}, or dp_shard=1."
        )


def _data_parallel(
    parameters: DeviceParameters, world_size: int, shard_by_default: bool, ranks_per_host: int
) -> tuple[int, int]:
    """`(dp_replicate, dp_shard)` with "auto" filled in."""
    same_samples = parameters.tensor_parallel * parameters.context_parallel
    world_size //= parameters.pipeline_parallel  # each stage has as many
    match parameters.dp_replicate, parameters.dp_shard:
        case "auto", "auto" if shard_by_default and world_size % ranks_per_host == ranks_per_host % same_samples == 0:
            return world_size // ranks_per_host, ranks_per_host // same_samples
        case "auto", "auto":
            return (1, world_size // same_samples) if shard_by_default else (world_size // same_samples, 1)
        case "auto", int(shard):
            return _left_over("dp_shard", shard, "dp_replicate", world_size, parameters), shard
        case int(replicate), "auto":
            return replicate, _left_over("dp_replicate", replicate, "dp_shard", world_size, parameters)
        case replicate, shard:
            return int(replicate), int(shard)


def _left_over(name: str, size: int, other: str, world_size: int, parameters: DeviceParameters) -> int:
    """Ranks that `other` gets when `name` takes `size`."""
    context, tensor = parameters.context_parallel, parameters.tensor_parallel
    pipeline = parameters.pipeline_parallel
    data_ranks = world_size // (context * tensor)
    if data_ranks % size != 0:
        raise ConfigError(
            f'{name}={size} does not divide world_size={world_size * pipeline} (pp={pipeline}, {other}="auto", '
            f"cp={context}, tp={tensor} leave {data_ranks}). "
            f'Use {name}="auto", or {spell(divisors(data_ranks))}.'
        )
    return data_ranks // size


def _what_fits(world_size: int, can_shard: bool) -> str:
    if world_size == 1:
        return "Start it under torchrun with that many processes, or use 1 x 1."
    if not can_shard:
        return f'Use dp_replicate="auto" or {world_size}.'
    pairs = spell(f"{world_size // shard} x {shard}" for shard in divisors(world_size))
    return f'Use "auto" for one of them, or {pairs}.'


@dataclass(kw_only=True)
class SetupConfigMixin:
    """Config of SetupMixin. It has no field of its own: the mesh is in `device_parameters`."""
