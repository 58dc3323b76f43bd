"""A trainer that counts in a variable of its module."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import dream_trainer as dt
from tests.testing.programs.common import Small, default_config as small_config

counts = {"losses": 0}


def default_config() -> dt.DreamTrainerConfig:
    return small_config()


class CountInModuleOfPython(Small):
    def loss(self, batch: Any) -> Tensor:
        counts["losses"] += 1
        return super().loss(batch) / (1 + 0.1 * counts["losses"])
