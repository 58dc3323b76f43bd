"""Buffers that each rank's forwards change, and how ranks join them: mean, rank 0's, or as they are. Ranks join after
each accumulation step, so validations, checkpoints and exports have the same values on every rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from dream_trainer.checks import check_choice, check_pattern
from dream_trainer.compat.pytorch import NormWithStatistics, foreach_copy_, is_persistent, local_tensor
from dream_trainer.distributed.ranks import Ranks, differing_facts, refuse_differences
from dream_trainer.errors import ConfigError, StepError
from dream_trainer.parallel.micro_batches import digest
from dream_trainer.parallel.mixture_of_experts import MoE

BufferPolicy = Literal["mean", "rank 0", "as is"]


def unread_in_training(module: nn.Module) -> frozenset[str]:
    """The buffers of a layer that its forward in training writes into and does not read."""
    if isinstance(module, NormWithStatistics):
        return frozenset(module._buffers)
    return frozenset({"loads"}) if isinstance(module, MoE) else frozenset()


class _Buffer(NamedTuple):
    """Where a buffer is, since a forward may put another tensor into its place."""

    name: str
    module: nn.Module
    key: str
    policy: BufferPolicy | None
    counts_in_training: bool  # whether only ranks count on which the module trains

    @property
    def value(self) -> Tensor:
        return local_tensor(self.module.get_buffer(self.key)).detach()


class JoinedBuffers:
    def __init__(self, models: Mapping[str, nn.Module], policies: Mapping[str, BufferPolicy]) -> None:
        self._models = models
        self._policies: dict[str, BufferPolicy] = dict(policies)
        self._joined: list[tuple[_Buffer, torch.Size]] | None = None  # with the shape that it has to keep
        for pattern, policy in self._policies.items():
            check_choice(f"buffer_policies()[{pattern!r}]", policy, get_args(BufferPolicy))
            check_pattern("buffer_policies()", pattern)
        named = self._buffers() if self._policies else []
        for pattern in self._policies:
            if not any(re.search(pattern, buffer.name) for buffer in named):
                names = ", ".join(buffer.name for buffer in named[:10]) or "none"
                raise ConfigError(
                    f"buffer_policies() has {pattern!r}, which matches no buffer. The buffers are: {names}."
                )

    def _buffers(self) -> list[_Buffer]:
        buffers: dict[int, _Buffer] = {}
        modules = [found for name, model in self._models.items() for found in model.named_modules(prefix=name)]
        for path, part in modules:
            for key, tensor in part.named_buffers(recurse=False):
                name = f"{path}.{key}"
                chosen: list[BufferPolicy] = [
                    policy for pattern, policy in self._policies.items() if re.search(pattern, name)
                ]
                of_norm = not chosen and isinstance(part, NormWithStatistics) and not isinstance(part, nn.SyncBatchNorm)
                default: BufferPolicy = "mean" if key in ("running_mean", "running_var") else "as is"
                policy = chosen[0] if chosen else default if of_norm else None
                if policy == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
                    raise ConfigError(
                        f'buffer_policies() has "mean" for {name}, which is {tensor.dtype} and has no mean. Use '
                        '"rank 0" or "as is".'
                    )
                buffers.setdefault(id(tensor), _Buffer(name, part, key, policy, of_norm))
        return [*buffers.values()]

    def with_policy(self, policy: BufferPolicy) -> dict[str, Tensor]:
        return {buffer.name: buffer.value for buffer in self._buffers() if buffer.policy == policy}

    def different(self, ranks: Ranks) -> list[str]:
        """Buffers that checkpoints have once and that differ between ranks against their policy; a collective."""
        if ranks.world_size == 1:
            return []
        values = {b.name: b.value for b in self._buffers() if b.policy != "as is" and is_persistent(b.module, b.key)}
        plain = {name: v for name, v in values.items() if type(v) is Tensor and v.layout == torch.strided}
        digests = {name: digest(value) for name, value in plain.items()}
        names: set[str] = set()
        for of_group in differing_facts(ranks, digests, among=ranks.data_peers):
            of_ranks = of_group.values()
            names |= {name for one in of_ranks for name in one if len({other.get(name) for other in of_ranks}) > 1}
        return sorted(names)

    @torch.no_grad()
    def join(self, ranks: Ranks, group: dist.ProcessGroup | None) -> None:
        """Makes buffers equal on the ranks of a step, as their policies say; a collective."""
        if self._joined is None:
            joined = [buffer for buffer in self._buffers() if buffer.policy in ("mean", "rank 0")]
            self._joined = [(buffer, buffer.value.shape) for buffer in joined]
            facts = {b.name: f"{b.value.dtype} {[*b.value.shape]}" for b in joined}
            refuse_differences(ranks, facts, _SAME_SHAPE, among=ranks.data_peers)
        if not self._joined:
            return
        pairs = [(buffer, buffer.value) for buffer, _ in self._joined]
        for (buffer, value), (_, shape) in zip(pairs, self._joined, strict=True):
            if value.shape != shape:
                raise StepError(
                    f"buffer {buffer.name} has the shape {[*value.shape]} and had {[*shape]}, and ranks join it by "
                    f"{buffer.policy!r}. {_SAME_SHAPE}"
                )
        for device in dict.fromkeys(value.device for _, value in pairs):
            here = [(buffer, value) for buffer, value in pairs if value.device == device]
            _average([pair for pair in here if pair[0].policy == "mean"], group)
            _take_first([value for buffer, value in here if buffer.policy == "rank 0"], group)


_SAME_SHAPE = 'A buffer that ranks join keeps one shape on every rank: fill a part of it, or choose "as is" for it.'


def _average(buffers: Sequence[tuple[_Buffer, Tensor]], group: dist.ProcessGroup | None) -> None:
    """Averages over the ranks on which buffers count, in one collective; one that counts on none stays as it is."""
    if not buffers:
        return
    values = [torch.view_as_real(value) if value.is_complex() else value for _, value in buffers]
    flat = torch.cat([value.flatten() for value in values])
    if flat.element_size() < 4:  # too short for sums
        flat = flat.float()
    is_counted = tuple([buffer.module.training or not buffer.counts_in_training for buffer, _ in buffers])
    counts, sizes = _counts(is_counted, tuple([value.numel() for value in values]), flat.device)
    of_elements = counts.repeat_interleave(sizes, output_size=len(flat))
    sums = torch.cat((flat.masked_fill(~of_elements, 0), counts.to(flat.dtype)))
    dist.all_reduce(sums, group=group)
    n_ranks = sums[len(flat) :].repeat_interleave(sizes, output_size=len(flat))
    averaged = torch.where(n_ranks > 0, sums[: len(flat)] / n_ranks, flat)
    parts = averaged.split([value.numel() for value in values])
    foreach_copy_(values, [part.view_as(value) for part, value in zip(parts, values, strict=True)])


@lru_cache(maxsize=16)
def _counts(is_counted: tuple[bool, ...], sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Both as tensors on the device, cached because creating them waits for it."""
    return torch.tensor(is_counted, device=device), torch.tensor(sizes, device=device)


def _take_first(values: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Overwrites with the values of the group's first rank, whatever their types, in one collective."""
    if not values:
        return
    flat = torch.cat([value.contiguous().flatten().view(torch.uint8) for value in values])
    dist.broadcast(flat, group=group, group_src=0)
    parts = flat.split([value.nbytes for value in values])
    for value, part in zip(values, parts, strict=True):
        value.copy_(part.clone().view(value.dtype).view(value.shape))  # a part may begin between two elements


@torch.no_grad()
def make_equal(models: Mapping[str, nn.Module], world: Ranks) -> list[str]:
    """Gives all ranks rank 0's real weights where they differ, as drawn unseeded; returns their names. A collective."""
    if world.world_size == 1:
        return []
    tensors = {
        f"{prefix}.{name}": tensor
        for prefix, model in models.items()
        for named in (model.named_parameters(), model.named_buffers())
        for name, tensor in named
        if not tensor.is_meta
    }
    digests = world.all_gather_object([digest(tensor) for tensor in tensors.values()])
    differ = [name for name, *values in zip(tensors, *digests, strict=True) if len(set(values)) > 1]
    for name in differ:
        values = tensors[name].cpu().contiguous()
        tensors[name].copy_(world.broadcast(values))
    return differ
