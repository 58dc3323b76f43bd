"""ContextParallelParameters: how ranks that share sequences attend to each other's positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from dream_trainer.checks import check_choice
from dream_trainer.config.parameter_class import parameters

ContextAttention = Literal["gathered", "ulysses"]


@parameters
class ContextParallelParameters:
    """How attention sees the whole sequence; `device_parameters.context_parallel` says how many ranks share it."""

    attention: ContextAttention = "gathered"
    """"gathered": each rank gathers all keys and values, and attends with its own queries, which lie so that causal
    work is equal (Llama 3, 2024, arXiv:2407.21783); lengths are multiples of twice `context_parallel`. "ulysses": each
    rank attends with its share of the heads over all positions (Jacobs et al., 2023, arXiv:2309.14509);
    `context_parallel` divides lengths and both numbers of heads."""

    def __post_init__(self) -> None:
        check_choice("attention", self.attention, get_args(ContextAttention))


@dataclass(kw_only=True)
class ContextParallelConfigMixin:
    """Config of ContextParallelMixin."""

    context_parallel_parameters: ContextParallelParameters = field(default_factory=ContextParallelParameters)
    """How attention sees the whole sequence."""
