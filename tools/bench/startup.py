"""What comes before training runs evenly: imports, setup, the first step, the first save; CPU time and wall time.

    OMP_NUM_THREADS=1 python tools/bench/startup.py
    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 tools/bench/startup.py

Imports are those of `from dream_trainer import DreamTrainer` over `import torch`, each in a fresh process with its
bytecode at hand, as after any first run; torch._dynamo is what the first optimizer of torch.optim imports, in a plain
loop too. The rest is a DreamTrainer with every default over the model of examples/gpt,
saving every 10 steps; a step's time is that of one without a save.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dream_trainer import CheckpointParameters, DreamTrainer, DreamTrainerConfig, LoggerParameters, TrainingParameters
from dream_trainer.data.loader import PerRankLoader

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))
from model import GPT, GPTConfig

STEPS, SAVE_EVERY, IMPORTS = 40, 10, 7
IMPORT = """
import time, torch
started = time.process_time()
from dream_trainer import DreamTrainer
imported = time.process_time()
import torch._dynamo
print(imported - started, time.process_time() - imported)
"""


class Trainer(DreamTrainer):
    """The model of examples/gpt on random bytes; notes both clocks after setup and after each step."""

    def configure_models(self) -> None:
        self.model = GPT(GPTConfig())

    def init_weights(self) -> None:
        self.model.init_weights()

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def configure_dataloaders(self) -> tuple[Any, None]:
        batch = torch.randint(0, 256, (16, 129), generator=torch.Generator().manual_seed(self.world.rank))
        return PerRankLoader([batch] * STEPS), None

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        logits = self.model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.backward(loss)
        self.step(self.model, self.optimizer)
        return {"loss": loss}

    def pre_fit(self) -> None:
        self.clocks = [clocks()]

    def post_train_step(self) -> None:
        self.clocks.append(clocks())


def clocks() -> tuple[float, float]:
    """CPU time of this process, and wall time, in seconds."""
    return time.process_time(), time.perf_counter()


def import_seconds() -> list[list[float]]:
    """CPU time of the import over torch, and of torch._dynamo over that, both sorted.

    The first of all runs is left out, since it writes bytecode.
    """
    with tempfile.TemporaryDirectory() as folder:
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        variables["PYTHONPYCACHEPREFIX"] = folder
        command = [sys.executable, "-c", IMPORT]
        runs = [
            subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
            for _ in range(IMPORTS + 1)
        ]
    return [sorted(column) for column in zip(*[map(float, run.stdout.split()) for run in runs[1:]], strict=True)]


def config() -> DreamTrainerConfig:
    return DreamTrainerConfig(
        project="bench",
        group="startup",
        experiment="first",
        training_parameters=TrainingParameters(max_steps=STEPS, n_epochs=None, train_batch_size=16),
        checkpoint_parameters=CheckpointParameters(save_every_n_steps=SAVE_EVERY),
        logger_parameters=LoggerParameters(loggers=("jsonl",)),
    )


def show(name: str, before: tuple[float, float], after: tuple[float, float]) -> None:
    print(f"{name:30} {(after[0] - before[0]) * 1e3:8.0f} ms CPU {(after[1] - before[1]) * 1e3:8.0f} ms wall")


def main() -> None:
    torch.set_num_threads(1)
    is_main = os.environ.get("RANK", "0") == "0"
    imports = import_seconds() if is_main else []
    # One directory for all ranks.
    folder = Path(tempfile.gettempdir()) / f"startup-{os.environ.get('MASTER_PORT', os.getpid())}"
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    started = clocks()
    with Trainer(config()) as trainer:
        trainer.fit()
        at = trainer.clocks
        closing = clocks()
    closed = clocks()
    if not is_main:
        return
    os.chdir("/")
    shutil.rmtree(folder)
    print(f"torch {torch.__version__}, {os.environ.get('WORLD_SIZE', '1')} ranks, load {os.getloadavg()[0]:.1f}")
    for name, column in zip(("import over torch", "torch._dynamo over that"), imports, strict=True):
        low, middle, high = column[0], statistics.median(column), column[-1]
        print(f"{name:30} {middle * 1e3:8.0f} ms CPU ({low * 1e3:.0f}-{high * 1e3:.0f})")
    show("launch and setup", started, at[0])
    show("first step", at[0], at[1])
    # A save's work in the loop falls between the step that it follows and the next.
    spans = list(pairwise(at[1:]))
    saving = [span for step, span in enumerate(spans, start=1) if step % SAVE_EVERY == 0]
    others = sorted(
        (span for step, span in enumerate(spans, start=1) if step % SAVE_EVERY != 0), key=lambda s: s[1][0] - s[0][0]
    )
    show("a later step", *others[len(others) // 2])
    show("step with the first save", *saving[0])
    show("step with the second save", *saving[1])
    show("last save, and close", at[-1], closing)
    show("close", closing, closed)


if __name__ == "__main__":
    main()
