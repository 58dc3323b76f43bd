"""Parameters of sharding, of each kind of parallelism, of float8, activation checkpointing and compilation."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

import torch

from dream_trainer.checks import check_between, check_names, check_pattern, refuse, spell
from dream_trainer.compat.operations import EXPENSIVE_OPERATIONS, operation
from dream_trainer.config.parameter_class import PositiveFloat, PositiveInt, parameters
from dream_trainer.errors import ConfigError

ContextAttention = Literal["gathered", "ulysses"]
PipelineSchedule = Literal["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
_INTERLEAVED = ("Interleaved1F1B", "InterleavedZeroBubble")


@parameters
class FSDPParameters:
    """How models are sharded."""

    min_group_mib: Annotated[float, partial(check_between, low=0)] = 256
    """Models with fewer MiB of parameters are sharded as one group, which is gathered for whole steps: inside a step
    their parameters are whole, plain tensors. Larger ones are gathered block by block, as are all models with 0, and
    with tensor, pipeline or expert parallelism, float8, `cpu_offload` or the options below."""

    reshard_after_forward: bool | int = True
    """Whether blocks give their gathered parameters back after forward: True saves memory, False saves a second gather
    in backward, an int keeps them sharded over that many ranks of a host."""

    separate_reduce_group: bool = False
    """Whether shards of gradients cross ranks in a process group of their own, so that on GPUs they and the parameters
    that are gathered meanwhile need not wait for each other, at the price of another communicator's memory. From
    PyTorch 2.13 on, where it is experimental."""

    symmetric_memory: bool = False
    """Whether gathered parameters lie in memory that GPUs read from each other, for NCCL's copy engines and symmetric
    kernels (`FSDPModule.set_symm_mem_for_comm`). From PyTorch 2.13 on, where it is experimental; refused by name on
    devices that have no such memory."""

    def __post_init__(self) -> None:
        newer = {"separate_reduce_group": self.separate_reduce_group, "symmetric_memory": self.symmetric_memory}
        value = self.reshard_after_forward
        for name, is_on in newer.items():
            refuse(
                is_on and torch.__version__ < "2.13",
                f"{name}=True needs PyTorch 2.13, and this is {torch.__version__}. Leave it out.",
            )
        refuse(
            not isinstance(value, int) or (value < 2 and not isinstance(value, bool)),
            f"reshard_after_forward={value!r} is not understood. Use True, False or an integer above 1.",
        )


@dataclass(kw_only=True)
class FSDPConfigMixin:
    """Config of FSDPMixin."""

    fsdp_parameters: FSDPParameters = field(default_factory=FSDPParameters)
    """How models are sharded."""


@parameters
class PipelineParallelParameters:
    """How a batch goes through the stages; `device_parameters.pipeline_parallel` says how many there are."""

    schedule: PipelineSchedule = "1F1B"
    """"1F1B": each stage goes back through a micro-batch as soon as it can, so that it keeps the activations of at most
    as many as there are stages (PipeDream-Flush; Narayanan et al., 2021, arXiv:2006.09503). "GPipe": all forwards come
    first, and a stage keeps the activations of all micro-batches (Huang et al., 2019, arXiv:1811.06965). The others
    have several stages on each rank and wait less, for which more is sent: "Interleaved1F1B" (Narayanan et al.); with
    gradients of weights computed where a stage would wait, "InterleavedZeroBubble" and, there and back over the ranks,
    "ZBVZeroBubble" (Qi et al., 2023, arXiv:2401.10241) and "DualPipeV" (DeepSeek-AI, 2024, arXiv:2412.19437)."""
    stages_per_rank: PositiveInt | None = None
    """Stages of each rank under an interleaved schedule, 2 or more; None: 2. The V-shaped have 2, the first two 1."""
    microbatches: PositiveInt | None = None
    """Into how many equal parts `forward_backward` cuts each batch, at least one for each stage; None: two for each. A
    stage waits (stages - 1) / (microbatches + stages - 1) of the time."""

    def __post_init__(self) -> None:
        given, usual = self.stages_per_rank, self._usual_stages
        wanted = "2 or more" if self.schedule in _INTERLEAVED else str(usual)
        refuse(
            given is not None and (given != self.stages_of_each_rank or given == 1 != usual),
            f"stages_per_rank={given} with schedule={self.schedule!r}: it has {wanted}. Leave stages_per_rank out, "
            f"or choose {spell(map(repr, _INTERLEAVED))}, which may have any number of stages from 2 on.",
        )

    @property
    def stages_of_each_rank(self) -> int:
        return self.stages_per_rank or 2 if self.schedule in _INTERLEAVED else self._usual_stages

    @property
    def computes_weights_apart(self) -> bool:
        """Whether gradients of weights are computed apart from those that the stage before waits for."""
        return self.schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")

    @property
    def _usual_stages(self) -> int:
        return 1 if self.schedule in ("1F1B", "GPipe") else 2


@dataclass(kw_only=True)
class PipelineParallelConfigMixin:
    """Config of PipelineParallelMixin."""

    pipeline_parallel_parameters: PipelineParallelParameters = field(default_factory=PipelineParallelParameters)
    """In which order micro-batches go through the stages of a model."""


@parameters
class ContextParallelParameters:
    """How attention sees the whole sequence; `device_parameters.context_parallel` says how many ranks share it."""

    attention: ContextAttention = "gathered"
    """"gathered": each rank gathers all keys and values, and attends with its own queries, which lie so that causal
    work is equal (Llama 3, 2024, arXiv:2407.21783); lengths are multiples of twice `context_parallel`. "ulysses": each
    rank attends with its share of the heads over all positions (Jacobs et al., 2023, arXiv:2309.14509);
    `context_parallel` divides lengths and both numbers of heads."""


@dataclass(kw_only=True)
class ContextParallelConfigMixin:
    """Config of ContextParallelMixin."""

    context_parallel_parameters: ContextParallelParameters = field(default_factory=ContextParallelParameters)
    """How attention sees the whole sequence."""


@parameters
class TensorParallelParameters:
    """What a plan may ask for beside splitting layers; `apply_tensor_parallel` reads it."""

    sequence_parallel: bool = True
    """Whether the plan shall split norms and residuals along the sequence, whose length `tensor_parallel` must then
    divide (Korthikanti et al., 2022, arXiv:2205.05198)."""
    loss_parallel: bool = False
    """Whether logits stay split over the vocabulary: `training_step` and `validation_step` then run inside PyTorch's
    `loss_parallel`, where `cross_entropy` takes them as they are."""


@dataclass(kw_only=True)
class TensorParallelConfigMixin:
    """Config of TensorParallelMixin."""

    tensor_parallel_parameters: TensorParallelParameters = field(default_factory=TensorParallelParameters)
    """What the plan may ask for."""


@parameters
class LocalSGDParameters:
    """How groups of ranks (workers) train on their own, and how they become one model again."""

    every_n_steps: PositiveInt = 100
    """Optimizer steps of a round, at whose end the workers' parameters are averaged: where `global_step` is a multiple
    of it."""
    workers: PositiveInt | Literal["hosts"] = "hosts"
    """Number of workers, groups of neighbouring ranks; "hosts": each host is one."""
    outer: Literal["sgd"] | None = None
    """What is done with the average. None: it is the model (Local SGD). "sgd": the parameters of the round's beginning
    less the average are a gradient, by which SGD moves the former (DiLoCo)."""
    outer_lr: PositiveFloat = 0.7
    """Learning rate of `outer="sgd"`; this and the next are those of the DiLoCo paper."""
    outer_momentum: Annotated[float, partial(check_between, low=0.0, high=1.0, below=True)] = 0.9
    """Momentum of `outer="sgd"`, from 0 to below 1."""
    nesterov: bool = True
    """Whether that momentum is Nesterov's."""

    def __post_init__(self) -> None:
        refuse(
            self.outer is not None and self.nesterov and self.outer_momentum == 0,
            "nesterov=True needs momentum. Use outer_momentum=0.9, or nesterov=False.",
        )


