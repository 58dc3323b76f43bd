"""Building blocks of a trainer: the abstract interface, the loop, and the mixins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from dream_trainer.config.trainer_config import DreamTrainerConfig as DreamTrainerConfig
    from dream_trainer.trainer.abstract import AbstractTrainer as AbstractTrainer
    from dream_trainer.trainer.base import BaseTrainer as BaseTrainer
    from dream_trainer.trainer.dream import DreamTrainer as DreamTrainer
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
