"""ActivationCheckpointingMixin: trades compute for memory, block by block.

`device_parameters.activation_checkpointing` switches it: "full" keeps only what enters each block, "selective" also
what is dear to compute again. What a block is, `model_blocks` says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from dream_trainer.config.checks import check_names
from dream_trainer.config.parameters import parameters
from dream_trainer.distributed.recompute import DEAR_OPERATIONS, operation, recompute
from dream_trainer.errors import ConfigError
from dream_trainer.trainer.abstract import AbstractTrainer


@parameters
class ActivationCheckpointingParameters:
    """What is kept.

    Raises:
        ConfigError: A value cannot work.
    """

    keep: tuple[str, ...] = DEAR_OPERATIONS
    """Under "selective": operations whose outputs are kept, by PyTorch's names such as "aten.mm.default". Default:
    matrix products, convolutions, attention and collectives."""
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


class ActivationCheckpointingMixin(AbstractTrainer):
    """Recomputes activations in backward. Override `apply_activation_checkpointing` to choose modules by hand."""

    _config_class: ClassVar[type] = ActivationCheckpointingConfigMixin

    config: Any

    def apply_activation_checkpointing(self) -> None:
        """Makes the blocks of every trained model recompute their activations.

        Raises:
            ConfigError: A model has no repeated blocks.
        """
        super().apply_activation_checkpointing()
        parameters: ActivationCheckpointingParameters = self.config.activation_checkpointing_parameters
        is_selective = self.config.device_parameters.activation_checkpointing == "selective"
        for name, model in self.named_models().items():
            if not any(parameter.requires_grad for parameter in model.parameters()):
                continue
            blocks = self.model_blocks(model)
            if not blocks:
                raise ConfigError(
                    f"model {name!r} has no repeated blocks to checkpoint. Override model_blocks to name its parts, "
                    "or apply_activation_checkpointing to choose modules by hand."
                )
            for block in blocks[:: parameters.every_n_blocks]:
                recompute(block, parameters.keep if is_selective else ())
