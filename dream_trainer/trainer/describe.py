"""The output of `describe()`: the setup order with its reasons, the listeners of each event, and the mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.optim import Optimizer

from dream_trainer.compat.pytorch import local_tensor, reading_waits
from dream_trainer.distributed.world import MESH_DIMS, World
from dream_trainer.loggers.formatting import format_bytes
from dream_trainer.modules.precision import half_dtype, reduce_dtype
from dream_trainer.parallel.axis import Parallelism
from dream_trainer.parallel.sharding import fsdp_modules
from dream_trainer.trainer.event_table import describe_events
from dream_trainer.trainer.runtime import Runtime
from dream_trainer.trainer.step.gradients import guards_itself


def describe(runtime: Runtime) -> str:
    """Markdown of the trainer's setup order and event table; works before launch."""
    name = type(runtime.hooks).__name__
    stages = runtime.hooks._setup_stages() or [("setup", f"{name} sets itself up")]
    lines = [f"# {name}", "", "## Setup order", "", "| # | Stage | Why here |", "| --- | --- | --- |"]
    lines += [f"| {number} | {stage} | {reason} |" for number, (stage, reason) in enumerate(stages, start=1)]
    lines += ["", "## Events", "", describe_events(runtime)]
    mesh = mesh_lines(runtime)
    if mesh:
        lines += ["", "## Mesh", "", *mesh]
    optimizers = runtime.registry.optimizers()
    if optimizers:
        lines += ["", "## Non-finite gradients", "", "| Optimizer | How a bad step is left out |", "| --- | --- |"]
        lines += [f"| {name} | {_guard(runtime, optimizer)} |" for name, optimizer in optimizers.items()]
    return "\n".join(lines)


def _guard(runtime: Runtime, optimizer: Optimizer) -> str:
    if runtime.config.training_parameters.on_nonfinite == "retry":
        return "the norm is read on the host at each step, to run the window again"
    if runtime.launched is not None and not reading_waits(runtime.launched.parameter_device):
        return "the norm is read on the host at each step, which waits for nothing on a CPU"
    if guards_itself(optimizer, runtime.parallel.gradients.shard_of):
        return "on the device, without waiting for it"
    return "the norm is read on the host at each step (a fused optimizer would not need that)"


_SHOWN_RANKS = 64


def mesh_lines(runtime: Runtime) -> list[str]:
    """Markdown: a row for each dimension of more than one rank, each rank, and each stage."""
    world = runtime.launched
    if world is None or world.mesh is None:
        return []
    traffic = step_traffic(runtime)
    rows = ["| Dimension | Ranks | With this rank | Links | What crosses them | A rank sends in a step |"]
    rows += ["| --- | --- | --- | --- | --- | --- |"]
    for name, size in world.mesh_shape._asdict().items():
        if size > 1:
            ranks = world.mesh[name].mesh.tolist()
            links, crossing = world.links(ranks), _crossing(runtime, name)
            told = {} if traffic is None else traffic.by_dimension
            sent = format_bytes(told[name]) if name in told else "-"
            rows.append(f"| {name} | {size} | {_spelled(ranks)} | {links} | {crossing} | {sent} |")
    models = runtime.registry.models().values()
    for axis in _among_data(runtime):
        n_ranks, (place, of_layers) = axis.value(runtime.config), divmod(world.rank, world.data_copies)
        ranks = [(place // n_ranks * n_ranks + other) * world.data_copies + of_layers for other in range(n_ranks)]
        n_bytes = axis.sent_per_token(models, runtime.config)
        sent = "-" if n_bytes is None else f"{n_bytes / 2**10:.2f} KiB for each of its tokens, if loads are even"
        links, name = world.links(ranks), axis.dimension
        rows.append(f"| {name}, of these | {n_ranks} | {_spelled(ranks)} | {links} | {axis.crossing} | {sent} |")
    if traffic is not None and traffic.inside is not None and traffic.between is not None:
        rows += ["", f"In a step the ranks of this host send one another {format_bytes(traffic.inside)}"]
        rows[-1] += f", and other hosts {format_bytes(traffic.between)}." if world.n_hosts > 1 else "."
    speaker = f"This is rank {world.rank} of {world.world_size}."
    return [speaker, "", *rows, "", *_places(runtime, world), *_stages(runtime)]


def _places(runtime: Runtime, world: World) -> list[str]:
    """A row for each of the first ranks: its host, and its place on each dimension of several."""
    assert world.mesh is not None  # there are several ranks
    among_data = {axis.dimension: axis.value(runtime.config) for axis in _among_data(runtime)}
    shown = [name for name, size in world.mesh_shape._asdict().items() if size > 1]
    heads = ["Rank", *["Host"] * (world.n_hosts > 1), *shown, *among_data]
    rows: list[list[Any]] = [heads, ["---"] * len(heads)]
    for rank in range(min(world.world_size, _SHOWN_RANKS)):
        (place,) = (world.mesh.mesh == rank).nonzero().tolist()
        of_rank: dict[str, Any] = {"Rank": rank, "Host": world.host_of(rank)}
        of_rank |= {name: rank // world.data_copies % size for name, size in among_data.items()}
        of_rank |= dict(zip(MESH_DIMS, place, strict=True))
        rows.append([of_rank[head] for head in heads])
    if world.world_size > _SHOWN_RANKS:
        rows.append([f"... {world.world_size - 1}", *[""] * (len(heads) - 1)])
    return [f"| {' | '.join(map(str, row))} |" for row in rows]


def _among_data(runtime: Runtime) -> list[Parallelism]:
    return [axis for axis in runtime.parallel.active_axes(runtime.config) if axis.is_among_data]


def _stages(runtime: Runtime) -> list[str]:
    """A row for each stage: where it is, and what it holds; and for each model that is in no stages."""
    if not runtime.parallel.stages:
        return []
    rows = ["", "| Model | Stage | Stage rank | Holds |", "| --- | --- | --- | --- |"]
    for model_name, model in runtime.registry.models().items():
        if model not in runtime.parallel.stages:
            rows.append(f"| {model_name} | - | each | all |")
            continue
        stages = runtime.parallel.stages[model]
        for number, (names, rank) in enumerate(zip(stages.names, stages.ranks, strict=True)):
            held = ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:3])}, ... {', '.join(names[-2:])}"
            rows.append(f"| {model_name} | {number} | {rank} | {held} |")
    return rows


