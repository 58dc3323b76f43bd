"""Whole matrices, each on one rank: parts travel to a matrix's owner in one packed all-to-all, and results travel back.

What is done to a matrix as a whole (its orthogonalisation, in Muon) is so done once in the world, not on every rank,
and costs two collectives a step, however many matrices there are. Ranks that hold the same parts share the work too:
each does some of the matrices and tells the others the results.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dream_trainer.compat.pytorch import all_gather_flat

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on the ranks.

    Attributes:
        shards: Ranks that hold a part of it each; None if this rank holds all of it.
        dim: The dimension that is cut, as `torch.chunk` cuts.
        replicas: Ranks that hold the same part with the same gradient, bit for bit; None if none are known.
    """

    shards: ProcessGroup | None
    dim: int
    replicas: ProcessGroup | None


def layout_of(tensor: Tensor, replicas: ProcessGroup | None) -> Layout | None:
    """How `tensor` lies on the ranks.

    Args:
        tensor: A plain tensor or a DTensor.
        replicas: Ranks that hold the same plain tensors with the same gradients.

    Returns:
        None if it is cut or copied along several dimensions of its mesh, or strided.
    """
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(tensor, DTensor):
        return Layout(None, 0, replicas)
    mesh = tensor.device_mesh
    used = [(i, placement) for i, placement in enumerate(tensor.placements) if mesh.size(i) > 1]
    copied = [i for i, placement in used if placement.is_replicate()]
    cut = [(i, placement) for i, placement in used if not placement.is_replicate()]
    if len(copied) > 1 or len(cut) > 1 or not all(isinstance(placement, Shard) for _, placement in cut):
        return None
    shards, dim = None, 0
    for i, placement in cut:
        assert isinstance(placement, Shard)
        shards, dim = mesh.get_group(i), placement.dim
    return Layout(shards, dim, mesh.get_group(copied[0]) if copied else None)


def deal(costs: Sequence[float], n_hands: int) -> list[int]:
    """Who gets which: the costliest first, each to the hand that has the least so far; the same on every rank."""
    hands = [(0.0, hand) for hand in range(n_hands)]
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, owners[i] = hands[0]
        heapq.heapreplace(hands, (load + costs[i], owners[i]))
    return owners


class MatrixExchange:
    """The buffers and sizes of one exchange, made once for given matrices of one layout.

    Args:
        shapes: Shape of each whole matrix.
        costs: What the work on each costs, in any unit.
        layout: How all of them lie.
        dtype: What they are sent in.
        device: Where this rank's parts are.

    Attributes:
        parts: This rank's part of each matrix, views of the buffers. Those of `wanted` are to be filled before `run`;
            after it all have results.
        wanted: Indices of the matrices that this rank's replica works on.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        costs: Sequence[float],
        layout: Layout,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._layout = layout
        shard, n_shards = _place(layout.shards)
        replica, n_replicas = _place(layout.replicas)
        owners = [divmod(cell, n_shards) for cell in deal(costs, n_replicas * n_shards)]
        lengths = [_chunk_lengths(shape[layout.dim], n_shards) for shape in shapes]
        part_shapes = [
            [_with_length(shape, layout.dim, length) for length in lengths_of_shape]
            for shape, lengths_of_shape in zip(shapes, lengths, strict=True)
        ]
        self.wanted = [i for i, (of_replica, _) in enumerate(owners) if of_replica == replica]
        self._owned = [i for i in self.wanted if owners[i][1] == shard]
        self._lengths = lengths

        # A slot for each replica's results, all of one size, as an all-gather wants them. This rank's own holds first
        # what it sends to owners, in the order of the owners.
        slots = [
            sorted((i for i, (of_replica, _) in enumerate(owners) if of_replica == r), key=lambda i: owners[i][1])
            for r in range(n_replicas)
        ]
        slot_size = max(sum(part_shapes[i][shard].numel() for i in slot) for slot in slots)
        # Zeros, since what pads a slot is sent too.
        self._results = torch.zeros(n_replicas * slot_size, dtype=dtype, device=device)
        by_index: dict[int, Tensor] = {}
        for r, slot in enumerate(slots):
            views = _views(self._results[r * slot_size :], [part_shapes[i][shard] for i in slot])
            by_index |= zip(slot, views, strict=True)
        self.parts = [by_index[i] for i in range(len(shapes))]
        self._slot = self._results[replica * slot_size : (replica + 1) * slot_size]
        self._sent = [
            sum(part_shapes[i][shard].numel() for i in self.wanted if owners[i][1] == owner)
            for owner in range(n_shards)
        ]

        # What the owned matrices' parts arrive in, ordered by where they come from.
        self._received = [sum(part_shapes[i][source].numel() for i in self._owned) for source in range(n_shards)]
        self._pieces = [[self.parts[i]] for i in self._owned]
        self._arrived = self._slot
        if layout.shards is not None:
            self._arrived = torch.empty(sum(self._received), dtype=dtype, device=device)
            order = [part_shapes[i][source] for source in range(n_shards) for i in self._owned]
            views = _views(self._arrived, order)
            self._pieces = [views[place :: len(self._owned)] for place in range(len(self._owned))]

    def run(self, work: Callable[[int, Tensor], Tensor]) -> None:
        """Replaces each matrix by `work(its index, the matrix)`. Every rank of the layout calls it.

        The matrix that `work` is given may be a view of a buffer: it leaves it as it is and returns another one.
        """
        if self.wanted:
            self._work(work)
        if self._layout.replicas is not None and self._results.numel():
            all_gather_flat(self._results, self._slot, self._layout.replicas)

    def _work(self, work: Callable[[int, Tensor], Tensor]) -> None:
        import torch.distributed as dist

        group, dim = self._layout.shards, self._layout.dim
        outgoing = self._slot[: sum(self._sent)]
        if group is not None:
            dist.all_to_all_single(self._arrived, outgoing, self._received, self._sent, group=group)
        for i, pieces in zip(self._owned, self._pieces, strict=True):
            result = work(i, pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim))
            for piece, part in zip(pieces, result.split(self._lengths[i], dim), strict=True):
                piece.copy_(part)
        if group is not None:
            dist.all_to_all_single(outgoing, self._arrived, self._sent, self._received, group=group)


def _place(group: ProcessGroup | None) -> tuple[int, int]:
    """(rank, number of ranks) in `group`; (0, 1) without one."""
    if group is None:
        return 0, 1
    import torch.distributed as dist

    return dist.get_rank(group), dist.get_world_size(group)


def _chunk_lengths(length: int, n_ranks: int) -> list[int]:
    """How much of a dimension each rank has: as `torch.chunk` cuts, and nothing on ranks for which nothing is left."""
    longest = -(-length // n_ranks)
    return [max(0, min(longest, length - rank * longest)) for rank in range(n_ranks)]


def _with_length(shape: torch.Size, dim: int, length: int) -> torch.Size:
    return torch.Size([*shape[:dim], length, *shape[dim + 1 :]])


def _views(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Tensors of `shapes`, one after the other in `flat`."""
    sizes = [shape.numel() for shape in shapes]
    pieces = flat[: sum(sizes)].split(sizes)
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
