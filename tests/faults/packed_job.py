"""A rank of a run over packed rows that writes down the tokens of each micro-batch: `-m tests.faults.packed_job`."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import dream_trainer as dt
from tests.api import DistributedDataLoader, PackedRows
from tests.data.test_packed_mixture import BLOCK_SIZE, GLOBAL_BATCH, ROW_LENGTH, mixture

SEED = 3


class PackedRun(dt.DreamTrainer):
    """Learns nothing; each step takes long enough to be killed in."""

    workers = 0

    def configure_models(self) -> None:
        self.model = nn.Linear(1, 1)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-9)

    def configure_dataloaders(self) -> tuple[Any, None]:
        rows = PackedRows(mixture(), ROW_LENGTH, block_size=BLOCK_SIZE)
        context: dict[str, Any] = {"multiprocessing_context": "fork"} if self.workers else {}
        size = self.config.training_parameters.train_batch_size
        return DistributedDataLoader(rows, size, num_workers=self.workers, **context), None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        tokens = batch["tokens"][batch["documents"] >= 0].tolist()
        with open(f"{sys.argv[1]}_{self.world.rank}.jsonl", "a") as file:
            file.write(json.dumps([self.global_step, tokens]) + "\n")
        time.sleep(0.02)
        self.backward(self.model(torch.ones(1, 1)).sum(), weight=batch["weights"].sum())
        if not self.is_accumulating_gradients:
            self.step(self.model, self.optimizer)
        return {}


def main(ranks: int, workers: int, accumulation: int, max_steps: int) -> None:
    PackedRun.workers = workers
    config = dt.DreamTrainerConfig(
        project="tests",
        group="packed",
        experiment="run",
        seed=SEED,
        device_parameters=dt.DeviceParameters(device="cpu"),
        training_parameters=dt.TrainingParameters(
            max_steps=max_steps,
            global_batch_size=GLOBAL_BATCH,
            train_batch_size=GLOBAL_BATCH // (ranks * accumulation),
        ),
        logger_parameters=dt.LoggerParameters(loggers=()),
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_steps=3),
    )
    with PackedRun(config) as trainer:
        trainer.fit()


if __name__ == "__main__":
    main(*map(int, sys.argv[2:]))