def _crossing(runtime: Runtime, dimension: str) -> str:
    parameters = [parameter for model in runtime.registry.models().values() for parameter in model.parameters()]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    shards, workers = runtime.world.parameter_shape.dp_shard, runtime.world.workers
    of_trained = format_bytes(_here(trained))
    match dimension:
        case "dp_replicate" if workers > 1:
            inside = runtime.world.mesh_shape.dp_replicate // workers
            within = f"gradients of {of_trained} within each, once per step; " if inside > 1 else ""
            return f"{workers} workers: {within}parameters of {of_trained} between them, once per round"
        case "dp_replicate":
            return f"gradients of {of_trained}, once per step" if trained else "gradients"
        case "dp_shard":
            whole, gradients = (format_bytes(_here(ones) * shards) for ones in (parameters, trained))
            often = (
                "once per step" if runtime.config.training_parameters.sync_policy == "no_sync" else "per micro-batch"
            )
            if not parameters:
                return "weights and gradients"
            stays = runtime.world.stages > 1  # shards of a stage are there through all micro-batches
            gathered = "once for each batch" if stays else "for forward and again for backward of each micro-batch"
            return f"weights of {whole}, gathered {gathered}; gradients of {gradients}, {often}"
        case _:
            axes = runtime.parallel.active_axes(runtime.config)
            crossing = next(axis.crossing for axis in axes if axis.dimension == dimension)
            if getattr(runtime.world.parameter_shape, dimension) > 1:
                return crossing
            of_parameters = "weights and gradients of shards" if shards > 1 else f"gradients of {of_trained}"
            return f"{crossing}; {of_parameters}, as between other ranks"


def _here(parameters: Sequence[nn.Parameter]) -> int:
    return sum(local.numel() * local.element_size() for local in map(local_tensor, parameters))


def _spelled(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f", ... {ranks[-1]}" if len(ranks) > 8 else "")


# -- Traffic: bytes per step over the links of a mesh, within hosts and between them, by formula.
#
# Every collective counts as a ring over its ranks. Gloo uses rings, and NCCL does by default for large tensors within
# a host and over few hosts. Over n ranks each rank sends (n-1)/n of the bytes that are gathered or reduce-scattered,
# and twice that of an all-reduce. The pulse and single numbers such as the norm are left out.


@dataclass(frozen=True)
class Traffic:
    """Bytes of a step, on average over rounds where LocalSGDMixin has some."""

    by_dimension: dict[str, float]  # bytes this rank sends; unknown dimensions are left out
    inside: float | None  # bytes between the ranks of this host; None if unknown
    between: float | None  # what they send to other hosts; None likewise


