"""Tensor-parallel ranks: parts of equal sizes, and random layers, which draw for a part or for whole inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import Tensor, nn

from dream_trainer.compat.pytorch import is_dtensor, shard_dim
from dream_trainer.distributed.seeds import numbers_of_place
from dream_trainer.distributed.world import World, gathered_rows
from dream_trainer.errors import ConfigError, RanksDifferError
from dream_trainer.modules.class_change import Changed, change_class, own_class
from dream_trainer.nested import leaves
from dream_trainer.parallel.micro_batches import shapes_of
from dream_trainer.parallel.plain_run import all_gather_objects, removed_after
from dream_trainer.parallel.sharding import dim_of_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def declare_random_layer(module: nn.Module, mesh: DeviceMesh, input_layout: Placement) -> None:
    """Declares how a random layer's input lies on tensor-parallel ranks, or on those that share sequences.

    A layer whose input is cut draws different numbers on each rank. One with a whole input draws the same on all. In
    both cases the generators of all ranks stay equal, a resumed run is exact to the bit, and a block that is recomputed
    in backward draws the same numbers again.

    Args:
        module: A dropout, or any module that draws from torch's, Python's or numpy's global generators for its whole
            input; changed in place.
        mesh: The one-dimensional mesh that `apply_tensor_parallel` receives, or `world.mesh["cp"]`.
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
    place = mesh.get_local_rank() if is_cut else None
    change_class(module, Declared, key=place, _place=place)


class Declared(Changed):
    """A random layer whose input layout is known. One whose input is cut draws this rank's own numbers."""

    _place: int | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._place is None or not self.training:
            return super().forward(*args, **kwargs)
        return self._drawn(*args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a graph cannot put generators back
    def _drawn(self, *args: Any, **kwargs: Any) -> Any:
        devices = (value.device for value in args if isinstance(value, Tensor) and not value.is_meta)
        device = next(devices, torch.device("cpu"))
        with numbers_of_place(b"part", self._place or 0, device):
            return super().forward(*args, **kwargs)


def undeclared_dropouts(models: Mapping[str, nn.Module]) -> list[str]:
    """The names of undeclared dropouts with a nonzero rate."""
    found = []
    for model_name, model in models.items():
        known = {part for module in model.modules() if isinstance(module, Declared) for part in module.modules()}
        named = ((name, part) for name, part in model.named_modules() if isinstance(part, _DROPOUTS))
        found += [f"{model_name}.{name}" for name, part in named if part.p > 0 and part not in known]
    return found


class EqualParts:
    """Ranks that share layers need equal parts: PyTorch joins others wrongly, or ends the process. At the first batch
    of some shapes, ranks therefore compare the inputs of each split module before it runs."""

    def __init__(self, models: Mapping[str, nn.Module], world: World) -> None:
        assert world.mesh is not None  # several ranks share layers
        self._group, self._size, self._device = world.mesh["tp"].get_group(), world.mesh["tp"].size(), world.device
        self._last: nn.Module | None = None
        self._split = {
            module: f"{model_name}.{name}" if name else model_name
            for model_name, model in models.items()
            for name, module in model.named_modules()
            if any(dim_of_part(p, "tp") is not None for p in module.parameters())
        }

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Compares split modules inside the block; the error of one that fails says what is split there."""
        self._last = None
        comparing = (m.register_forward_pre_hook(self._compare, prepend=True, with_kwargs=True) for m in self._split)
        try:
            with removed_after(comparing):
                yield
        except RuntimeError as error:
            if self._last is not None:  # as where a view into the config's number of heads fails
                error.add_note(
                    f"Under tensor_parallel={self._size} each rank has a part of {self._split[self._last]}, which ran "
                    f"last. Parts have to be whole heads, of a number that {self._size} divides, and heads counted "
                    "from the tensor: x.view(*x.shape[:-1], -1, head_size)."
                )
            raise

    def _compare(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._last = module
        shapes = [[*x.shape] for x in leaves((args, kwargs)) if isinstance(x, Tensor) and not is_dtensor(x)]
        by_rank = gathered_rows(torch.tensor([crc32(repr(shapes).encode())], device=self._device), self._group)
        if bool((by_rank != by_rank[0]).any()):
            # With several stages on a rank, each has its own copy of the non-block modules.
            name = self._split.get(module, own_class(module).__name__)
            raise RanksDifferError(
                f"{name} is given parts of unequal sizes on the tensor_parallel={self._size} ranks: "
                f"{', '.join(map(str, all_gather_objects(shapes, self._group)))}. A plan cuts into equal parts: use "
                "lengths of sequences (with sequence parallel), heads and hidden sizes that are multiples of "
                f"{self._size}."
            )


def once_for_each_shape(step: Callable[[Any, int], Any], parts: EqualParts) -> Callable[[Any, int], Any]:
    """`step`, which compares the first batch of each shape."""
    seen: set[Any] = set()

    def compared(batch: Any, batch_idx: int) -> Any:
        shapes = shapes_of(batch)
        with nullcontext() if shapes in seen else parts.compared():
            result = step(batch, batch_idx)
        seen.add(shapes)
        return result

    return compared
