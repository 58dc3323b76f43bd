"""PipelineParallelParameters: in which order micro-batches go through the stages of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from dream_trainer.checks import check_choice, check_integer
from dream_trainer.config.parameter_class import parameters

PipelineSchedule = Literal["1F1B", "GPipe"]


@parameters
class PipelineParallelParameters:
    """How a batch goes through the stages; `device_parameters.pipeline_parallel` says how many there are."""

    schedule: PipelineSchedule = "1F1B"
    """"1F1B": each stage goes back through a micro-batch as soon as it can, so that it keeps the activations of at most
    as many as there are stages (PipeDream-Flush; Narayanan et al., 2021, arXiv:2006.09503). "GPipe": all forwards come
    first, and a stage keeps the activations of all micro-batches (Huang et al., 2019, arXiv:1811.06965)."""
    microbatches: int | None = None
    """Into how many equal parts `forward_backward` cuts each batch, at least one for each stage; None: two for each. A
    stage waits (stages - 1) / (microbatches + stages - 1) of the time."""

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, get_args(PipelineSchedule))
        if self.microbatches is not None:
            check_integer("microbatches", self.microbatches, minimum=1)


@dataclass(kw_only=True)
class PipelineParallelConfigMixin:
    """Config of PipelineParallelMixin."""

    pipeline_parallel_parameters: PipelineParallelParameters = field(default_factory=PipelineParallelParameters)
    """In which order micro-batches go through the stages of a model."""
