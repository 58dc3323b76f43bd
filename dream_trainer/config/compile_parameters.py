"""CompileParameters: how blocks are compiled."""

from __future__ import annotations

from dataclasses import dataclass, field

from dream_trainer.config.parameter_class import parameters
from dream_trainer.errors import ConfigError


@parameters
class CompileParameters:
    """How blocks are compiled; see `torch.compile`."""

    backend: str = "inductor"
    """Name of the compiler backend."""
    fullgraph: bool = False
    """Whether a graph break is an error."""
    dynamic: bool | None = None
    """Whether shapes are compiled as variable: True, False, or None for those that turn out to vary. With
    `tensor_parallel` each shape is compiled by itself: None is False there, and True an error."""
    mode: str | None = None
    """Mode of inductor, such as "max-autotune-no-cudagraphs"."""
    async_tensor_parallel: bool = False
    """With `tensor_parallel`, whether matrix products run in pieces beside the collectives of sequence parallelism that
    bring their input or take their result. It needs inductor, and GPUs that read each other's memory."""

    def __post_init__(self) -> None:
        if self.async_tensor_parallel and self.backend != "inductor":
            raise ConfigError(
                f"async_tensor_parallel=True with backend={self.backend!r}: inductor alone overlaps products with "
                "collectives. Use backend='inductor', or False."
            )


@dataclass(kw_only=True)
class CompileConfigMixin:
    """Config of CompileMixin."""

    compile_parameters: CompileParameters = field(default_factory=CompileParameters)
    """How blocks are compiled."""
