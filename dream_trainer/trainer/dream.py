"""DreamTrainer: everything mixed in."""

from __future__ import annotations

from dataclasses import dataclass

from dream_trainer.config.base import BaseTrainerConfig
from dream_trainer.trainer.base import BaseTrainer
from dream_trainer.trainer.mixins.activation_checkpointing import (
    ActivationCheckpointingConfigMixin,
    ActivationCheckpointingMixin,
)
from dream_trainer.trainer.mixins.checkpoint import CheckpointConfigMixin, CheckpointMixin
from dream_trainer.trainer.mixins.compile import CompileConfigMixin, CompileMixin
from dream_trainer.trainer.mixins.evaluation import EvalConfigMixin, EvalMixin
from dream_trainer.trainer.mixins.fsdp import FSDPConfigMixin, FSDPMixin
from dream_trainer.trainer.mixins.logger import LoggerConfigMixin, LoggerMixin
from dream_trainer.trainer.mixins.setup import SetupConfigMixin, SetupMixin
from dream_trainer.trainer.mixins.tensor_parallel import TensorParallelConfigMixin, TensorParallelMixin


@dataclass(kw_only=True)
class DreamTrainerConfig(
    BaseTrainerConfig,
    SetupConfigMixin,
    FSDPConfigMixin,
    TensorParallelConfigMixin,
    ActivationCheckpointingConfigMixin,
    CompileConfigMixin,
    EvalConfigMixin,
    CheckpointConfigMixin,
    LoggerConfigMixin,
):
    """Config of DreamTrainer: the fields of all mixins."""


class DreamTrainer(
    BaseTrainer,
    SetupMixin,
    FSDPMixin,
    TensorParallelMixin,
    ActivationCheckpointingMixin,
    CompileMixin,
    EvalMixin,
    CheckpointMixin,
    LoggerMixin,
):
    """The trainer with every capability: meta build, parallelism, compilation, evaluation, checkpoints and logging."""

    config: DreamTrainerConfig
