"""Which positions of a sequence each rank has, and the collectives that join or exchange what ranks have of it.

For causal work each rank has two chunks: one from the front, where queries see few keys, and one from the end.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dream_trainer.compat.async_collectives import exchanged_in_graph, gathered_in_graph, summed_in_graph
from dream_trainer.compat.pytorch import all_gather_flat, sum_scatter_flat
from dream_trainer.distributed.world import linear

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SequenceParts:
    """The parts of sequences that the ranks of a group have."""

    def __init__(self, rank: int, size: int, group: ProcessGroup | None, *, is_balanced: bool) -> None:
        self.size, self._rank = size, rank
        self.n_chunks = 2 * size if is_balanced else size  # chunks of a sequence
        self._chunks_of = [(r, 2 * size - 1 - r) if is_balanced else (r,) for r in range(size)]
        self.chunks = self._chunks_of[rank]  # this rank's chunks, rising
        self._group = group

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's positions of `whole`, whose length along `dim` is a multiple of `n_chunks`."""
        return self._part(whole, dim, self.chunks)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Where this rank's `length` positions are in the sequence: int64 `[length]`."""
        return self.cut(torch.arange(length * self.size, device=device), 0)

    def joined(self, part: Tensor, dim: int) -> Tensor:
        """All ranks' positions, in their order; backward sums over ranks what they have for each position."""
        return linear(part, partial(self.gather, dim=dim), partial(self.sum_of_own, dim=dim))

    def as_if_alike(self, part: Tensor, dim: int) -> Tensor:
        """What `joined` would give if all ranks had this one's positions."""
        own = part.chunk(self.n_chunks // self.size, dim)
        return torch.cat([chunk for chunk in own for _ in range(self.size)], dim)

    def exchanged(self, by_rank: Tensor) -> Tensor:
        """`out[j]` is what rank j had for this one; `by_rank` `[size, ...]`, what this rank has for each."""
        return linear(by_rank, self.exchange, self.exchange)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        assert self._group is not None
        parts = self._all_gather(part.contiguous(), self._group)
        length = part.shape[dim] * self.size // self.n_chunks
        owners = {chunk: (rank, place) for rank, own in enumerate(self._chunks_of) for place, chunk in enumerate(own)}
        places = [owners[chunk] for chunk in range(self.n_chunks)]
        return torch.cat([parts[rank].narrow(dim, place * length, length) for rank, place in places], dim)

    def sum_of_own(self, whole: Tensor, dim: int) -> Tensor:
        """The sum over ranks of this one's positions of `whole`, without gradients."""
        assert self._group is not None
        every = torch.stack([self._part(whole, dim, chunks) for chunks in self._chunks_of])
        return self._sum_scatter(every, self._group)

    def exchange(self, by_rank: Tensor) -> Tensor:
        assert self._group is not None
        return self._all_to_all(by_rank.contiguous(), self._group)

    def in_graphs(self) -> SequenceParts:
        """The same, with collectives that the compiler knows."""
        return _PartsInGraphs(self._rank, self.size, self._group, is_balanced=self.n_chunks > self.size)

    def _all_gather(self, part: Tensor, group: ProcessGroup) -> Tensor:
        parts = part.new_empty((self.size, *part.shape))
        all_gather_flat(parts.flatten(), part.flatten(), group)
        return parts

    def _sum_scatter(self, every: Tensor, group: ProcessGroup) -> Tensor:
        own = torch.empty_like(every[0])
        sum_scatter_flat(own.flatten(), every.flatten(), group)
        return own

    def _all_to_all(self, by_rank: Tensor, group: ProcessGroup) -> Tensor:
        import torch.distributed as dist

        out = torch.empty_like(by_rank)
        dist.all_to_all_single(out, by_rank, group=group)
        return out

    def _part(self, whole: Tensor, dim: int, chunks: tuple[int, ...]) -> Tensor:
        length = whole.shape[dim] // self.n_chunks
        return torch.cat([whole.narrow(dim, chunk * length, length) for chunk in chunks], dim)


class _PartsInGraphs(SequenceParts):
    def _all_gather(self, part: Tensor, group: ProcessGroup) -> Tensor:
        return gathered_in_graph(part.flatten(), self.size, group).view(self.size, *part.shape)

    def _sum_scatter(self, every: Tensor, group: ProcessGroup) -> Tensor:
        return summed_in_graph(every.flatten(), self.size, group).view(every.shape[1:])

    def _all_to_all(self, by_rank: Tensor, group: ProcessGroup) -> Tensor:
        return exchanged_in_graph(by_rank.flatten(), self.size, group).view(by_rank.shape)
