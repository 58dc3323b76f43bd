"""LocalSGDParameters: how groups of ranks train on their own, and how they become one model again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dream_trainer.checks import check_between, check_boolean, check_choice, check_integer, check_positive
from dream_trainer.config.parameter_class import parameters
from dream_trainer.errors import ConfigError


@parameters
class LocalSGDParameters:
    """How groups of ranks (workers) train on their own, and how they become one model again.

    Raises:
        ConfigError: A value cannot work.
    """

    every_n_steps: int = 100
    """Optimizer steps of a round, at whose end the workers' parameters are averaged: where `global_step` is a multiple
    of it."""
    workers: int | Literal["hosts"] = "hosts"
    """Number of workers, groups of neighbouring ranks; "hosts": each host is one."""
    outer: Literal["sgd"] | None = None
    """What is done with the average. None: it is the model (Local SGD). "sgd": the parameters of the round's beginning
    less the average are a gradient, by which SGD moves the former (DiLoCo)."""
    outer_lr: float = 0.7
    """Learning rate of `outer="sgd"`; this and the next are those of the DiLoCo paper."""
    outer_momentum: float = 0.9
    """Momentum of `outer="sgd"`, from 0 to below 1."""
    nesterov: bool = True
    """Whether that momentum is Nesterov's."""

    def __post_init__(self) -> None:
        check_integer("every_n_steps", self.every_n_steps, minimum=1)
        if self.workers != "hosts":
            check_integer("workers", self.workers, minimum=1, hint=' "hosts" makes each host one.')
        check_choice("outer", self.outer, ("sgd", None))
        check_positive("outer_lr", self.outer_lr)
        check_between("outer_momentum", self.outer_momentum, 0.0, 1.0, below=True)
        check_boolean("nesterov", self.nesterov)
        if self.outer is not None and self.nesterov and self.outer_momentum == 0:
            raise ConfigError("nesterov=True needs momentum. Use outer_momentum=0.9, or nesterov=False.")


@dataclass(kw_only=True)
class LocalSGDConfigMixin:
    """Config of LocalSGDMixin."""

    local_sgd_parameters: LocalSGDParameters = field(default_factory=LocalSGDParameters)
    """How groups of ranks train on their own, and how they become one model again."""
