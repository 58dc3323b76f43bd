"""A trainer without a class: from a model, a loss, an optimizer and data. The loop is DreamTrainer's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from dream_trainer.simple.from_objects import Trainer as Trainer
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
