"""A trainer whose data are shuffled at import, by a generator that nobody has seeded."""

from __future__ import annotations

import random
from typing import Any

from torch.utils.data import TensorDataset

import dream_trainer as dt
from tests.testing.programs.common import Small, default_config as small_config, points

ORDER = list(range(80))
random.shuffle(ORDER)


def default_config() -> dt.DreamTrainerConfig:
    return small_config()


class ShuffledAtImport(Small):
    def dataset(self) -> Any:
        return TensorDataset(*(part[ORDER] for part in points(80)))
