"""Which devices train, and how their ranks divide the work: the five-dimensional mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from dream_trainer.checks import divisors, refuse, spell
from dream_trainer.config.combinations import refuse_combinations
from dream_trainer.config.parameter_class import PositiveFloat, PositiveInt, parameters

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
        ConfigError: A value is invalid on any machine. `resolve_mesh` checks whether it fits this world.
    """

    device: DeviceType = "auto"
    """Kind of device. "auto" takes the machine's accelerator, or the CPU if there is none."""
    precision: Precision = "fp32"
    """Precision of forward and backward. "fp32": the parameters' own type, so float64 models train in float64. "tf32":
    the same, with float32 matrix products on tensor cores if there are any. "bf16" and "fp16": half precision over
    float32 parameters; fp16 uses a loss scale."""
    reduce_dtype: ReduceType | None = None
    """Type of the gradients that data-parallel ranks exchange. None: float32 under bf16 and fp16, otherwise the
    parameters' type."""
    float8: Float8Recipe = "none"
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
    activation_checkpointing: Recomputation = "none"
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
        """One copy of the model, sharded over all ranks (FSDPMixin). `dp_replicate=1, dp_shard="auto"`, and `fields`.

        Example:
            `DeviceParameters.fsdp(precision="bf16", compile=True)`
        """
        return cls(dp_replicate=1, dp_shard="auto", **fields)

    @classmethod
    def hsdp(cls, dp_shard: int = 8, **fields: Any) -> Self:
        """Groups of ranks share a copy of the model each (FSDPMixin); gradients are averaged between the groups.

        Args:
            dp_shard: Ranks of a group; it must divide the number of data-parallel ranks. 8 is the number of GPUs in a
                common host.
            **fields: Further fields of DeviceParameters.
        """
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


_SETTINGS = {"pp": "pipeline_parallel", "cp": "context_parallel", "tp": "tensor_parallel"}


def resolve_mesh(
    parameters: DeviceParameters, world_size: int, shard_by_default: bool, ranks_per_host: int | None = None
) -> MeshShape:
    """Divides `world_size` ranks as `parameters` says; `shard_by_default` if "auto" means sharding (FSDPMixin), with
    `ranks_per_host` within hosts."""
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


def ranks_per_worker(world_size: int, workers: int) -> int:
    """The ranks of each of `workers` groups that step independently (LocalSGDMixin)."""
    refuse(
        world_size % workers,
        f"workers={workers} does not divide world_size={world_size}. Use {spell(divisors(world_size))}.",
    )
    return world_size // workers


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
