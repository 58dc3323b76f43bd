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
    pipeline_parallel: PositiveInt = 1
    """Groups of ranks that each hold some of the model's layers and hand micro-batches on (PipelineParallelMixin); they
    see the same data."""
    dp_replicate: PositiveInt | Literal["auto"] = "auto"
    """Copies of the model, each on its own data; "auto" takes the ranks that sharding leaves; where both are "auto",
    one for each host."""
    dp_shard: PositiveInt | Literal["auto"] = "auto"
    """Ranks that share one copy of the model (FSDP); "auto" takes all with FSDPMixin, one without; where both are
    "auto" on several hosts, those of a host."""
    context_parallel: PositiveInt = 1
    """Ranks that share the positions of each sequence (ContextParallelMixin); they see parts of the same samples. Where
    parameters are sharded, they are over these ranks too."""
    expert_parallel: PositiveInt = 1
    """Ranks that share the experts of each mixture (ExpertParallelMixin): neighbours among the data-parallel ranks, so
    that sizes multiply to the number of processes without it."""
    tensor_parallel: PositiveInt = 1
    """Ranks that share the work of each layer (TensorParallelMixin); they see the same data."""
    cpu_offload: bool = False
    """Whether parameters, gradients and optimizer state lie in the host's memory and visit the device block by block,
    which FSDP2 does from two ranks on."""
    compile: bool = False
    """Whether blocks are compiled (CompileMixin)."""
    activation_checkpointing: Recomputation = "none"
    """What blocks compute again in backward instead of keeping it (ActivationCheckpointingMixin): nothing, everything,
    all but what is dear to compute, or each block what keeps them within a budget of memory."""
    verify: bool = True
    """Whether the first training step verifies that ranks which share layers, sequences, experts or stages compute what
    one process does: block outputs and parameter gradients in evaluation mode. If they differ, all ranks raise
    StepError. This takes the memory of one more forward and backward of whole sequences (in a pipeline, of one
    micro-batch through the whole model), with the weights of one block; forward hooks see these forwards. Without
    effect under `float8`, and under `pipeline_parallel` with `context_parallel`."""
    start_timeout_seconds: PositiveFloat = 1800.0
    """Seconds a collective may take from launch to the end of the first step; compiling and loading are slow."""
    step_timeout_seconds: PositiveFloat = 600.0
    """Seconds a collective may take after the first step; longer means that a rank is gone."""
    host_timeout_seconds: PositiveFloat | None = 10.0
    """Seconds of silence after which a host counts as lost and the job ends, where it has several, and six times as
    long until the first step is done; None: as any lost rank, after a collective's time-out. A shorter silence costs
    nothing."""
    hang_timeout_seconds: PositiveFloat | Literal["auto"] | None = "auto"
    """Seconds without a batch after which a rank ends the job, with every rank's stacks in the run directory; None:
    never. "auto" is 0.9 of `step_timeout_seconds`, so that stacks come before a collective gives up. Until the first
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
        """A dimension as the config has it, in messages: "tensor_parallel=2"."""
        return f"{_SETTINGS.get(dimension, dimension)}={getattr(self, dimension)}"


_SETTINGS = {"pp": "pipeline_parallel", "cp": "context_parallel", "tp": "tensor_parallel"}


def resolve_mesh(
    parameters: DeviceParameters, world_size: int, shard_by_default: bool, ranks_per_host: int | None = None
) -> MeshShape:
    """Divides `world_size` ranks as `parameters` asks; `shard_by_default` if "auto" means sharding (FSDPMixin).

    With `ranks_per_host`, of several hosts, "auto" for both shards inside of hosts and replicates between them.

    Raises:
        ConfigError: The sizes do not multiply to `world_size`, or sharding is asked of a trainer that cannot.
    """
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
    """How parameters lie on the ranks: those that share sequences share shards too, or are replicas like any other."""
    if shape.dp_shard > 1 or (shard_by_default and parameters.dp_shard == "auto"):
        return shape._replace(dp_shard=shape.dp_shard * shape.cp, cp=1)
    return shape._replace(dp_replicate=shape.dp_replicate * shape.cp, cp=1)


def ranks_per_worker(world_size: int, workers: int) -> int:
    """The ranks of each of `workers` groups that step on their own (LocalSGDMixin)."""
    refuse(
        world_size % workers,
        f"workers={workers} does not divide world_size={world_size}. Use {spell(divisors(world_size))}.",
    )
    return world_size // workers


def refuse_split_copies(shape: MeshShape, workers: int) -> None:
    """Raises ConfigError if a group of ranks that steps on its own (LocalSGDMixin) would not hold one whole copy."""
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
    """Config of SetupMixin. It has no field of its own: the mesh is in `device_parameters`."""
