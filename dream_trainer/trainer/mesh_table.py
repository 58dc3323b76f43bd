"""The mesh as `describe()` draws it: whose ranks a dimension joins, over which links, and what crosses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dream_trainer.compat.pytorch import local_tensor
from dream_trainer.distributed.world import MESH_DIMS
from dream_trainer.loggers.formatting import format_bytes
from dream_trainer.trainer.traffic import exchanged_for_a_token, step_traffic

if TYPE_CHECKING:
    from torch import nn

    from dream_trainer.distributed.world import World
    from dream_trainer.trainer.abstract import AbstractTrainer


_SHOWN_RANKS = 64
_EXPERTS = "tokens to their experts and back, and their gradients, in each mixture"


def mesh_lines(trainer: AbstractTrainer) -> list[str]:
    """Markdown: a row for each dimension of more than one rank, for each rank, and for each stage of a pipeline; none
    before launch, or on one rank."""
    world = trainer._world
    if world is None or world.mesh is None:
        return []
    traffic = step_traffic(trainer)
    rows = ["| Dimension | Ranks | With this rank | Links | What crosses them | A rank sends in a step |"]
    rows += ["| --- | --- | --- | --- | --- | --- |"]
    for name, size in zip(MESH_DIMS, world.mesh_shape, strict=True):
        if size > 1:
            ranks = world.mesh[name].mesh.tolist()
            links, crossing = world.links(ranks), _crossing(trainer, name)
            told = {} if traffic is None else traffic.by_dimension
            sent = format_bytes(told[name]) if name in told else "-"
            rows.append(f"| {name} | {size} | {_spelled(ranks)} | {links} | {crossing} | {sent} |")
    experts = trainer.config.device_parameters.expert_parallel
    if experts > 1:
        place, of_layers = divmod(world.rank, world.data_copies)
        ranks = [(place // experts * experts + other) * world.data_copies + of_layers for other in range(experts)]
        n_bytes = exchanged_for_a_token(trainer)
        sent = "-" if n_bytes is None else f"{n_bytes / 2**10:.2f} KiB for each of its tokens, if loads are even"
        rows.append(f"| ep, of these | {experts} | {_spelled(ranks)} | {world.links(ranks)} | {_EXPERTS} | {sent} |")
    if traffic is not None and traffic.inside is not None and traffic.between is not None:
        rows += ["", f"In a step the ranks of this host send one another {format_bytes(traffic.inside)}"]
        rows[-1] += f", and other hosts {format_bytes(traffic.between)}." if world.n_hosts > 1 else "."
    speaker = f"This is rank {world.rank} of {world.world_size}."
    return [speaker, "", *rows, "", *_places(trainer, world), *_stages(trainer)]


def _places(trainer: AbstractTrainer, world: World) -> list[str]:
    """A row for each of the first ranks: its host, and its place on each dimension of several."""
    assert world.mesh is not None  # there are several ranks
    experts = trainer.config.device_parameters.expert_parallel
    shown = [name for name, size in zip(MESH_DIMS, world.mesh_shape, strict=True) if size > 1]
    heads = ["Rank", *["Host"] * (world.n_hosts > 1), *shown, *["ep"] * (experts > 1)]
    rows: list[list[Any]] = [heads, ["---"] * len(heads)]
    for rank in range(min(world.world_size, _SHOWN_RANKS)):
        (place,) = (world.mesh.mesh == rank).nonzero().tolist()
        of_rank = {"Rank": rank, "Host": world.host_of(rank), "ep": rank // world.data_copies % experts}
        of_rank |= dict(zip(MESH_DIMS, place, strict=True))
        rows.append([of_rank[head] for head in heads])
    if world.world_size > _SHOWN_RANKS:
        rows.append([f"... {world.world_size - 1}", *[""] * (len(heads) - 1)])
    return [f"| {' | '.join(map(str, row))} |" for row in rows]


def _stages(trainer: AbstractTrainer) -> list[str]:
    """A row for each stage of a pipeline: where it is, and what it holds; and for each model that is in no stages."""
    from dream_trainer.trainer.mixins.pipeline_parallel import PipelineParallelMixin

    if trainer.world.stages == 1 or not isinstance(trainer, PipelineParallelMixin) or not trainer.named_models():
        return []
    rows = ["", "| Model | Stage | Place in the pipeline | Holds |", "| --- | --- | --- | --- |"]
    for model_name, model in trainer.named_models().items():
        if model not in trainer._stages:
            rows.append(f"| {model_name} | - | each | all |")
            continue
        stages = trainer._stages[model]
        for number, (names, rank) in enumerate(zip(stages.names, stages.ranks, strict=True)):
            held = ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:3])}, ... {', '.join(names[-2:])}"
            rows.append(f"| {model_name} | {number} | {rank} | {held} |")
    return rows


def _crossing(trainer: AbstractTrainer, dimension: str) -> str:
    parameters = [parameter for model in trainer.named_models().values() for parameter in model.parameters()]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    shards, workers = trainer.world.parameter_shape.dp_shard, trainer.world.workers
    of_trained = format_bytes(_here(trained))
    match dimension:
        case "dp_replicate" if workers > 1:
            inside = trainer.world.mesh_shape.dp_replicate // workers
            within = f"gradients of {of_trained} within each, once per step; " if inside > 1 else ""
            return f"{workers} workers: {within}parameters of {of_trained} between them, once per round"
        case "dp_replicate":
            return f"gradients of {of_trained}, once per step" if trained else "gradients"
        case "dp_shard":
            whole, gradients = (format_bytes(_here(ones) * shards) for ones in (parameters, trained))
            often = (
                "once per step" if trainer.config.training_parameters.sync_policy == "no_sync" else "per micro-batch"
            )
            if not parameters:
                return "weights and gradients"
            stays = trainer.world.stages > 1  # shards of a stage are there through all micro-batches of a pipeline
            gathered = "once for each batch" if stays else "for forward and again for backward of each micro-batch"
            return f"weights of {whole}, gathered {gathered}; gradients of {gradients}, {often}"
        case "cp":
            of_parameters = "weights and gradients of shards" if shards > 1 else f"gradients of {of_trained}"
            return f"keys and values of each attention, and their gradients; {of_parameters}, as between other ranks"
        case "pp":
            return "what each stage gives of each micro-batch, and its gradients; the loss"
        case _:
            return "activations and their gradients, in each split layer"


def _here(parameters: Sequence[nn.Parameter]) -> int:
    """Bytes of this rank's parts."""
    return sum(local.numel() * local.element_size() for local in map(local_tensor, parameters))


def _spelled(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f", ... {ranks[-1]}" if len(ranks) > 8 else "")
