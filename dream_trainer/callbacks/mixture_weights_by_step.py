"""MixtureWeights: other weights of a mixture after some optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping

from dream_trainer.checks import check_integer
from dream_trainer.data.mixtures.mixture import mixture_of
from dream_trainer.events.callback import Callback
from dream_trainer.trainer.abstract import AbstractTrainer


class MixtureWeights(Callback):
    """Changes the weights of the training loader's `Mixture` after some optimizer steps.

    They count from the next window on (where documents are packed, from the next block of documents on), and are part
    of checkpoints. A mixture's own `stages` do the same by samples or tokens.

    Args:
        weights: By the number of optimizer steps after which they begin, the weights of each source; 0: from the start.

    Raises:
        ConfigError: A step is negative; in training, as in `Mixture.set_weights`.
        DataError: In training: the loader reads no mixture.
    """

    def __init__(self, weights: Mapping[int, Mapping[str, float]]) -> None:
        for step in weights:
            check_integer("a step of MixtureWeights", step, minimum=0)
        self.weights = {step: dict(of_sources) for step, of_sources in weights.items()}
        self._last_step: int | None = None

    def pre_fit(self, trainer: AbstractTrainer) -> None:
        """Sets the weights of step 0, or of a resumed step, which may have been saved before its weights were set."""
        self._last_step = None
        if self.weights:
            mixture_of(trainer.train_dataloader)  # which says at once if there is none
        self.post_train_step(trainer)

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        step = trainer.global_step
        if step in self.weights and step != self._last_step:
            self._last_step = step
            mixture_of(trainer.train_dataloader).set_weights(self.weights[step])
