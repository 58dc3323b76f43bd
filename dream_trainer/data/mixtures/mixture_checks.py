"""What a mixture is made of, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from dream_trainer.data.mixtures.mixture_weights import Stage, check_stages
from dream_trainer.data.ordered import OrderedDataset
from dream_trainer.errors import ConfigError, DataError


def check_sources(sources: Mapping[str, Any]) -> None:
    """Raises DataError where there is no source, or one has no samples by number."""
    if not sources:
        raise DataError('A mixture of no sources has no samples. Give them by name: Mixture({"code": dataset, ...}).')
    for name, source in sources.items():
        if isinstance(source, IterableDataset | OrderedDataset):
            raise DataError(
                f"source {name!r} ({type(source).__name__}) has no samples by number that a mixture could choose from. "
                "Give a map-style dataset."
            )
        try:
            length = len(source)
        except TypeError as error:
            raise DataError(
                f"source {name!r} ({type(source).__name__}) has no length. Give a map-style dataset, which has "
                "`__len__` and `__getitem__`."
            ) from error
        if length == 0:
            raise DataError(
                f"source {name!r} ({type(source).__name__}) has 0 samples. Check its path, split and filters."
            )


def check_options(
    names: Sequence[str],
    unit: str,
    stages: Sequence[Stage],
    max_epochs: Mapping[str, float],
    num_samples: int | None,
    on_change: str,
) -> None:
    """Raises ConfigError where an option of a mixture has no meaning; as in `Mixture`."""
    if unit not in ("samples", "tokens"):
        raise ConfigError(f'unit={unit!r} is not "samples" or "tokens".')
    if on_change not in ("refuse", "continue"):
        raise ConfigError(f'on_change={on_change!r} is not "refuse" or "continue".')
    if num_samples is not None and num_samples < 1:
        raise ConfigError(f"num_samples={num_samples} is not positive.")
    check_stages(stages, names)
    for name, epochs in max_epochs.items():
        if name not in names:
            raise ConfigError(f"max_epochs has {name!r}, and the sources are {list(names)}.")
        if not 0 < epochs < math.inf:
            raise ConfigError(
                f"max_epochs[{name!r}]={epochs} is not positive and finite. Leave the source out, or have no limit for "
                "it."
            )
