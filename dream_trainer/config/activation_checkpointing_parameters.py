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
    """Under "selective": operations whose outputs are kept, by PyTorch's names such as "aten.mm.default".
    Default: matrix products, convolutions, attention and collectives."""
    every_n_blocks: int = 1
    """Every n-th block recomputes; 1: all of them."""

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


@dataclass(kw_only=True)
class ActivationCheckpointingConfigMixin:
    """Config of ActivationCheckpointingMixin."""

    activation_checkpointing_parameters: ActivationCheckpointingParameters = field(
        default_factory=ActivationCheckpointingParameters
    )
    """What is kept."""
