"""Bringing a checkpoint to an object store and back, beside the bare client: seconds, from one process.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tools/bench/object_store.py [--megabytes 256] [--rounds 5]

The store is SeaweedFS on this machine and disk, started here. Bare is boto3's `upload_file` and `download_file` of the
checkpoint's shard, in parts of 16 MiB of which ten are under way; ours is all that a run does: every file, the manifest
on its condition, the listing before it, then the local removal; and to load it, every checksum and the copy into
tensors. After one of each, rounds alternate. Last, matrix products a second with nothing else to do and while a
checkpoint is sent, on cores that the server computes on, too.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dream_trainer.checkpoint.remote_run import RemoteRun
from dream_trainer.checkpoint.store import Snapshot, load_tensors, write_checkpoint
from dream_trainer.config.checkpoint_parameters import CheckpointParameters
from dream_trainer.distributed.ranks import Ranks
from dream_trainer.stores.store_path import StorePath
from tests.stores.seaweed import working_store
from tests.stores.servers import BUCKET

DESCRIPTION = {"epoch": 0, "samples_seen": 0, "mesh_shape": {}, "config": {}, "metrics": {}}


class Bench:
    """A checkpoint on the disk, and ways to send and to load it.

    Args:
        directory: To work in.
        address: Of the server.
        megabytes: Size of the checkpoint.
    """

    def __init__(self, directory: Path, address: str, megabytes: int) -> None:
        import boto3
        from boto3.s3.transfer import TransferConfig

        self._stage, self._directory = directory / "stage", directory
        self.tensors = {f"models.net.{index}": torch.randn(1000, 1000) for index in range(megabytes // 4)}
        self._client: Any = boto3.client("s3", endpoint_url=address)
        self._config = TransferConfig(max_concurrency=10, multipart_chunksize=16 << 20, multipart_threshold=32 << 20)
        run_dir = directory / "run"
        run_dir.mkdir()
        run = StorePath(f"s3://{BUCKET}/run")
        self._remote = run / "checkpoints"
        self._sender = RemoteRun(self._remote, CheckpointParameters(), Ranks.alone(), run_dir, lambda: None)
        self._sender.begin(self._stage)
        self._step = 0
        self._shard = directory / "shard"

    def write(self) -> Path:
        """A new checkpoint on the disk."""
        self._step += 1
        snapshot = Snapshot(
            step=self._step,
            tensors=self.tensors,
            shared=b"{}",
            rank_state=b"{}",
            rank_tensors={},
            description=DESCRIPTION,
        )
        return write_checkpoint(self._stage, snapshot, world=Ranks.alone())

    def send(self) -> float:
        """Seconds to send one."""
        path = self.write()
        began = time.perf_counter()
        self._sender.put(path)
        self._sender.finish()
        return time.perf_counter() - began

    def begin_to_send(self) -> None:
        self._sender.put(self.write())

    def finish(self) -> None:
        self._sender.finish()

    def close(self) -> None:
        self._sender.end()

    def send_bare(self) -> float:
        """Seconds in which the client sends the shard."""
        path = self.write()
        shutil.copy(path / "__0_0.distcp", self._shard)
        shutil.rmtree(path)
        began = time.perf_counter()
        self._client.upload_file(str(self._shard), BUCKET, f"bare/{self._step}", Config=self._config)
        return time.perf_counter() - began

    def load(self) -> float:
        """Seconds to load the newest."""
        path = max(self._remote.iterdir(), key=lambda path: path.name)
        began = time.perf_counter()
        load_tensors(self._remote / path.name, self.tensors, world=Ranks.alone())
        return time.perf_counter() - began

    def load_bare(self) -> float:
        """Seconds in which the client fetches the newest shard to the disk."""
        key = self._client.list_objects_v2(Bucket=BUCKET, Prefix="bare/")["Contents"][-1]["Key"]
        began = time.perf_counter()
        self._client.download_file(BUCKET, key, str(self._directory / "fetched"), Config=self._config)
        return time.perf_counter() - began


def computing(seconds: float) -> float:
    """Matrix products a second, for so long."""
    a = torch.randn(256, 256)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        a @ a
        count += 1
    return count / (time.perf_counter() - began)


def compare(name: str, ours: Callable[[], float], bare: Callable[[], float], rounds: int, megabytes: int) -> None:
    """Prints a row of the table."""
    ours(), bare()
    pairs = [(ours(), bare()) for _ in range(rounds)]
    mine, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratios = sorted(a / b for a, b in pairs)
    print(
        f"| {name} | {theirs:.2f} s, {megabytes / theirs:.0f} MB/s | {mine:.2f} s, {megabytes / mine:.0f} MB/s | "
        f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, {platform.machine()}, {arguments.megabytes} MB")
    with working_store() as (directory, address):
        bench = Bench(directory, address, arguments.megabytes)
        print("| | bare client | Dream Trainer | ratio |\n| --- | --- | --- | --- |")
        compare("send", bench.send, bench.send_bare, arguments.rounds, arguments.megabytes)
        compare("load", bench.load, bench.load_bare, arguments.rounds, arguments.megabytes)
        alone = computing(2.0)
        bench.begin_to_send()
        meanwhile = computing(2.0)
        bench.finish()
        print(f"matrix products a second: {alone:.0f} alone, {meanwhile:.0f} while one is sent")
        bench.close()


if __name__ == "__main__":
    main()
