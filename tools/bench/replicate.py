"""Replication by `fully_shard` over an (n, 1) mesh beside DistributedDataParallel: CPU time per step and rank.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 tools/bench/replicate.py [--steps 40] [--pairs 5]

Both train the same transformer (4 blocks, width 128) by hand-written loops with fused AdamW and accumulation 1 and 4,
in interleaved pairs in one process group. Dream Trainer replicates by the first, for one code path with FSDP and HSDP.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def by_ddp() -> nn.Module:
    return DistributedDataParallel(make_model())


def by_fully_shard() -> nn.Module:
    model = make_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def seconds_per_step(model: nn.Module, steps: int, accumulation: int) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(4, 32, 128)
    for step in range(steps + 3):
        if step == 3:  # warm
            dist.barrier()
            started = time.process_time()
        for micro in range(accumulation):
            is_last = micro == accumulation - 1
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(is_last)
                model(x).square().mean().backward()
            elif is_last:
                model(x).square().mean().backward()
            else:
                with model.no_sync():
                    model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.process_time() - started) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description="fully_shard over (n, 1) beside DistributedDataParallel.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for accumulation in (1, 4):
        rows = [
            (
                seconds_per_step(by_ddp(), options.steps, accumulation),
                seconds_per_step(by_fully_shard(), options.steps, accumulation),
            )
            for _ in range(options.pairs)
        ]
        if dist.get_rank() == 0:
            ddp, sharded = (statistics.median(column) * 1e3 for column in zip(*rows, strict=True))
            print(
                f"accumulation {accumulation}: DDP {ddp:.1f} ms, fully_shard (n, 1) {sharded:.1f} ms, ratio "
                f"{sharded / ddp:.2f}"
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
