"""DreamTrainerConfig: the fields of all mixins."""

from __future__ import annotations

from dataclasses import dataclass

from dream_trainer.config.activation_checkpointing_parameters import ActivationCheckpointingConfigMixin
from dream_trainer.config.checkpoint_parameters import CheckpointConfigMixin
from dream_trainer.config.compile_parameters import CompileConfigMixin
from dream_trainer.config.context_parallel_parameters import ContextParallelConfigMixin
from dream_trainer.config.device_parameters import SetupConfigMixin
from dream_trainer.config.evaluation_parameters import EvalConfigMixin
from dream_trainer.config.float8_parameters import Float8ConfigMixin
from dream_trainer.config.fsdp_parameters import FSDPConfigMixin
from dream_trainer.config.logger_parameters import LoggerConfigMixin
from dream_trainer.config.pipeline_parallel_parameters import PipelineParallelConfigMixin
from dream_trainer.config.tensor_parallel_parameters import TensorParallelConfigMixin
from dream_trainer.config.trainer_config import BaseTrainerConfig


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
