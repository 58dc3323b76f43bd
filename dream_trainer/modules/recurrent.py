"""Recurrent modules (`nn.LSTM`, `nn.GRU`, `nn.RNN`) of a model that `fully_shard` wraps.

On CUDA they move replaced weights into one piece of memory, and the next gather would not find them there.
"""

from __future__ import annotations

from typing import Any

import torch.nn as nn

from dream_trainer.modules.class_change import Changed, change_class


class KeepsWeightsInPlace(Changed):
    """Leaves each weight where it is; cuDNN then copies them together at every call, and warns of it once."""

    def flatten_parameters(self) -> None:
        """Does nothing."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def keep_recurrent_weights_in_place(model: nn.Module) -> None:
    """Makes the recurrent modules of `model` fit to be wrapped by `fully_shard`."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            change_class(module, KeepsWeightsInPlace)
