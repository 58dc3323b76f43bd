"""Planning of a save of many tensors on many ranks: what each rank does, and rank 0, in seconds of CPU.

    OMP_NUM_THREADS=1 python tools/bench/planning.py [--tensors 10000] [--ranks 16 64 256]

One process plays every rank in turn: the plan of rank 0 is DCP's own over DTensors, those of the others are the same at
other offsets. Given are a save whose plan is not known, with what is pickled between ranks, and one of the same tensors
as the save before.
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dream_trainer.checkpoint.dcp_writer import TensorWriter
from dream_trainer.checkpoint.store import KnownPlan

ROWS, COLUMNS = 2, 2
T = TypeVar("T")


def sharded_tensors(count: int) -> dict[str, Tensor]:
    """DTensors over a mesh of this process alone, each as large as one rank's part."""
    mesh = init_device_mesh("cpu", (1,))
    return {
        f"model.blocks.{i // 10}.layer.{i % 10}.weight": distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [Shard(0)])
        for i in range(count)
    }


def plan_of(rank: int, n_ranks: int, first: SavePlan) -> SavePlan:
    """The plan of another rank of `n_ranks`."""
    return replace(first, items=[_moved(item, rank, n_ranks) for item in first.items])


def _moved(item: WriteItem, rank: int, n_ranks: int) -> WriteItem:
    assert item.tensor_data is not None
    offsets = torch.Size([rank * ROWS, 0])
    return WriteItem(
        index=MetadataIndex(item.index.fqn, offsets),
        type=item.type,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size([ROWS, COLUMNS])),
            properties=item.tensor_data.properties,
            size=torch.Size([n_ranks * ROWS, COLUMNS]),
        ),
    )


def timed(work: Callable[[], T]) -> tuple[float, T]:
    gc.collect()
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def measure(tensors: dict[str, Tensor], n_ranks: int) -> None:
    known = KnownPlan()
    with tempfile.TemporaryDirectory() as folder:
        writer = TensorWriter(Path(folder), tensors, rank=0, known=known)
        looking, _ = timed(writer.knows_plan)
        planning, first = timed(writer.plan)
        first = plan_of(0, n_ranks, first)
        pickling, pickled = timed(lambda: pickle.dumps(first))
        unpickling, plans = timed(
            lambda: [first] + [pickle.loads(pickle.dumps(plan_of(rank, n_ranks, first))) for rank in range(1, n_ranks)]
        )
        making, _ = timed(lambda: [pickle.dumps(plan_of(rank, n_ranks, first)) for rank in range(1, n_ranks)])
        merging, merged = timed(lambda: writer.merge(plans))
        writer.take(merged[0])
        again = TensorWriter(Path(folder), tensors, rank=0, known=known)
        knowing, is_known = timed(again.knows_plan)
        assert is_known
    rank_0 = planning + unpickling - making + merging
    print(
        f"{n_ranks:5} {looking + planning + pickling:12.2f} {rank_0:12.2f} {unpickling - making:12.2f} "
        f"{merging:10.2f} {knowing * 1e3:16.1f} {len(pickled) / 2**20:10.1f} "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:8.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of planning saves of many tensors on many ranks.")
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256])
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensors = sharded_tensors(options.tensors)
    print(
        f"torch {torch.__version__}, {options.tensors} sharded tensors, load {os.getloadavg()[0]:.1f}; seconds of CPU"
    )
    print("ranks    each rank       rank 0  (unpickling)  (merging)  known plan [ms]  MiB a plan  GiB peak")
    for n_ranks in options.ranks:
        measure(tensors, n_ranks)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
