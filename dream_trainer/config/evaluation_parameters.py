"""EvalParameters: what to remember of validations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dream_trainer.config.parameter_class import parameters
from dream_trainer.errors import ConfigError


@parameters
class EvalParameters:
    """What to remember of validations.

    Raises:
        ConfigError: `best_metrics` is not a mapping of names, or a mode is not known.
    """

    best_metrics: Mapping[str, Literal["min", "max"]] = field(default_factory=lambda: {"val/loss": "min"})
    """Metrics whose best value is kept in `trainer.best`, each with whether lower ("min") or higher ("max") is
    better. One that a validation does not give is warned of, but for the default's."""

    def __post_init__(self) -> None:
        best = self.best_metrics
        if not isinstance(best, Mapping) or not all(isinstance(name, str) for name in best):
            raise ConfigError(
                f"best_metrics={best!r} is not a dict of names and modes. "
                "Use for example best_metrics={'val/loss': 'min'}."
            )
        for name, mode in self.best_metrics.items():
            if mode not in ("min", "max"):
                raise ConfigError(f"best_metrics[{name!r}]={mode!r} is not known. Use 'min' or 'max'.")


@dataclass(kw_only=True)
class EvalConfigMixin:
    """Config of EvalMixin."""

    eval_parameters: EvalParameters = field(default_factory=EvalParameters)
    """What to remember of validations."""