@dataclass(kw_only=True)
class LocalSGDConfigMixin:
    """Config of LocalSGDMixin."""

    local_sgd_parameters: LocalSGDParameters = field(default_factory=LocalSGDParameters)
    """How groups of ranks train on their own, and how they become one model again."""


@parameters
class Float8Parameters:
    """Which layers, and how; `device_parameters.float8` switches it."""

    skip: Annotated[tuple[str, ...], partial(check_names, example="router$")] = ("router$",)
    """Regular expressions, searched for in a layer's name: those that one finds stay as they are, as does all outside
    of `model_blocks`, such as the head. `"wk$"` finds `layers.0.attention.wk`. Default: routers of mixtures, as small
    differences make them choose other experts."""
    all_gather: bool = False
    """Whether shards cross ranks in float8 when blocks are gathered, a quarter of float32's bytes; with
    `float8="tensorwise"`. Nothing changes where parameters are not sharded."""
    emulate: bool = False
    """Whether products are computed in float32 from operands that were rounded to float8: on any device, slowly, to see
    what float8 does to a training."""

    def __post_init__(self) -> None:
        for pattern in self.skip:
            check_pattern("skip", pattern)


@dataclass(kw_only=True)
class Float8ConfigMixin:
    """Config of Float8Mixin."""

    float8_parameters: Float8Parameters = field(default_factory=Float8Parameters)
    """Which linear layers compute in float8, and how."""


