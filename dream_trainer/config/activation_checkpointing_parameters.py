"""ActivationCheckpointingParameters: what blocks keep for backward, and which blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from dream_trainer.checks import check_names
from dream_trainer.compat.operations import EXPENSIVE_OPERATIONS, operation
from dream_trainer.config.parameter_class import parameters
from dream_trainer.errors import ConfigError


@parameters
class ActivationCheckpointingParameters:
    """What is kept.

    Raises:
        ConfigError: A value cannot work.
    """

    keep: tuple[str, ...] = EXPENSIVE_OPERATIONS
    """Under "selective" and "budget": operations whose outputs are kept, by PyTorch's names such as "aten.mm.default".
    Default: matrix products, convolutions, attention and collectives."""
    every_n_blocks: int = 1
    """Every n-th block recomputes; 1: all of them, as "budget" has to have it."""
    memory_budget: float | None = None
    """Under "budget", which needs it: how much blocks may keep for backward, as a fraction of what they would keep
    without recomputation, above 0 and at most 1."""

    def __post_init__(self) -> None:
        check_names("keep", self.keep, example="aten.mm.default")
        if not self.keep:
            raise ConfigError('keep=() keeps nothing. Use activation_checkpointing="full" for that.')
        for name in self.keep:
            try:
                operation(name)
            except ValueError as error:
                raise ConfigError(f"keep: {error}") from error
        if self.every_n_blocks < 1:
            raise ConfigError(f"every_n_blocks={self.every_n_blocks} is not a positive integer. 1 means all blocks.")
        if self.memory_budget is not None and not 0 < self.memory_budget <= 1:
            raise ConfigError(
                f"memory_budget={self.memory_budget} is not a fraction. Use one above 0 and at most 1 of what blocks "
                "keep for backward, such as 0.5."
            )


@dataclass(kw_only=True)
class ActivationCheckpointingConfigMixin:
    """Config of ActivationCheckpointingMixin."""

    activation_checkpointing_parameters: ActivationCheckpointingParameters = field(
        default_factory=ActivationCheckpointingParameters
    )
    """What is kept."""