def step_traffic(runtime: Runtime) -> Traffic | None:
    """None before launch, on one rank, or where ranks with different data divide a model. Of split layers only weights
    and gradients count."""
    world = runtime.launched
    if world is None or world.mesh is None or not runtime.registry.models():
        return None
    if _among_data(runtime):
        return None
    by_dimension: dict[str, float] = {}
    whole = {shard for model in runtime.parallel.whole_in_steps for shard in model.shard_of.values()}
    sent = {True: 0.0, False: 0.0}
    shape, of_parameters = world.mesh_shape, world.parameter_shape  # ranks that share sequences are among the latter's
    if shape.dp_shard > 1:
        by_dimension["dp_shard"] = n_bytes = _of_shards(runtime, of_parameters.dp_shard)
        _add(sent, runtime, "dp_shard", shape.dp_shard, 1, n_bytes)
    if shape.dp_replicate > 1:
        workers = world.workers
        inside, trained = of_parameters.dp_replicate // workers, _trained(runtime)
        sizes = [_size(p, reduce_dtype(runtime.config.device_parameters)) for p in trained if p not in whole]
        within = _all_reduced(inside, sum(sizes))
        across = _all_reduced(workers, sum(_size(p, None) for p in trained)) / runtime.rounds.steps
        _add(sent, runtime, "dp_replicate", inside, 1, within)
        _add(sent, runtime, "dp_replicate", workers, inside, across)
        by_dimension["dp_replicate"] = within + across
    models = runtime.registry.models().values()
    for axis in runtime.parallel.active_axes(runtime.config):
        if (of_batch := axis.sent_per_batch(models, runtime.config)) is not None:
            by_dimension[axis.dimension] = runtime.state.accumulation_steps * of_batch
    if whole and shape.dp_replicate > 1:  # whose gradients are averaged over both dimensions at once
        return Traffic(by_dimension, inside=None, between=None)
    if world.stages * world.sample_copies > 1:  # other stages send other numbers, and activations any
        return Traffic(by_dimension, inside=None, between=None)
    return Traffic(by_dimension, inside=sent[True], between=sent[False])


def _of_shards(runtime: Runtime, n: int) -> float:
    from dream_trainer.compat.fully_shard import gathered_dtype, gathers_of, is_shared, parameters_of

    devices, accumulation = runtime.config.device_parameters, runtime.state.accumulation_steps
    reductions = 1 if runtime.config.training_parameters.sync_policy == "no_sync" else accumulation
    gathered = reduced = gathered_once = 0.0
    reduced_in = reduce_dtype(devices) or (torch.float32 if half_dtype(devices) is not None else None)
    for module in (module for model in runtime.registry.models().values() for module in fsdp_modules(model)):
        if is_shared(module):
            parameters = parameters_of(module)
            gathered += gathers_of(module) * sum(_size(p, gathered_dtype(p) or half_dtype(devices)) for p in parameters)
            reduced += sum(_size(p, reduced_in) for p in parameters if p.requires_grad)
    if runtime.world.device.type == "cpu":
        reductions *= 2  # gloo reduces and scatters by reducing for all
    for model in runtime.parallel.whole_in_steps:  # gathered once for a step, gradients averaged as those of replicas
        n_trained = sum(_size(p, reduce_dtype(devices)) for p in model.shard_of.values() if p.requires_grad)
        averaged = _all_reduced(runtime.world.step_size, n * n_trained)
        gathered_once += (n - 1) * model.bytes_of_part + averaged
    # In stages shards stay gathered through a batch, and are given back after it. Sizes are of shares.
    return gathered_once + (n - 1) * (accumulation * gathered + reductions * reduced)


def _trained(runtime: Runtime) -> list[nn.Parameter]:
    models = runtime.registry.models().values()
    return list(dict.fromkeys(p for model in models for p in model.parameters() if p.requires_grad))


def _size(parameter: nn.Parameter, dtype: torch.dtype | None) -> int:
    local = local_tensor(parameter)
    return local.numel() * (local.element_size() if dtype is None else dtype.itemsize)


def _all_reduced(n: int, n_bytes: float) -> float:
    return 2 * (n - 1) / n * n_bytes


def _add(sent: dict[bool, float], runtime: Runtime, dim: str, size: int, stride: int, n_bytes: float) -> None:
    """Adds what this host's ranks send to the next ones in rings of `size` ranks, each `stride` further in `dim`."""
    world = runtime.world
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
