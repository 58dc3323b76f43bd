"""For how long background saves of the llama example's state hold its training: the first one and a later one.

    python tools/bench/llama_save.py            # on CUDA: the 1b preset, bf16, compiled
    python tools/bench/llama_save.py --model tiny --batch 2 --seq-len 64

The device is waited for at each step's end, so that a step's time is its own. A save comes after every eighth step,
once the one before is on the disk. What a save holds training for is the time of the step after it less that of the
fastest step; the steps after that tell what writing beside them costs. A checkpoint of the 1b preset is 15 GB,
of which two are on the disk (where `TMPDIR` says) at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from llama import Framework, FrameworkConfig, Meter, attention, batches, make_parser
from torch import Tensor

import dream_trainer as dt

EVERY, SAVES = 8, 2
LAST = EVERY * (SAVES + 1) - 1


@dataclass
class SavingConfig(FrameworkConfig, dt.CheckpointConfigMixin):
    """What the bench sets."""


class Saving(Framework, dt.CheckpointMixin):
    """Notes when each step is done, and reports when the last one is."""

    def configure_dataloaders(self) -> tuple[Any, None]:
        self.done: list[float] = []
        self.meter = Meter(LAST + 1, 0, self.world.device)  # which the other bench reads: it measures nothing here
        return list(batches(self.arguments, self.world.device)), None

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        while (self.global_step + 1) % EVERY == 0 and self._runtime.saver.writing.is_busy:
            time.sleep(0.01)
        return super().training_step(batch, batch_idx)

    def post_train_step(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        self.done.append(time.perf_counter())
        if self.global_step == LAST:
            report(self.done, self.arguments)


def report(done: list[float], arguments: argparse.Namespace) -> None:
    """Prints the figures of the steps that ended at `done`."""
    seconds = [0.0, *(later - earlier for earlier, later in pairwise(done))]  # by step, from 1
    plain = min(seconds[1:])  # early steps run beside the allocation of host memory for saves
    held, beside = [], []
    for step in range(EVERY, LAST, EVERY):  # the list's place of the step after the save
        held.append(seconds[step] - plain)
        beside.append(statistics.median(seconds[step + 1 : step + EVERY - 1]) / plain)
    print(f"torch {torch.__version__}, {arguments.model}: a step takes {plain:.3f} s")
    for name, stall, ratio in zip(("first", "later"), held, beside, strict=True):
        print(f"{name} save: training is held for {stall:.3f} s; steps beside its writing take {ratio:.2f}x")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"step_seconds": plain, "held_seconds": held, "steps_beside": beside}))


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    arguments.warm_up, arguments.steps = 0, LAST
    if arguments.json is not None:
        arguments.json = arguments.json.absolute()
    devices = dt.DeviceParameters(device=arguments.device, precision=arguments.precision, compile=arguments.compile)
    config = SavingConfig(
        project="bench",
        group="llama",
        experiment="save",
        device_parameters=devices,
        training_parameters=dt.TrainingParameters(
            n_epochs=1, train_batch_size=arguments.batch, gradient_clip_norm=1.0, on_nonfinite="raise"
        ),
        checkpoint_parameters=dt.CheckpointParameters(
            save_every_n_steps=EVERY, save_every_n_epochs=None, save_at_end=False, keep_last=1
        ),
    )
    start = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with attention(arguments, torch.device(arguments.device)), Saving(config, arguments) as trainer:
            trainer.fit()
        os.chdir(start)


if __name__ == "__main__":
    main()
