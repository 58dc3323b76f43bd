"""The cells of the parity matrix: which meshes of up to 8 processes there are, and which options each is tried with."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import dream_trainer as dt
from dream_trainer.config.device_parameters import PipelineSchedule
from dream_trainer.errors import ConfigError

GLOBAL_BATCH = 16
SIZES = (1, 2, 4, 8)
Recompute = Literal["none", "full", "selective"]


class Cell(NamedTuple):
    """One way to train the same thing."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    accumulation: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = True
    loss_parallel: bool = False
    overlap_reduce: bool = False
    """Whether gradients leave within backward, in buckets so small that there are many."""
    backend: str | None = None
    """What compiles its blocks; None: nothing."""
    cp: int = 1
    attention: Literal["gathered", "ulysses"] = "gathered"
    """How ranks that share sequences see each other's positions."""
    ep: int = 1
    """Ranks that share the experts of each mixture."""
    pp: int = 1
    schedule: PipelineSchedule = "1F1B"
    """In which order micro-batches go through the stages of a pipeline."""
    microbatches: int | None = None
    """Into how many a pipeline cuts each batch; None: as the trainer does by default."""
    by_blocks: bool = False
    """Whether shards are gathered block by block, as those of large models are."""
    # From here on: what is trained, which one process does as well.
    layers: int = 2
    tied: bool = False
    dtype: Literal["float32", "float64"] = "float64"
    odd_parts: bool = False
    """Whether the model is `OddLlama`."""
    experts: bool = False
    """Whether it is `SparseLlama`."""
    packed: bool = False
    """Whether samples are rows of several documents, which do not see each other."""
    weighted: bool = True
    """Whether samples have unequal numbers of labels, and losses that weight; else all positions count."""

    @property
    def world_size(self) -> int:
        """Processes it needs."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def mesh(self) -> tuple[int, ...]:
        """Sizes of the axes: pp, dp_replicate, dp_shard, cp, tp, ep."""
        return self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp, self.ep

    @property
    def batch(self) -> int:
        """Samples of a micro-batch of one data-parallel rank."""
        return GLOBAL_BATCH // (self.dp_replicate * self.dp_shard * self.accumulation)

    @property
    def stages(self) -> int:
        """Those of its pipeline."""
        return self.pp * (1 if self.schedule in ("1F1B", "GPipe") else 2)

    @property
    def pipeline_parameters(self) -> dt.PipelineParallelParameters:
        """What it sets of a pipeline."""
        return dt.PipelineParallelParameters(schedule=self.schedule, microbatches=self.microbatches)

    @property
    def fsdp_parameters(self) -> dt.FSDPParameters:
        """What it sets of shards."""
        return dt.FSDPParameters(min_group_mib=0 if self.by_blocks else 256)

    @property
    def device_parameters(self) -> dt.DeviceParameters:
        """What it sets of devices; ConfigError where that is refused by name."""
        return dt.DeviceParameters(
            device="cpu",
            dp_replicate=self.dp_replicate,
            dp_shard=self.dp_shard,
            pipeline_parallel=self.pp,
            context_parallel=self.cp,
            expert_parallel=self.ep,
            tensor_parallel=self.tp,
            activation_checkpointing=self.recompute,
            overlap_reduce=self.overlap_reduce,
            compile=self.backend is not None,
        )

    def alone(self) -> Cell:
        """The same training in one process."""
        first = Cell._fields.index("layers")
        return Cell(**dict(zip(Cell._fields[first:], self[first:], strict=True)))


@cache
def all_cells() -> list[Cell]:
    """Every mesh of up to 8 processes: with and without accumulation and recomputing, and with the options it has."""
    meshes = sorted((mesh for mesh in itertools.product(SIZES, repeat=3) if math.prod(mesh) in SIZES), key=math.prod)
    cells = [
        Cell(*mesh, accumulation, recompute)
        for mesh in meshes
        for accumulation in (1, 2)
        for recompute in ("none", "full")
    ]
    cells += [cell._replace(by_blocks=True) for cell in cells if cell.dp_shard > 1 and cell.tp == 1]
    for mesh in ((1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 2)):
        cells += [
            Cell(*mesh, 2, "selective", loss_parallel=True, packed=True),
            Cell(*mesh, 2, "none", sequence_parallel=False, weighted=False),
            Cell(*mesh, 2, "full", sequence_parallel=False, loss_parallel=True, tied=True),
            Cell(*mesh, 1, "none", loss_parallel=True, tied=True),
            Cell(*mesh, 2, "selective", backend="aot_eager"),
            Cell(*mesh, 1, "none", loss_parallel=True, tied=True, backend="inductor"),
        ]
    for cp, mesh in ((cp, mesh) for cp in SIZES[1:] for mesh in meshes if cp * math.prod(mesh) in SIZES):
        cells += [
            Cell(*mesh, 2, cp=cp),
            Cell(*mesh, 1, "selective", cp=cp, tied=True, packed=True),
            Cell(*mesh, 2, "full", cp=cp, attention="ulysses"),
            Cell(*mesh, 1, cp=cp, attention="ulysses", packed=True),
        ]
    for ep, mesh in itertools.product(SIZES, meshes):
        data, cp = mesh[1] if mesh[1] > 1 else mesh[0], 2 if math.prod(mesh) == 4 else 1
        if data % ep == 0 and mesh[2] > 1:
            cells += [Cell(*mesh, 2, "full", ep=ep, experts=True), Cell(*mesh, 1, "none", False, ep=ep, experts=True)]
        elif data % ep == 0:
            cells += [Cell(*mesh, 2, ep=ep, experts=True), Cell(*mesh, 2, "full", ep=ep, experts=True, weighted=False)]
            cells += [Cell(*mesh, 1, "selective", cp=cp, ep=ep, tied=True, experts=True, packed=True)]
    cells += [Cell(*mesh, 2, dtype="float32") for mesh in meshes]
    cells += [Cell(*mesh, 2, how, odd_parts=True) for mesh in meshes for how in ("full", "selective")]
    replicas = [mesh for mesh in meshes if mesh[0] > 1 and mesh[1:] == (1, 1)]
    cells += [Cell(*mesh, 2, how, overlap_reduce=True, odd_parts=True) for mesh in replicas for how in ("none", "full")]
    cells += [*pipelines(), *tied_pipelines(), *sparse_pipelines(), *backwards_in_one()]
    cells += [*odd_pipelines(), *sparse_parts_of_sequences(), *further_pairs()]
    return [*cells, Cell(tied=True), Cell(1, 2, 1, 2, "selective", tied=True)]


def further_pairs() -> list[Cell]:
    """Axes and options that are together in none of the other cells."""
    by_blocks, overlapping = Cell(dp_shard=2, by_blocks=True), Cell(dp_replicate=2, overlap_reduce=True)
    return [
        *(Cell(cp=2, backend="aot_eager"), by_blocks._replace(cp=2, accumulation=2)),
        Cell(cp=2, attention="ulysses", backend="aot_eager", recompute="selective"),
        *(by_blocks._replace(ep=2, experts=True), by_blocks._replace(pp=2, packed=True)),
        *(by_blocks._replace(tp=2, recompute="selective"), by_blocks._replace(backend="aot_eager", tied=True)),
        *(overlapping._replace(cp=2), overlapping._replace(dp_shard=2, by_blocks=True)),
        *(overlapping._replace(ep=2, experts=True), overlapping._replace(backend="aot_eager", packed=True)),
        *(overlapping._replace(tied=True, weighted=False), overlapping._replace(recompute="selective")),
    ]


def tied_pipelines() -> list[Cell]:
    """Pipelines whose first stage and last share the embedding, some of them compiled, on meshes of every kind."""
    pipeline = Cell(pp=2, tied=True)
    compiled = pipeline._replace(backend="aot_eager")
    return [
        *(pipeline, compiled, pipeline._replace(schedule="ZBVZeroBubble", layers=4)),
        pipeline._replace(dp_shard=2, backend="inductor"),
        *(pipeline._replace(tp=2), compiled._replace(tp=2)),
        pipeline._replace(tp=2, accumulation=2, recompute="full", loss_parallel=True),
        pipeline._replace(tp=2, sequence_parallel=False, weighted=False),
        *(pipeline._replace(cp=2, packed=True), pipeline._replace(cp=2, attention="ulysses")),
        pipeline._replace(dp_replicate=2, ep=2, experts=True),
        pipeline._replace(dp_shard=2, ep=2, experts=True, recompute="selective"),
        compiled._replace(dp_shard=2, ep=2, experts=True),
        *(pipeline._replace(dp_shard=2, tp=2), compiled._replace(dp_shard=2, tp=2), pipeline._replace(cp=2, tp=2)),
        pipeline._replace(pp=4, tp=2, layers=4, loss_parallel=True),
        pipeline._replace(dp_shard=2, cp=2, ep=2, experts=True),
        pipeline._replace(dp_shard=2, schedule="DualPipeV", layers=4),
        pipeline._replace(tp=2, schedule="ZBVZeroBubble", layers=4, loss_parallel=True),
        compiled._replace(tp=2, schedule="Interleaved1F1B", layers=4),
    ]


def odd_pipelines() -> list[Cell]:
    """Pipelines of 3, 5, 6 and 7 stages, which do not divide the layers, and tied ends by every schedule."""
    three = Cell(pp=3, layers=4, microbatches=4)
    looped = Cell(pp=2, layers=4, tied=True)
    return [
        *(three, three._replace(tied=True, recompute="full"), three._replace(schedule="GPipe", packed=True)),
        three._replace(schedule="Interleaved1F1B", layers=7, weighted=False),
        *(
            three._replace(schedule="ZBVZeroBubble", layers=7),
            three._replace(schedule="DualPipeV", layers=6, microbatches=8),
        ),
        *(
            three._replace(dp_shard=2),
            three._replace(dp_replicate=2, ep=2, experts=True),
            three._replace(tp=2, layers=5),
        ),
        *(
            three._replace(cp=2, packed=True),
            three._replace(cp=2, attention="ulysses", schedule="ZBVZeroBubble", layers=6),
        ),
        *(
            Cell(pp=5, layers=6, microbatches=8),
            # With 11 layers a gradient's norm jumps to 148, where one process with micro-batches differs by 9e-10.
            Cell(pp=5, layers=12, microbatches=8, schedule="InterleavedZeroBubble"),
        ),
        *(
            Cell(pp=6, layers=8, microbatches=8, tied=True),
            Cell(pp=6, layers=12, microbatches=16, schedule="DualPipeV"),
        ),
        *(Cell(pp=7, layers=8, microbatches=8), Cell(pp=7, layers=14, microbatches=8, schedule="ZBVZeroBubble")),
        looped._replace(layers=2, schedule="GPipe", microbatches=2, packed=True),
        looped._replace(schedule="Interleaved1F1B", microbatches=8, weighted=False),
        looped._replace(schedule="InterleavedZeroBubble", microbatches=2, experts=True),
        looped._replace(schedule="ZBVZeroBubble", microbatches=2, packed=True, accumulation=2),
        looped._replace(schedule="DualPipeV", microbatches=4, dp_shard=2),
    ]


def sparse_parts_of_sequences() -> list[Cell]:
    """Ranks that share sequences, the layers around mixtures, and experts."""
    three = Cell(cp=2, tp=2, experts=True)
    return [
        *(three, three._replace(ep=2), three._replace(ep=2, accumulation=2, recompute="full", attention="ulysses")),
        *(three._replace(dp_shard=2, ep=2), three._replace(dp_shard=2, ep=4, recompute="selective", tied=True)),
        three._replace(dp_replicate=2, ep=4, sequence_parallel=False, accumulation=2),
        three._replace(dp_replicate=2, ep=2, attention="ulysses", loss_parallel=True),
        *(three._replace(cp=4, ep=4), three._replace(cp=2, tp=4, ep=2), three._replace(pp=2, ep=2, accumulation=2)),
    ]


def sparse_pipelines() -> list[Cell]:
    """Pipelines in whose stages ranks share layers beside mixtures, and some experts, too."""
    pipeline = Cell(pp=2, tp=2, experts=True)
    return [
        *(pipeline, pipeline._replace(accumulation=2, recompute="full", sequence_parallel=False)),
        pipeline._replace(dp_replicate=2, ep=2, accumulation=2, loss_parallel=True),
        pipeline._replace(dp_shard=2, ep=2, recompute="selective", tied=True),
        pipeline._replace(schedule="InterleavedZeroBubble", layers=4),
        pipeline._replace(dp_shard=2, ep=2, schedule="Interleaved1F1B", layers=4, recompute="full"),
        pipeline._replace(dp_shard=2, ep=2, schedule="DualPipeV", layers=4, accumulation=2),
    ]


def backwards_in_one() -> list[Cell]:
    """Pipelines by schedules that compute gradients of weights apart, but for what is recomputed or compiled."""
    looped = Cell(pp=2, layers=4, schedule="InterleavedZeroBubble", recompute="full")
    zigzag = looped._replace(schedule="ZBVZeroBubble", recompute="selective")
    both_ways = looped._replace(schedule="DualPipeV", accumulation=2)
    return [
        *(looped._replace(tied=True), looped._replace(cp=2, packed=True, accumulation=2)),
        *(
            looped._replace(tp=2, recompute="selective", weighted=False),
            looped._replace(dp_shard=2, backend="aot_eager"),
        ),
        *(
            looped._replace(dp_shard=2, ep=2, experts=True),
            looped._replace(pp=4, tp=2, layers=8, recompute="selective"),
        ),
        *(zigzag, zigzag._replace(dp_shard=2, recompute="full", microbatches=2), zigzag._replace(tp=2, packed=True)),
        *(zigzag._replace(dp_replicate=2, ep=2, experts=True), zigzag._replace(dp_shard=2, tp=2, tied=True)),
        *(both_ways._replace(cp=2, attention="ulysses"), both_ways._replace(tp=2, recompute="selective")),
        *(
            both_ways._replace(dp_shard=2, tied=True),
            both_ways._replace(dp_replicate=2, ep=2, experts=True, packed=True),
        ),
        both_ways._replace(backend="aot_eager", recompute="none", accumulation=1),
    ]


def pipelines() -> list[Cell]:
    """Every mesh with a pipeline, any two options together on some mesh, and each on every mesh."""
    meshes = [
        {"pp": pp, "dp_replicate": replicate, "dp_shard": shard, "cp": cp, "tp": tp, "ep": ep, "experts": ep > 1}
        for pp, replicate, shard, cp, tp, ep in itertools.product(SIZES[1:], *[SIZES] * 5)
        if pp * replicate * shard * cp * tp in SIZES
    ]
    options: dict[str, Sequence[Any]] = {
        "mesh": [mesh for mesh in meshes if is_there(Cell(**mesh))],
        "schedule": get_args(PipelineSchedule),
        "filled": (1, 2),
        "recompute": get_args(Recompute),
        "accumulation": (1, 2),
        "weighted": (True, False),
        "packed": (False, True),
        "experts": (False, True),
    }

    def cell_of(way: dict[str, Any]) -> Cell | None:
        """That of a choice of options, if there can be one."""
        values = dict(way)
        mesh, filled = values.pop("mesh"), values.pop("filled")
        cell = Cell(**mesh | values | {"experts": mesh["experts"] or values["experts"]})
        cell = cell._replace(layers=max(2, cell.stages), microbatches=filled * cell.pp)
        return cell if fits(cell) else None

    return pairwise(options, cell_of)


def is_there(cell: Cell) -> bool:
    """Whether nothing of a cell's mesh is refused by name."""
    try:
        return cell.device_parameters is not None
    except ConfigError:
        return False


