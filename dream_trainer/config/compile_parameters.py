"""CompileParameters: how blocks are compiled."""

from __future__ import annotations

from dataclasses import dataclass, field

from dream_trainer.config.parameter_class import parameters


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


@dataclass(kw_only=True)
class CompileConfigMixin:
    """Config of CompileMixin."""

    compile_parameters: CompileParameters = field(default_factory=CompileParameters)
    """How blocks are compiled."""
