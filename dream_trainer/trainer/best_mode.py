"""Whether lower or higher values of a trainer's metric are best, where the config leaves that to the metric."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dream_trainer.config.checkpoint_parameters import CheckpointParameters
from dream_trainer.modules.metrics import higher_is_better

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer


def with_known_mode(parameters: CheckpointParameters, trainer: AbstractTrainer) -> CheckpointParameters:
    """These parameters with the `best_mode` that the trainer's metrics know.

    Raises:
        ConfigError: Neither they nor the metric say.
    """
    if parameters.best_metric is None:
        return parameters
    known = higher_is_better(trainer.named_metrics(), parameters.best_metric)
    return replace(parameters, best_mode=parameters.known_best_mode(known))