@parameters
class ActivationCheckpointingParameters:
    """What is kept."""

    keep: Annotated[tuple[str, ...], partial(check_names, example="aten.mm.default")] = EXPENSIVE_OPERATIONS
    """Under "selective": operations whose outputs are kept, by PyTorch's names such as "aten.mm.default".
    Default: matrix products, convolutions, attention and collectives."""
    every_n_blocks: PositiveInt = 1
    """Every n-th block recomputes; 1: all of them."""

    def __post_init__(self) -> None:
        refuse(not self.keep, 'keep=() keeps nothing. Use activation_checkpointing="full" for that.')
        for name in self.keep:
            try:
                operation(name)
            except ValueError as error:
                raise ConfigError(f"keep: {error}") from error


@dataclass(kw_only=True)
class ActivationCheckpointingConfigMixin:
    """Config of ActivationCheckpointingMixin."""

    activation_checkpointing_parameters: ActivationCheckpointingParameters = field(
        default_factory=ActivationCheckpointingParameters
    )
    """What is kept."""


@parameters
class CompileParameters:
    """How blocks are compiled; see `torch.compile`."""

    backend: str = "inductor"
    """Name of the compiler backend."""
    fullgraph: bool = False
    """Whether a graph break is an error."""
    dynamic: bool | None = None
    """Whether shapes are compiled as variable: True, False, or None for those that turn out to vary. With
    `tensor_parallel` each shape is compiled by itself: None is False there, and True an error."""
    mode: str | None = None
    """Mode of inductor, such as "max-autotune-no-cudagraphs"."""
    async_tensor_parallel: bool = False
    """With `tensor_parallel`, whether matrix products run in pieces beside the collectives of sequence parallelism that
    bring their input or take their result. It needs inductor, and GPUs that read each other's memory."""

    def __post_init__(self) -> None:
        refuse(
            self.async_tensor_parallel and self.backend != "inductor",
            f"async_tensor_parallel=True with backend={self.backend!r}: only inductor overlaps products with "
            "collectives. Use backend='inductor', or False.",
        )


@dataclass(kw_only=True)
class CompileConfigMixin:
    """Config of CompileMixin."""

    compile_parameters: CompileParameters = field(default_factory=CompileParameters)
    """How blocks are compiled."""
