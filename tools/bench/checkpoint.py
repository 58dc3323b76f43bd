"""Saving and loading a checkpoint beside bare DCP: seconds, on CPU, sharded over any number of ranks.

    OMP_NUM_THREADS=1 python tools/bench/checkpoint.py [--tensors 125] [--rounds 5] [--directory .]
    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 tools/bench/checkpoint.py

The state is `--tensors` float32 tensors of a million elements (125: 500 MB), sharded as DTensors where there are
several ranks. Bare is `dcp.save` and `dcp.load` of PyTorch, which hash nothing; ours are `write_checkpoint` and
`load_tensors`, checksums included. After one of each, rounds alternate, so that a drifting disk meets both. Each writes
to an empty directory on an idle disk. Loads follow a save, so files are in the page cache: what is timed is the work,
not the disk. A last row is a trainer's that saves in the background.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import dream_trainer as dt
from dream_trainer.checkpoint.store import Snapshot, load_tensors, write_checkpoint
from dream_trainer.config.device_parameters import DeviceParameters
from dream_trainer.data.loader import PerRankLoader
from dream_trainer.distributed.ranks import Ranks
from dream_trainer.distributed.world import World

TARGETS = {"save": 1.2, "load": 1.5}
HELD = 0.2
DESCRIPTION = {"epoch": 0, "samples_seen": 0, "mesh_shape": {}, "config": {}, "metrics": {}}


def make_tensors(count: int, world: Ranks) -> dict[str, Tensor]:
    """`count` tensors of a million elements, (1000, 1000), sharded by rows if there are several ranks."""
    full = (torch.randn(1000, 1000) for _ in range(count))
    if world.world_size == 1:
        return {f"models.net.{index}": tensor for index, tensor in enumerate(full)}
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world.world_size,))
    return {f"models.net.{index}": distribute_tensor(tensor, mesh, [Shard(0)]) for index, tensor in enumerate(full)}


class Bench:
    """The state, and a way each to save and load it.

    Args:
        root: An empty directory.
        tensors: The state.
        world: The ranks.
    """

    def __init__(self, root: Path, tensors: dict[str, Tensor], world: Ranks) -> None:
        self.bare = root / "bare"
        self.ours = root / "ours"
        self.tensors = tensors
        self.world = world
        self.snapshot = Snapshot(
            step=1, tensors=tensors, shared=b"{}", rank_state=b"{}", rank_tensors={}, description=DESCRIPTION
        )

    def clear(self) -> None:
        """Removes what was saved, and waits until the disk is idle."""
        if self.world.is_main:
            for path in (self.bare, self.ours):
                shutil.rmtree(path, ignore_errors=True)
            os.sync()

    def save_bare(self) -> None:
        dcp.save(self.tensors, checkpoint_id=self.bare)

    def save_ours(self) -> None:
        write_checkpoint(self.ours, self.snapshot, world=self.world)

    def load_bare(self) -> None:
        dcp.load(self.tensors, checkpoint_id=self.bare)

    def load_ours(self) -> None:
        load_tensors(self.ours / "step_00000001", self.tensors, world=self.world)

    def seconds(self, work: Callable[[], None]) -> float:
        """How long `work` takes until all ranks have done it."""
        self.world.all_gather_object(None)
        started = time.perf_counter()
        work()
        self.world.all_gather_object(None)
        return time.perf_counter() - started


def measure(bench: Bench, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(bare, ours) seconds of each round, for saving and for loading."""
    ways = ((bench.save_bare, bench.load_bare), (bench.save_ours, bench.load_ours))
    rows: dict[str, list[tuple[float, float]]] = {"save": [], "load": []}
    for number in range(rounds + 1):
        saved, loaded = [0.0, 0.0], [0.0, 0.0]
        for index in (0, 1) if number % 2 else (1, 0):  # the disk may still work for the one that went first
            save, load = ways[index]
            bench.clear()
            saved[index] = bench.seconds(save)
            loaded[index] = bench.seconds(load)
        if number:  # the first is warm-up
            rows["save"].append((saved[0], saved[1]))
            rows["load"].append((loaded[0], loaded[1]))
    bench.clear()
    return rows


@dataclass
class Config(dt.BaseTrainerConfig, dt.SetupConfigMixin, dt.FSDPConfigMixin, dt.CheckpointConfigMixin):
    tensors: int = 41


