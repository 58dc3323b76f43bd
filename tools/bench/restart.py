"""From the kill of a job to its next step: with local checkpoints, and with an object store alone; wall seconds.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tools/bench/restart.py [--megabytes 256] [--rounds 5]

The store is SeaweedFS on this machine and disk, started here; local checkpoints lie in /dev/shm. A process trains
layers with AdamW, is told to save (SIGUSR1), and is killed when nothing waits to be sent. The same command is started
at once; the time ends with its first step, and so has Python's start and the imports in it, which are given beside.
Rounds alternate.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dream_trainer as dt
from tests.stores.seaweed import working_store
from tests.stores.servers import BUCKET

WIDTH = 1000
BYTES_OF_A_LAYER = 3 * 4 * WIDTH * WIDTH  # with AdamW's two moments


class Layers(dt.DreamTrainer):
    """Layers one after the other; says each step.

    Args:
        config: As always.
        megabytes: Of parameters and optimizer state.
    """

    def __init__(self, config: Any, megabytes: int) -> None:
        super().__init__(config)
        self.n_layers = max(1, (megabytes << 20) // BYTES_OF_A_LAYER)

    def configure_models(self) -> None:
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(self.n_layers)))

    def configure_dataloaders(self) -> Any:
        return [torch.randn(1, WIDTH) for _ in range(100_000)], None

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.backward(self.model(batch).square().mean())
        self.step(self.model, self.optimizer)
        return {}

    def post_train_step(self) -> None:
        print(f"step {self.global_step}", flush=True)
        time.sleep(0.2)

    def on_save(self, path: Path) -> None:
        print("saved", flush=True)


def train(name: str, megabytes: int, local_directory: str | None) -> None:
    """One start of the command."""
    torch.set_num_threads(1)
    print("imported", flush=True)
    config = dt.DreamTrainerConfig(
        project="bench",
        group="restart",
        experiment=name,
        device_parameters=dt.DeviceParameters(device="cpu"),
        training_parameters=dt.TrainingParameters(max_steps=100_000, n_epochs=None),
        checkpoint_parameters=dt.CheckpointParameters(
            directory=f"s3://{BUCKET}/runs",
            local_directory=local_directory,
            save_every_n_epochs=None,
            keep_last=1,
        ),
    )
    with Layers(config, megabytes) as trainer:
        trainer.fit()


class Run:
    """A run that is killed and started again.

    Args:
        name: Of its experiment.
        directory: To work in.
        options: Of the command.
    """

    def __init__(self, name: str, directory: Path, options: list[str]) -> None:
        self._command = [sys.executable, str(Path(__file__).resolve()), "--train", name, *options]
        self._checkpoints = directory / "runs/bench/restart" / name / "checkpoints"
        self._directory = directory
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> tuple[float, float]:
        """Seconds from now until everything is imported, and until the first step is done."""
        began = time.perf_counter()
        with (self._directory / "errors").open("a") as errors:
            self._process = subprocess.Popen(
                self._command, cwd=self._directory, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._read("imported")
        imported = time.perf_counter() - began
        self._read("step ")
        return imported, time.perf_counter() - began

    def kill(self) -> None:
        """Has it save, and kills it once nothing waits to be sent."""
        assert self._process is not None
        self._process.send_signal(signal.SIGUSR1)
        self._read("saved")
        while any(self._checkpoints.iterdir()):
            self._read("step ")
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def _read(self, beginning: str) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(beginning):
                return
        raise RuntimeError(f"it ended: {(self._directory / 'errors').read_text()[-2000:]}")


def compare(directory: Path, megabytes: int, rounds: int) -> None:
    """Prints the table."""
    size = ["--megabytes", str(megabytes)]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        runs = {"store": Run("store", directory, size), "local": Run("local", directory, [*size, "--local", memory])}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for run in runs.values():
            run.start()
            run.kill()
        for _ in range(rounds):
            for name, run in runs.items():
                times[name].append(run.start())
                run.kill()
    print("| from the kill to the next step | imports | all |\n| --- | --- | --- |")
    for name, found in times.items():
        imports, everything = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"| {name} | {imports:.1f} s | {everything:.1f} s |")
    for what, value in {"all": lambda pair: pair[1], "without imports": lambda pair: pair[1] - pair[0]}.items():
        ratios = sorted(value(a) / value(b) for a, b in zip(times["local"], times["store"], strict=True))
        print(f"{what}: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) of the store's")


def main() -> None:
    """Prints the table, or trains."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train")
    parser.add_argument("--local")
    arguments = parser.parse_args()
    if arguments.train is not None:
        train(arguments.train, arguments.megabytes, arguments.local)
        return
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, {platform.machine()}, {arguments.megabytes} MB")
    with working_store() as (directory, _):
        compare(directory, arguments.megabytes, arguments.rounds)


if __name__ == "__main__":
    main()
