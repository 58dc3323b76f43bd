"""Float8Parameters: which linear layers compute in float8, and how."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dream_trainer.checks import check_boolean
from dream_trainer.config.parameter_class import parameters
from dream_trainer.errors import ConfigError


@parameters
class Float8Parameters:
    """Which layers, and how; `device_parameters.float8` switches it.

    Raises:
        ConfigError: A value cannot work.
    """

    skip: tuple[str, ...] = ("router$",)
    """Regular expressions, searched for in a layer's name: those that one finds stay as they are, as does all outside
    of `model_blocks`, such as the head. `"wk$"` finds `layers.0.attention.wk`. Default: routers of mixtures, as small
    differences make them choose other experts."""
    all_gather: bool = False
    """Whether shards cross ranks in float8 when blocks are gathered, a quarter of float32's bytes; with
    `float8="tensorwise"`. Nothing changes where parameters are not sharded."""
    emulate: bool = False
    """Whether products are computed in float32 from operands that were rounded to float8: on any device, slowly, to see
    what float8 does to a training."""

    def __post_init__(self) -> None:
        check_boolean("all_gather", self.all_gather)
        check_boolean("emulate", self.emulate)
        if isinstance(self.skip, str):
            raise ConfigError(f"skip={self.skip!r} is a string. Use a tuple: skip=({self.skip!r},).")
        for pattern in self.skip:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ConfigError(f"skip: {pattern!r} is not a regular expression ({error}).") from error


@dataclass(kw_only=True)
class Float8ConfigMixin:
    """Config of Float8Mixin."""

    float8_parameters: Float8Parameters = field(default_factory=Float8Parameters)
    """Which linear layers compute in float8, and how."""
