"""A trainer without a class: from a model, a loss, an optimizer and data. The loop is DreamTrainer's."""

from dream_trainer.simple.from_objects import Trainer

__all__ = ["Trainer"]
