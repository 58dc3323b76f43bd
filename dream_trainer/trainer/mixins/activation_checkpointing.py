"""ActivationCheckpointingMixin: trades compute for memory, block by block.

`device_parameters.activation_checkpointing` switches it: "full" keeps only what enters each block, "selective" also
what is expensive to compute again, and "budget" of some blocks less than of others. What a block is, `model_blocks`
says.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

from dream_trainer.config.activation_checkpointing_parameters import (
    ActivationCheckpointingConfigMixin,
    ActivationCheckpointingParameters,
)
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.errors import ConfigError
from dream_trainer.modules.activation_budget import Budget, keep_within
from dream_trainer.modules.recompute import recompute
from dream_trainer.trainer.abstract import AbstractTrainer

logger = logging.getLogger(__name__)


class ActivationCheckpointingMixin(AbstractTrainer):
    """Recomputes activations in backward. Override `apply_activation_checkpointing` to choose modules by hand."""

    _config_class: ClassVar[type | None] = ActivationCheckpointingConfigMixin

    if TYPE_CHECKING:
        config = cast(Any, ...)  # see AbstractTrainer

    def __init__(self, config: BaseTrainerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        mode = self.config.device_parameters.activation_checkpointing
        parameters: ActivationCheckpointingParameters = self.config.activation_checkpointing_parameters
        if mode == "budget" and parameters.memory_budget is None:
            raise ConfigError(
                'activation_checkpointing="budget" needs to know how much blocks may keep. Set '
                "activation_checkpointing_parameters.memory_budget to a fraction such as 0.5."
            )
        if mode != "budget" and parameters.memory_budget is not None:
            raise ConfigError(
                f"memory_budget={parameters.memory_budget} with activation_checkpointing={mode!r} does nothing. Use "
                'activation_checkpointing="budget", or leave memory_budget out.'
            )
        if mode == "budget" and parameters.every_n_blocks != 1:
            raise ConfigError(
                f'every_n_blocks={parameters.every_n_blocks} with activation_checkpointing="budget": the budget '
                "chooses the blocks. Leave every_n_blocks at 1."
            )

    def apply_activation_checkpointing(self) -> None:
        """Makes the blocks of every trained model recompute their activations.

        A model without blocks beside one that has some, such as a critic, keeps its own, which is said once.

        Raises:
            ConfigError: No trained model has repeated blocks.
        """
        super().apply_activation_checkpointing()
        parameters: ActivationCheckpointingParameters = self.config.activation_checkpointing_parameters
        mode = self.config.device_parameters.activation_checkpointing
        trained = set(self._trainable_models())
        blocks_of = {name: self.model_blocks(model) for name, model in self.named_models().items() if model in trained}
        self._look_at_models_without_blocks([name for name, blocks in blocks_of.items() if not blocks], len(blocks_of))
        for name, blocks in blocks_of.items():
            if not blocks:
                continue
            names = {part: f"{name}.{place}" for place, part in self.named_models()[name].named_modules()}
            if parameters.memory_budget is not None:
                budget = Budget(parameters.memory_budget, len(blocks), partial(_tell, self, name))
                for block in blocks:
                    keep_within(block, budget, parameters.keep, names.get(block, name))
                continue
            for block in blocks[:: parameters.every_n_blocks]:
                recompute(block, parameters.keep if mode == "selective" else (), names.get(block, name))

    def _look_at_models_without_blocks(self, without: Sequence[str], count: int) -> None:
        if not without:
            return
        fix = "Override model_blocks to name its parts, or apply_activation_checkpointing to choose modules by hand."
        names = " and ".join(map(repr, without[:3]))
        if len(without) == count:
            raise ConfigError(f"model {names} has no repeated blocks to checkpoint. {fix}")
        self.warn_once(
            "models without blocks", f"model {names} has no repeated blocks, and keeps all its activations. {fix}"
        )


def _tell(trainer: ActivationCheckpointingMixin, name: str, budget: Budget) -> None:
    """Says what the blocks of a model chose; a warning if the budget could not be kept."""
    n_blocks = len(budget.ways)
    found = (
        f"the blocks of {name!r} keep {budget.n_bytes / 2**20:.1f} MiB of a micro-batch, of "
        f"{budget.n_bytes_without / 2**20:.1f} MiB without recomputation: of {n_blocks}, {budget.ways.count('full')} "
        f"compute all again and {budget.ways.count('selective')} what is cheap"
    )
    if budget.n_bytes > budget.fraction * budget.n_bytes_without:
        trainer.warn_once(f"memory_budget of {name}", f"memory_budget={budget.fraction} is less than they can: {found}")
    elif trainer.world.is_main:
        logger.info(found)
