"""The output of `describe()`: the setup order with its reasons, the listeners of each event, and the mesh."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from dream_trainer.compat.pytorch import reading_waits
from dream_trainer.distributed.world import MESH_DIMS, World
from dream_trainer.parallel.axis import Parallelism
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
    rows = ["| Dimension | Ranks | With this rank | Links | What crosses them |", "| --- | --- | --- | --- | --- |"]
    for name, size in world.mesh_shape._asdict().items():
        if size > 1:
            ranks = world.mesh[name].mesh.tolist()
            links, crossing = world.links(ranks), _crossing(runtime, name)
            rows.append(f"| {name} | {size} | {_spelled(ranks)} | {links} | {crossing} |")
    for axis in _among_data(runtime):
        n_ranks, (place, of_layers) = axis.value(runtime.config), divmod(world.rank, world.data_copies)
        ranks = [(place // n_ranks * n_ranks + other) * world.data_copies + of_layers for other in range(n_ranks)]
        links, name = world.links(ranks), axis.dimension
        rows.append(f"| {name}, of these | {n_ranks} | {_spelled(ranks)} | {links} | {axis.crossing} |")
    rows += ["", "`dream-trainer plan` counts the bytes of each collective in a step."]
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
    shape, workers = runtime.world.parameter_shape, runtime.world.workers
    match dimension:
        case "dp_replicate" if workers > 1:
            within = "gradients within each, once per step; " if shape.dp_replicate > workers else ""
            return f"{workers} workers: {within}parameters between them, once per round"
        case "dp_replicate":
            return "gradients, once per step"
        case "dp_shard":
            is_once = runtime.config.training_parameters.sync_policy == "no_sync"
            stays = runtime.world.stages > 1  # shards of a stage are there through all micro-batches
            gathered = "once for each batch" if stays else "for forward and again for backward of each micro-batch"
            return f"weights, gathered {gathered}; gradients, {'once per step' if is_once else 'per micro-batch'}"
        case _:
            axes = runtime.parallel.active_axes(runtime.config)
            crossing = next(axis.crossing for axis in axes if axis.dimension == dimension)
            if getattr(shape, dimension) > 1:
                return crossing
            of_parameters = "weights and gradients of shards" if shape.dp_shard > 1 else "gradients"
            return f"{crossing}; {of_parameters}, as between other ranks"


def _spelled(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f", ... {ranks[-1]}" if len(ranks) > 8 else "")
