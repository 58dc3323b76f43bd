"""DreamTrainer: everything mixed in."""

from __future__ import annotations

from dataclasses import dataclass

from dream_trainer.config.base import BaseTrainerConfig
from dream_trainer.trainer.base import BaseTrainer
from dream_trainer.trainer.mixins.checkpoint import CheckpointConfigMixin, CheckpointMixin
from dream_trainer.trainer.mixins.evaluation import EvalConfigMixin, EvalMixin
from dream_trainer.trainer.mixins.fsdp import FSDPConfigMixin, FSDPMixin
from dream_trainer.trainer.mixins.logger import LoggerConfigMixin, LoggerMixin
from dream_trainer.trainer.mixins.setup import SetupConfigMixin, SetupMixin


@dataclass(kw_only=True)
class DreamTrainerConfig(
    BaseTrainerConfig, SetupConfigMixin, FSDPConfigMixin, EvalConfigMixin, CheckpointConfigMixin, LoggerConfigMixin
):
    """Config of DreamTrainer: the fields of all mixins."""


class DreamTrainer(BaseTrainer, SetupMixin, FSDPMixin, EvalMixin, CheckpointMixin, LoggerMixin):
    """The trainer with every capability: meta build, sharding, evaluation, checkpoints and logging."""

    config: DreamTrainerConfig
