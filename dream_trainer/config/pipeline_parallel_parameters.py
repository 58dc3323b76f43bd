"""PipelineParallelParameters: in which order micro-batches go through the stages of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from dream_trainer.checks import check_choice, check_integer
from dream_trainer.config.parameter_class import parameters
from dream_trainer.errors import ConfigError

PipelineSchedule = Literal["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
_INTERLEAVED = ("Interleaved1F1B", "InterleavedZeroBubble")


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
    stages_per_rank: int | None = None
    """Stages of each rank under an interleaved schedule, 2 or more; None: 2. The V-shaped have 2, the first two 1."""
    microbatches: int | None = None
    """Into how many equal parts `forward_backward` cuts each batch, at least one for each stage; None: two for each. A
    stage waits (stages - 1) / (microbatches + stages - 1) of the time."""

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, get_args(PipelineSchedule))
        if self.stages_per_rank is not None:
            check_integer("stages_per_rank", self.stages_per_rank, minimum=1)
            if self.stages_per_rank != self.stages_of_each_rank or self.stages_per_rank == 1 != self._usual_stages:
                wanted = "2 or more" if self.schedule in _INTERLEAVED else str(self._usual_stages)
                raise ConfigError(
                    f"stages_per_rank={self.stages_per_rank} with schedule={self.schedule!r}: it has {wanted}. Leave "
                    f"stages_per_rank out, or choose {' or '.join(map(repr, _INTERLEAVED))}, which may have any number "
                    "of stages from 2 on."
                )
        if self.microbatches is not None:
            check_integer("microbatches", self.microbatches, minimum=1)

    @property
    def stages_of_each_rank(self) -> int:
        """Their number."""
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
