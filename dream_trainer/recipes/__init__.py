"""Trainers that are complete: run each from a YAML file, or subclass it. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from dream_trainer.recipes.classifier import Classifier as Classifier, ClassifierConfig as ClassifierConfig
    from dream_trainer.recipes.fine_tuning import (
        SupervisedFineTuning as SupervisedFineTuning,
        SupervisedFineTuningConfig as SupervisedFineTuningConfig,
    )
    from dream_trainer.recipes.language_model import (
        LanguageModel as LanguageModel,
        LanguageModelConfig as LanguageModelConfig,
    )
    from dream_trainer.recipes.preferences import DPO as DPO, DPOConfig as DPOConfig
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