class Many(nn.Module):
    """Tensors of a million elements."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.zeros(1000, 1000)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return sum((parameter[0].mean() for parameter in self.all), x.sum())


class Saves(dt.BaseTrainer, dt.SetupMixin, dt.FSDPMixin, dt.CheckpointMixin):
    """Saves each step in the background, and notes for how long that holds the training thread.

    A step waits until the last checkpoint is on the disk, as it would be with steps that take longer than a save.
    """

    config: Config

    def configure_models(self) -> None:
        self.model = Many(self.config.tensors)
        self.held: list[float] = []

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def configure_dataloaders(self) -> tuple[object, None]:
        return PerRankLoader([torch.zeros(1)] * 64), None

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, object]:
        while self._runtime.saver.writing.is_busy:
            time.sleep(0.01)
        self.backward(self.model(batch))
        self.step(self.model, self.optimizer)
        return {}

    def post_setup(self) -> None:
        saver, save_if_due, wait_for_copies = (
            self._runtime.saver,
            self._runtime.saver.save_if_due,
            self._runtime.saver.wait_for_copies,
        )

        def timed_save(**when: Any) -> None:
            started = time.perf_counter()
            save_if_due(**when)
            if not when["is_last"]:  # which waits for the disk
                self.held.append(time.perf_counter() - started)

        def timed_update() -> None:
            started = time.perf_counter()
            wait_for_copies()
            if self.held:
                self.held[-1] += time.perf_counter() - started

        saver.save_if_due, saver.wait_for_copies = timed_save, timed_update  # type: ignore[method-assign]


def measure_held(root: Path, megabytes: int, rounds: int) -> list[float]:
    """Seconds for which a background save holds training, after the first save; parameters and AdamW's moments."""
    os.chdir(root)
    config = Config(
        project="bench",
        group="checkpoint",
        experiment="held",
        tensors=round(megabytes / 4 / 3),
        device_parameters=DeviceParameters(device="cpu"),
        training_parameters=dt.TrainingParameters(max_steps=rounds + 2),
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_steps=1, save_every_n_epochs=None, keep_last=2),
    )
    with Saves(config) as trainer:
        trainer.fit()
    return trainer.held[1 : rounds + 1]


def report(rows: dict[str, list[tuple[float, float]]], count: int, world: Ranks) -> None:
    """Prints medians, and the median of the rounds' ratios beside its target."""
    print(
        f"torch {torch.__version__}, python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} cores"
    )
    print(
        f"{count * 4} MB over {world.world_size} ranks on {os.cpu_count()} cores, median of {len(rows['save'])} rounds"
    )
    for name, pairs in rows.items():
        bare, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(mine / theirs for theirs, mine in pairs)
        verdict = "meets" if ratio <= TARGETS[name] else "MISSES"
        print(
            f"{name}: bare {bare:.3f} s, ours {ours:.3f} s, ratio {ratio:.2f} ({verdict} the target of at most "
            f"{TARGETS[name]})"
        )
        print(f"  rounds, bare/ours: {', '.join(f'{theirs:.3f}/{mine:.3f}' for theirs, mine in pairs)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Checkpoints beside bare DCP.")
    parser.add_argument("--tensors", type=int, default=125, help="of a million float32 each (4 MB)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path(), help="the disk to write to; all ranks' own")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    is_alone = "RANK" not in os.environ
    world: Ranks = Ranks.alone() if is_alone else World(DeviceParameters(device="cpu"), shard_by_default=True)
    made = tempfile.mkdtemp(prefix="bench_checkpoint_", dir=options.directory) if world.is_main else ""
    root = Path(world.all_gather_object(made)[0])
    try:
        rows = measure(Bench(root, make_tensors(options.tensors, world), world), options.rounds)
        if world.is_main:
            report(rows, options.tensors, world)
        held = measure_held(root.resolve(), options.tensors * 4, options.rounds)
        if world.is_main:
            bare = statistics.median(theirs for theirs, _ in rows["save"])
            share = statistics.median(held) / bare
            print(
                f"save in the background: training is held for {statistics.median(held):.3f} s, {share:.0%} of a bare "
                f"synchronous save ({'meets' if share < HELD else 'MISSES'} the target of less than {HELD:.0%})"
            )
            print(f"  rounds: {', '.join(f'{seconds:.3f}' for seconds in held)}")
    finally:
        if world.is_main:
            shutil.rmtree(root, ignore_errors=True)
    if isinstance(world, World):
        world.close()


if __name__ == "__main__":
    main()
