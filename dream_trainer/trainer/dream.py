"""DreamTrainer: everything mixed in."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from dream_trainer.config.trainer_config import DreamTrainerConfig
from dream_trainer.trainer.base import BaseTrainer
from dream_trainer.trainer.mixins.activation_checkpointing import ActivationCheckpointingMixin
from dream_trainer.trainer.mixins.checkpointing import CheckpointMixin
from dream_trainer.trainer.mixins.compile import CompileMixin
from dream_trainer.trainer.mixins.context_parallel import ContextParallelMixin
from dream_trainer.trainer.mixins.evaluation import EvalMixin
from dream_trainer.trainer.mixins.expert_parallel import ExpertParallelMixin
from dream_trainer.trainer.mixins.float8 import Float8Mixin
from dream_trainer.trainer.mixins.fsdp import FSDPMixin
from dream_trainer.trainer.mixins.logger import LoggerMixin
from dream_trainer.trainer.mixins.pipeline_parallel import PipelineParallelMixin
from dream_trainer.trainer.mixins.setup import SetupMixin
from dream_trainer.trainer.mixins.tensor_parallel import TensorParallelMixin


class DreamTrainer(
    BaseTrainer,
    SetupMixin,
    FSDPMixin,
    PipelineParallelMixin,
    ContextParallelMixin,
    ExpertParallelMixin,
    TensorParallelMixin,
    Float8Mixin,
    ActivationCheckpointingMixin,
    CompileMixin,
    EvalMixin,
    CheckpointMixin,
    LoggerMixin,
):
    """The trainer with every capability: meta build, parallelism, compilation, evaluation, checkpoints and logging."""

    if TYPE_CHECKING:
        config = cast(DreamTrainerConfig, ...)  # see AbstractTrainer
