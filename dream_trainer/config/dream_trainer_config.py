"""DreamTrainerConfig: the fields of all mixins."""

from __future__ import annotations

from dataclasses import dataclass

from dream_trainer.config.checkpoint_parameters import CheckpointConfigMixin
from dream_trainer.config.device_parameters import SetupConfigMixin
from dream_trainer.config.logger_parameters import LoggerConfigMixin
from dream_trainer.config.parallel_parameters import (
    ActivationCheckpointingConfigMixin,
    CompileConfigMixin,
    ContextParallelConfigMixin,
    Float8ConfigMixin,
    FSDPConfigMixin,
    PipelineParallelConfigMixin,
    TensorParallelConfigMixin,
)
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.config.training_parameters import EvalConfigMixin


@dataclass(kw_only=True)
class DreamTrainerConfig(
    BaseTrainerConfig,
    SetupConfigMixin,
    FSDPConfigMixin,
    PipelineParallelConfigMixin,
    ContextParallelConfigMixin,
    TensorParallelConfigMixin,
    Float8ConfigMixin,
    ActivationCheckpointingConfigMixin,
    CompileConfigMixin,
    EvalConfigMixin,
    CheckpointConfigMixin,
    LoggerConfigMixin,
):
    """Config of DreamTrainer: the fields of all mixins."""
