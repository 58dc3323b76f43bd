"""A gather that gradients go through: for losses that compare the samples of all ranks.

Forward every rank's rows come to every rank; backward each rank gets the sum of what all ranks' losses say of its rows.
Both are one collective on the device, and each is the other's backward, so second gradients are exact too.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dream_trainer.compat.pytorch import all_gather_flat, sum_scatter_flat
from dream_trainer.distributed.equality import refuse_differences

if TYPE_CHECKING:
    import torch.distributed as dist

    from dream_trainer.distributed.ranks import Ranks


class _Gather(torch.autograd.Function):
    """[n, ...] of each rank to [ranks * n, ...] of all."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = own.new_empty((group.size() * len(own), *own.shape[1:]))
        all_gather_flat(gathered, own.contiguous(), group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _SumScatter.apply(gradients[0], ctx.group), None  # type: ignore[no-untyped-call]


class _SumScatter(torch.autograd.Function):
    """[ranks * n, ...] of each rank to the sum over ranks of this one's [n, ...]."""

    @staticmethod
    def forward(ctx: Any, every: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        summed = every.new_empty((len(every) // group.size(), *every.shape[1:]))
        sum_scatter_flat(summed, every.contiguous(), group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _Gather.apply(gradients[0], ctx.group), None  # type: ignore[no-untyped-call]


def refuse_what_has_no_rows(values: Tensor) -> None:
    """Raises ValueError where `values` cannot be gathered by rows, whatever the number of ranks."""
    from torch.distributed.tensor import DTensor

    if isinstance(values, DTensor) or values.dim() == 0:
        what = "a DTensor" if isinstance(values, DTensor) else "0-dim"
        raise ValueError(
            f"all_gather_with_gradient gathers rows, and these values are {what}. Give it a plain tensor [n, ...]: "
            "values.full_tensor() of a DTensor, values.unsqueeze(0) of a single number."
        )


def rows_of_all(values: Tensor, group: dist.ProcessGroup, ranks: Ranks) -> Tensor:
    """The rows of all ranks of `group`, in rank order, with gradients; a collective of all `ranks`.

    Args:
        values: `[n, ...]`; n may differ between ranks, the other sizes and the dtype may not.
        group: Every `ranks.data_copies`-th rank.
        ranks: All of them call this.

    Raises:
        RanksDifferError: Sizes or dtypes differ.
    """
    form = f"rows of {list(values.shape[1:])} in {values.dtype}"
    facts = ranks.all_gather(torch.tensor([len(values), zlib.crc32(form.encode())]))
    if (facts[:, 1] != facts[0, 1]).any():
        refuse_differences(ranks, {"values to gather": form}, "Only the number of rows may differ.")
    lengths = facts[ranks.rank % ranks.data_copies :: ranks.data_copies, 0].tolist()
    longest = max(lengths)
    if min(lengths) == longest:
        return _apply(values, group)
    padded = F.pad(values, (0, 0) * (values.dim() - 1) + (0, longest - len(values)))
    parts = _apply(padded, group).split(longest)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def _apply(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered: Tensor = _Gather.apply(values, group)  # type: ignore[no-untyped-call]
    return gathered
