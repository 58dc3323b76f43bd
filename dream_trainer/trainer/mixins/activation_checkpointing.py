"""ActivationCheckpointingMixin: trades compute for memory, block by block.

`device_parameters.activation_checkpointing` switches it: "full" keeps only what enters each block, "selective" also
what is expensive to compute again. What a block is, `model_blocks` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

from dream_trainer.config.activation_checkpointing_parameters import (
    ActivationCheckpointingConfigMixin,
    ActivationCheckpointingParameters,
)
from dream_trainer.errors import ConfigError
from dream_trainer.modules.recompute import recompute
from dream_trainer.trainer.abstract import AbstractTrainer


class ActivationCheckpointingMixin(AbstractTrainer):
    """Recomputes activations in backward. Override `apply_activation_checkpointing` to choose modules by hand."""

    _config_class: ClassVar[type | None] = ActivationCheckpointingConfigMixin

    if TYPE_CHECKING:
        config = cast(Any, ...)  # see AbstractTrainer

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
