"""FSDPParameters: how models are sharded."""

from __future__ import annotations

from dataclasses import dataclass, field

from dream_trainer.config.parameter_class import parameters
from dream_trainer.errors import ConfigError


@parameters
class FSDPParameters:
    """How models are sharded.

    Raises:
        ConfigError: A value cannot work.
    """

    reshard_after_forward: bool | int = True
    """Whether blocks give their gathered parameters back after forward: True saves memory, False saves a second gather
    in backward, an int keeps them sharded over that many ranks of a host."""

    def __post_init__(self) -> None:
        value = self.reshard_after_forward
        if not isinstance(value, bool) and (not isinstance(value, int) or value < 2):
            raise ConfigError(
                f"reshard_after_forward={value!r} is not understood. Use True, False or an integer above 1."
            )


@dataclass(kw_only=True)
class FSDPConfigMixin:
    """Config of FSDPMixin."""

    fsdp_parameters: FSDPParameters = field(default_factory=FSDPParameters)
    """How models are sharded."""
