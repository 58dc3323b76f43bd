"""The cutting of a batch whose sequences are shared by ranks, and what is found wrong with it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dream_trainer.checks import spell
from dream_trainer.errors import DataError, HookError, RanksDifferError

if TYPE_CHECKING:
    from dream_trainer.distributed.world import World
    from dream_trainer.modules.context_attention import ContextAttention


class SequenceCut:
    """Cuts one batch after the other.

    Args:
        attention: Which positions are whose; it is told the lengths.
        world: The ranks.
    """

    def __init__(self, attention: ContextAttention, world: World) -> None:
        self._attention, self._world = attention, world
        self._batch: Any = None
        self._digest = 0
        self._is_compared = False

    def begin(self, batch: Any) -> None:
        """`batch` is to be cut."""
        self._batch, self._digest = batch, 0
        self._attention.lengths = set()
        self._attention.shapes.begin()

    def cut(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This rank's positions of `tensor`, whose dimension `dim` is the sequence.

        Raises:
            DataError: The ranks cannot share its length.
            HookError: It is no tensor, or has no such dimension.
        """
        if not isinstance(tensor, Tensor) or not -tensor.ndim <= dim < tensor.ndim:
            what = f"a tensor of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise HookError(
                f"cut_batch called cut({self._name(tensor)}, dim={dim}) with {what}. Cut tensors along the sequence "
                "alone, and name their dimension: cut(tensor, dim=...)."
            )
        length, parts = tensor.shape[dim], self._attention.parts
        if length == 0 or length % parts.n_chunks:
            below, above = length // parts.n_chunks * parts.n_chunks, -(-length // parts.n_chunks) * parts.n_chunks
            twice = "twice " if parts.n_chunks > parts.size else ""
            raise DataError(
                f"{self._name(tensor)} has {length} positions along dimension {dim}, which is not a multiple of "
                f"{parts.n_chunks}, {twice}context_parallel={parts.size}. Use sequences of "
                f"{spell(fit for fit in (below, above or parts.n_chunks) if fit)} positions: of another length, or "
                "padded in the loader (with labels that do not count)."
            )
        if not self._is_compared:
            values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            self._digest = zlib.crc32(values.numpy().tobytes(), self._digest)
        part = parts.cut(tensor, dim)
        self._attention.lengths.add(part.shape[dim])
        rows = tensor.shape[0] if dim % tensor.ndim else 1
        self._attention.shapes.add(rows, part.shape[dim], part.shape[dim] // self._world.mesh_shape.tp or 1)
        return part

    def end(self, *, is_training: bool) -> None:
        """The batch is cut. Ranks that share sequences compare the first one of training; a collective then.

        Raises:
            HookError: Nothing was cut.
            RanksDifferError: They have different batches.
        """
        if not self._attention.lengths:
            raise HookError(
                f"cut_batch cut nothing, and each of the {self._attention.parts.size} ranks would do the whole work. "
                "Call cut(tensor) there for every tensor along the sequence."
            )
        self._batch = None
        if is_training and not self._is_compared:
            self._is_compared = True
            digests = self._world.all_gather(torch.tensor([self._digest])).view(-1, self._world.sample_copies)
            if (digests != digests[:, :1]).any():
                raise RanksDifferError(
                    "ranks that share sequences (context_parallel) have different batches. Have the loader read what "
                    "does not depend on the rank; dataset and sampler are dealt to dp_rank of dp_size by the trainer."
                )

    def _name(self, tensor: Any) -> str:
        """What a message calls a tensor: its place in the batch, if it has one."""
        place = next((name for name, leaf in _places(self._batch, "batch") if leaf is tensor), None)
        return place or "a tensor made in cut_batch"


def _places(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _places(value, f"{name}[{key!r}]")
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _places(value, f"{name}[{number}]")
    else:
        yield name, tree
