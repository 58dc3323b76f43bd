"""ActivationCheckpointingMixin: trades compute for memory, block by block."""

from __future__ import annotations

from typing import ClassVar

from dream_trainer.config.device_parameters import ActivationCheckpointingConfigMixin, ActivationCheckpointingParameters
from dream_trainer.errors import ConfigError
from dream_trainer.modules.recompute import recompute
from dream_trainer.parallel.axis import RECOMPUTATION, Parallelism
from dream_trainer.trainer.abstract import AbstractTrainer


class ActivationCheckpointingMixin(AbstractTrainer):
    """Recomputes activations in backward. Override `apply_activation_checkpointing` to choose modules by hand."""

    _config_class: ClassVar[type | None] = ActivationCheckpointingConfigMixin
    _parallelism: ClassVar[Parallelism | None] = RECOMPUTATION

    def apply_activation_checkpointing(self) -> None:
        """Makes the blocks of every trained model recompute their activations.

        A model without blocks, such as a critic, keeps its activations if another model has blocks.

        Raises:
            ConfigError: No trained model has repeated blocks.
        """
        parameters: ActivationCheckpointingParameters = self._runtime.config.activation_checkpointing_parameters
        mode = self._runtime.config.device_parameters.activation_checkpointing
        trained = set(self._runtime.registry.trainable_models())
        blocks_of = {name: self.model_blocks(model) for name, model in self.named_models().items() if model in trained}
        if blocks_of and not any(blocks_of.values()):
            raise ConfigError(
                f"model {' and '.join(map(repr, blocks_of))} has no repeated blocks to checkpoint. Override "
                "model_blocks to name its parts, or apply_activation_checkpointing to choose modules by hand."
            )
        for name, blocks in blocks_of.items():
            names = {part: f"{name}.{place}" for place, part in self.named_models()[name].named_modules()}
            for block in blocks[:: parameters.every_n_blocks]:
                recompute(block, parameters.keep if mode == "selective" else (), names.get(block, name))
