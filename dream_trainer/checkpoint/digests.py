"""Digests of tensors' values, the same however they are sharded: sums modulo 2^64 of bits mixed with positions.

They find accidents, such as another file or dtype, and do not protect against tampering."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from dream_trainer.checkpoint.model_state import model_parameters
from dream_trainer.checks import listed
from dream_trainer.compat.pytorch import is_dtensor, local_tensor, shard_dim
from dream_trainer.distributed.ranks import Ranks
from dream_trainer.errors import CheckpointError
from dream_trainer.parallel.sharding import local_indices

_CHUNK = 1 << 20  # elements: temporaries stay in the processor's cache, and are small compared with a model on a device
_MASK = (1 << 64) - 1
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # of splitmix64, as signed numbers

# First row, last row and number of rows of each dimension: ranks with equal ones hold copies of one shard.
_Shard = tuple[tuple[int, int, int], ...]


@torch.no_grad()
def value_digests(tensors: Mapping[str, Tensor], *, world: Ranks) -> dict[str, str]:
    """A text for each tensor, `"float32 (8, 8) 03f1..."`, equal where dtype, shape and all bits are; one collective."""
    own = {name: _sum_of_shard(tensor) for name, tensor in tensors.items()}
    kinds = {name: f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for name, t in tensors.items()}
    shards: dict[str, dict[_Shard, int]] = {}
    for sums, kinds_there in world.all_gather_object((own, kinds)):
        kinds |= kinds_there
        for name, (shard, total) in sums.items():
            shards.setdefault(name, {}).setdefault(shard, total)
    return {name: f"{kinds[name]} {sum(totals.values()) & _MASK:016x}" for name, totals in shards.items()}


def _sum_of_shard(tensor: Tensor) -> tuple[_Shard, int]:
    """Which part of the tensor this rank has, and the sum over it."""
    local = local_tensor(tensor.detach())
    if not local.numel():
        return (), 0
    rows: dict[int, Tensor] = {}
    if is_dtensor(tensor):
        cut = {dim for placement in tensor.placements if (dim := shard_dim(placement)) is not None}
        rows = {dim: local_indices(tensor, dim) for dim in sorted(cut)}
    shard = tuple(
        (int(rows[dim][0]), int(rows[dim][-1]), size) if dim in rows else (0, size - 1, size)
        for dim, size in enumerate(local.shape)
    )
    on_device = {dim: of_dim.to(local.device) for dim, of_dim in rows.items()}
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for start, bits in _bits(local):
        positions = torch.arange(start, start + len(bits), device=local.device)
        if on_device:
            positions = _in_whole(positions, local.shape, tensor.shape, on_device)
        total += _mixed(positions, bits).sum()
    return shard, int(total) & _MASK


def _bits(local: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The elements in chunks, as integers, each with the place of its first."""
    flat = local.resolve_conj().resolve_neg().reshape(-1)
    for start in range(0, len(flat), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        if chunk.element_size() == 16:
            real, imaginary = torch.view_as_real(chunk).unbind(-1)
            yield start, real.view(torch.int64) * _FACTORS[1] + imaginary.view(torch.int64)
        else:
            yield start, chunk.view(_INTEGERS[chunk.element_size()]).to(torch.int64)


def _in_whole(positions: Tensor, local: torch.Size, whole: torch.Size, rows: Mapping[int, Tensor]) -> Tensor:
    """Places in a shard's memory as places in the whole tensor's."""
    inner = math.prod(local) // local[0]
    if rows.keys() == {0} and bool((rows[0].diff() == 1).all()):  # as fully_shard cuts: one piece of the whole
        return positions + int(rows[0][0]) * inner
    result = torch.zeros_like(positions)
    stride = 1
    for dim in reversed(range(len(local))):
        index = positions % local[dim]
        positions = positions // local[dim]
        result += (rows[dim][index] if dim in rows else index) * stride
        stride *= whole[dim]
    return result


def _mixed(positions: Tensor, bits: Tensor) -> Tensor:
    """A number of 64 bits for each pair, in whose sums no two pairs cancel by their form."""
    first, second, third = _FACTORS
    mixed = positions.mul_(first).add_(bits)
    mixed = _shifted(mixed, 30).mul_(second)
    mixed = _shifted(mixed, 27).mul_(third)
    return _shifted(mixed, 31)


def _shifted(value: Tensor, bits: int) -> Tensor:
    # A right shift brings the sign bit in, which is masked out again.
    return value.bitwise_xor_((value >> bits).bitwise_and_((1 << (64 - bits)) - 1))


class FrozenWeights:
    """The frozen parameters of a run's models, as its setup made them. Making one is a collective."""

    def __init__(self, models: Mapping[str, nn.Module], world: Ranks) -> None:
        self._models, self._world = models, world
        self.at_setup = value_digests(self._frozen(), world=world)  # by the names that checkpoints have

    def unchanged(self) -> dict[str, str]:
        """The digests of those that are still frozen and still have the values of the setup; a collective."""
        now = value_digests(self._frozen(), world=self._world)
        return {name: digest for name, digest in now.items() if self.at_setup.get(name) == digest}

    def _frozen(self) -> dict[str, Tensor]:
        return {name: p for name, p in model_parameters(self._models).items() if not p.requires_grad}


def refuse_other_weights(
    path: Path, models: Mapping[str, nn.Module], left_out: Mapping[str, Mapping[str, str]], *, world: Ranks
) -> None:
    """Compares the weights that a checkpoint left out with those that are there; a collective."""
    here = {name: p for name, p in model_parameters(models).items() if name in left_out}
    digests = value_digests(here, world=world)
    different = [
        f"{name} ({about['digest']} then, {digests.get(name, 'not here')} now)"
        for name, about in left_out.items()
        if digests.get(name) != about["digest"]
    ]
    if not different:
        return
    paths = sorted({about["path"] for about in left_out.values() if "path" in about})
    raise CheckpointError(
        f"Could not load {path}: it was saved without the frozen weights, and {len(different)} of those "
        f"{len(left_out)} are not what this run has: {listed(different, 5)}. "
        "Load the same ones in load_pretrained" + (f"; they came from {', '.join(paths)}." if paths else ".")
    )