def fits(cell: Cell) -> bool:
    """Whether the sizes of a cell with a pipeline go together, and its options are there."""
    shards = cell.dp_shard * cell.cp if cell.dp_shard > 1 else 1
    apart = cell.schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    microbatches = cell.microbatches or 2 * cell.pp
    return not (
        (shards if shards > 1 else cell.dp_replicate * cell.cp) % cell.ep
        or cell.batch % microbatches
        or (cell.schedule == "DualPipeV" and microbatches < cell.stages)  # which sends two ways at once
        or (cell.cp > 1 and not cell.weighted)
        or (cell.experts and cell.tp > 1)  # which have cells of their own
        or (apart and cell.recompute != "none")  # so do these
    )


def pairwise(options: dict[str, Sequence[Any]], cell_of: Callable[[dict[str, Any]], Cell | None]) -> list[Cell]:
    """Few cells in which any two values of two options are together, where `cell_of` gives a cell for them at all.

    Args:
        options: Values of each.
        cell_of: The cell of a value for each option; None: there is none.
    """
    drawn = random.Random(0)
    pairs = [
        ((one, a), (other, b))
        for one, other in itertools.combinations(options, 2)
        for a in range(len(options[one]))
        for b in range(len(options[other]))
    ]
    missing, cells = dict.fromkeys(pairs), []
    for pair in pairs:
        if pair not in missing:
            continue
        best: tuple[int, Cell, list[Any]] | None = None
        tried = 0
        for _ in range(400):
            places = {name: drawn.randrange(len(values)) for name, values in options.items()} | dict(pair)
            cell = cell_of({name: values[places[name]] for name, values in options.items()})
            if cell is not None:
                tried += 1
                new = [together for together in itertools.combinations(places.items(), 2) if together in missing]
                if best is None or len(new) > best[0]:
                    best = len(new), cell, new
            if tried == 20:
                break
        if best is not None:
            cells.append(best[1])
            for found in best[2]:
                del missing[found]
    return list(dict.fromkeys(cells))
