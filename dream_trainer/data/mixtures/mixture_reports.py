"""What a mixture says of itself: that it is another one than before, or never draws from a source."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.utils.data import get_worker_info

from dream_trainer.data.mixtures.mixture_weights import Stage
from dream_trainer.errors import DataError

logger = logging.getLogger("dream_trainer")


def find_differences(before: Mapping[str, Any], now: Mapping[str, Any], changed: Sequence[str]) -> str:
    """What is other in a mixture than in a checkpoint's, by the names of the facts that changed."""
    differences = [f"{key} was {before.get(key)}, and is {now[key]}" for key in changed]
    return "; ".join(differences) or "its sources were in another order"


def refuse_another_mixture(told: str) -> None:
    """Raises DataError: the run's checkpoint is of another mixture."""
    raise DataError(
        f"the checkpoint is of another mixture ({told}). Give it what it had; or, but for num_samples, "
        'on_change="continue" to go on with this mixture from that position.'
    )


def warn_of_another_mixture(told: str, position: int) -> None:
    """Says that a run goes on with another mixture; on one rank, and not in workers."""
    if _is_main():
        logger.warning(
            "The run goes on with another mixture, from position %d on: %s. Of packed rows, what was left of the block "
            "that was begun is left out.",
            position,
            told,
        )


def warn_of_unused_sources(weights: Mapping[str, float], stages: Sequence[Stage]) -> None:
    """Says which sources are not drawn in any stage."""
    unused = [name for name, weight in weights.items() if not weight and not any(s.weights.get(name) for s in stages)]
    if unused and _is_main():
        logger.warning(
            "The mixture never draws from %s, whose weight is 0 in all stages, unless set_weights gives one.",
            ", ".join(unused),
        )


def _is_main() -> bool:
    return get_worker_info() is None and (not dist.is_initialized() or dist.get_rank() == 0)
