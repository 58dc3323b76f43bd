"""Traffic: how many bytes cross the links of a mesh in a step, inside of hosts and between them, by formula.

As if every collective were a ring over its ranks, which is what gloo does, and NCCL by default for large tensors inside
of a host and over few: over n ranks each sends (n-1)/n of what is gathered or reduced and scattered, and twice that of
what is reduced for all. What the ranks agree by, and single numbers such as the norm, are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn as nn

from dream_trainer.compat.pytorch import local_tensor
from dream_trainer.distributed.world import MESH_DIMS
from dream_trainer.modules.expert_sharding import modules_of_experts
from dream_trainer.modules.mixture_of_experts import MoE
from dream_trainer.modules.precision import half_dtype, reduce_dtype
from dream_trainer.modules.recompute import Recomputed
from dream_trainer.modules.sharding import fsdp_modules

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer


@dataclass(frozen=True)
class Traffic:
    """Bytes of a step, on average over rounds where LocalSGDMixin has some.

    Attributes:
        by_dimension: What this rank sends over a dimension of the mesh; without those of which it cannot be told.
        inside: What the ranks of this host send one another; None if it cannot be told.
        between: What they send to other hosts; None likewise.
    """

    by_dimension: dict[str, float]
    inside: float | None
    between: float | None


def step_traffic(trainer: AbstractTrainer) -> Traffic | None:
    """Of a trainer that is set up; None where it cannot be told: before launch, on one rank, or with shared experts.

    Of split layers and sequences what activations cost depends on the tokens, and only weights and gradients are told.
    Of stages it is known from the first batch on.
    """
    world = trainer._world
    if world is None or world.mesh is None or not trainer.named_models():
        return None
    if trainer.config.device_parameters.expert_parallel > 1:
        return None
    by_dimension: dict[str, float] = {}
    whole = {shard for model in trainer._parallel.whole_in_steps for shard in model.shard_of.values()}
    sent = {True: 0.0, False: 0.0}
    shape, of_parameters = world.mesh_shape, world.parameter_shape  # ranks that share sequences are among the latter's
    if shape.dp_shard > 1:
        by_dimension["dp_shard"] = n_bytes = _of_shards(trainer, of_parameters.dp_shard)
        _add(sent, trainer, "dp_shard", shape.dp_shard, 1, n_bytes)
    if shape.dp_replicate > 1:
        workers = world.workers
        inside, trained = of_parameters.dp_replicate // workers, _trained(trainer)
        sizes = [_size(p, reduce_dtype(trainer.config.device_parameters)) for p in trained if p not in whole]
        within = _all_reduced(inside, sum(sizes))
        across = _all_reduced(workers, sum(_size(p, None) for p in trained)) / trainer._rounds.steps
        _add(sent, trainer, "dp_replicate", inside, 1, within)
        _add(sent, trainer, "dp_replicate", workers, inside, across)
        by_dimension["dp_replicate"] = within + across
    if world.stages > 1:
        from dream_trainer.trainer.pipeline import Pipelined

        of_models = [m._pipeline.bytes_of_a_batch for m in trainer.named_models().values() if isinstance(m, Pipelined)]
        known = [n_bytes for n_bytes in of_models if n_bytes is not None]
        if len(known) == len(of_models):  # each as if its forward_backward ran once for each batch
            by_dimension["pp"] = trainer.accumulation_steps * sum(known)
    if whole and shape.dp_replicate > 1:  # whose gradients are averaged over both dimensions at once
        return Traffic(by_dimension, inside=None, between=None)
    if world.stages * world.sample_copies > 1:  # other stages send other numbers, and activations any
        return Traffic(by_dimension, inside=None, between=None)
    return Traffic(by_dimension, inside=sent[True], between=sent[False])


def exchanged_for_a_token(trainer: AbstractTrainer) -> float | None:
    """Bytes that a rank sends for each of its tokens, forth and back in forward and in backward, where experts are
    chosen evenly; None where layers of others share experts, whose rows are not known."""
    models, devices = trainer.named_models().values(), trainer.config.device_parameters
    mixtures = [part for model in models for part in model.modules() if isinstance(part, MoE)]
    if set(modules_of_experts(models)) != {mixture.experts for mixture in mixtures}:
        return None
    again = [part for model in models for part in model.modules() if isinstance(part, Recomputed)]
    computed_again = {part for block in again for part in block.modules()}
    sent = 0.0
    for mixture in mixtures:
        dtype, times = half_dtype(devices) or mixture.experts.gate.dtype, 6 if mixture in computed_again else 4
        sent += times * mixture.top_k * mixture.router.in_features * dtype.itemsize
    elsewhere = 1 - 1 / devices.expert_parallel
    return sent * elsewhere / devices.tensor_parallel  # ranks that share layers send a part of the rows each


def _of_shards(trainer: AbstractTrainer, n: int) -> float:
    from dream_trainer.compat.fully_shard import gathered_dtype, gathers_of, is_shared, parameters_of

    devices, accumulation = trainer.config.device_parameters, trainer.accumulation_steps
    reductions = 1 if trainer.config.training_parameters.sync_policy == "no_sync" else accumulation
    gathered = reduced = gathered_once = 0.0
    reduced_in = reduce_dtype(devices) or (torch.float32 if half_dtype(devices) is not None else None)
    for module in (module for model in trainer.named_models().values() for module in fsdp_modules(model)):
        if is_shared(module):
            parameters = parameters_of(module)
            gathered += gathers_of(module) * sum(_size(p, gathered_dtype(p) or half_dtype(devices)) for p in parameters)
            reduced += sum(_size(p, reduced_in) for p in parameters if p.requires_grad)
    if trainer.world.device.type == "cpu":
        reductions *= 2  # gloo reduces and scatters by reducing for all
    for model in trainer._parallel.whole_in_steps:  # gathered once for a step, gradients averaged as those of replicas
        n_trained = sum(_size(p, reduce_dtype(devices)) for p in model.shard_of.values() if p.requires_grad)
        averaged = _all_reduced(trainer.world.step_size, n * n_trained)
        gathered_once += (n - 1) * model.bytes_of_part + averaged
    # In a pipeline shards stay gathered through a batch, and are given back after it. Sizes are of shares.
    return gathered_once + (n - 1) * (accumulation * gathered + reductions * reduced)


def _trained(trainer: AbstractTrainer) -> list[nn.Parameter]:
    parameters = {p: None for model in trainer.named_models().values() for p in model.parameters() if p.requires_grad}
    return list(parameters)


def _size(parameter: nn.Parameter, dtype: torch.dtype | None) -> int:
    """Bytes of this rank's part, in `dtype` or else its own."""
    local = local_tensor(parameter)
    return local.numel() * (local.element_size() if dtype is None else dtype.itemsize)


def _all_reduced(n: int, n_bytes: float) -> float:
    return 2 * (n - 1) / n * n_bytes


def _add(sent: dict[bool, float], trainer: AbstractTrainer, dim: str, size: int, stride: int, n_bytes: float) -> None:
    """Adds what this host's ranks send to the next ones in rings of `size` ranks, each `stride` further in `dim`."""
    world = trainer.world
    assert world.mesh is not None  # looked at before
    ranks = world.mesh.mesh.movedim(MESH_DIMS.index(dim), -1)
    for ring in _rings(ranks.reshape(-1, ranks.shape[-1]).tolist(), size, stride):
        for rank, following in zip(ring, ring[1:] + ring[:1], strict=True):
            if world.host_of(rank) == world.host_number:
                sent[world.host_of(following) == world.host_number] += n_bytes


def _rings(groups: Iterable[list[int]], size: int, stride: int) -> Iterable[list[int]]:
    for group in groups:
        for first in range(0, len(group), size * stride):
            for place in range(stride):
                yield group[first + place : first + size * stride : stride]
