"""Random layers of tensor parallelism: each rank draws for its own part, or all draw the same for whole inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dream_trainer.compat.pytorch import shard_dim
from dream_trainer.errors import ConfigError
from dream_trainer.modules.class_change import Changed, change_class, own_class
from dream_trainer.parallel.shared_draws import numbers_of_place

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def declare_random_layer(module: nn.Module, mesh: DeviceMesh, input_layout: Placement) -> None:
    """Declares how a random layer's input lies on tensor-parallel ranks; for `apply_tensor_parallel`.

    A layer whose input is cut draws different numbers on each rank. One with a whole input draws the same on all. In
    both cases the generators of all ranks stay equal, a resumed run is exact to the bit, and a block that is recomputed
    in backward draws the same numbers again.

    Args:
        module: A dropout, or any module that draws from torch's, Python's or numpy's global generators for its whole
            input; changed in place.
        mesh: The one-dimensional mesh that `apply_tensor_parallel` receives.
        input_layout: `Shard(dim)` between a `ColwiseParallel` and a `RowwiseParallel`, and along with a
            `SequenceParallel`; otherwise `Replicate()`.

    Raises:
        ConfigError: It, or a module in it, was declared before; or the layout is that of a sum.

    Example:
        ```python
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=stream)})
        declare_random_layer(block.hidden_dropout, mesh, Shard(-1))
        declare_random_layer(block.dropout, mesh, stream)  # Shard(1) or Replicate()
        ```
    """
    from torch.distributed.tensor import Replicate

    is_cut = shard_dim(input_layout) is not None
    if not is_cut and not isinstance(input_layout, Replicate):
        raise ConfigError(
            f"a random layer cannot draw for an input that is laid out as {input_layout!r}. Use Shard(dim) or "
            "Replicate()."
        )
    for name, part in module.named_modules():
        if isinstance(part, Declared):
            inside = f"its {name}" if name else "it"
            raise ConfigError(
                f"declare_random_layer was given a {own_class(module).__name__} after {inside} had been declared. "
                "Declare each random layer once, and no module around it."
            )
    if is_cut:
        place = mesh.get_local_rank()
        change_class(module, DrawsForItsPart, key=place, _place=place)
    else:
        change_class(module, Declared)


class Declared(Changed):
    """A random layer whose input layout is known."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class DrawsForItsPart(Declared):
    """Draws this rank's own numbers."""

    _place: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return super().forward(*args, **kwargs)
        return self._drawn(*args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a graph cannot put generators back
    def _drawn(self, *args: Any, **kwargs: Any) -> Any:
        devices = (value.device for value in args if isinstance(value, Tensor) and not value.is_meta)
        device = next(devices, torch.device("cpu"))
        with numbers_of_place(b"part", self._place, device):
            return super().forward(*args, **kwargs)


def undeclared_dropouts(models: Mapping[str, nn.Module]) -> list[str]:
    """The names of undeclared dropouts with a nonzero rate."""
    found = []
    for model_name, model in models.items():
        known = {part for module in model.modules() if isinstance(module, Declared) for part in module.modules()}
        named = ((name, part) for name, part in model.named_modules() if isinstance(part, _DROPOUTS))
        found += [f"{model_name}.{name}" for name, part in named if part.p > 0 and part not in known]
    return found
