"""A job whose ranks come and go: it writes down which samples each step had, and by how many ranks.

    python -m tests.faults.elastic_job 400      under torchrun, for so many steps

Every rank appends to `samples_<rank>.jsonl` in the working directory: the round (when rank 0 started, which is another
in each start), the step from 0, the number of ranks, its samples.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dream_trainer as dt

GLOBAL_BATCH = 12
"""Divisible by 1, 2 and 3 ranks."""
STEP_SECONDS = 0.05


class Numbered(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 50 * GLOBAL_BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(4, generator=torch.Generator().manual_seed(index), dtype=torch.float64), index


class Elastic(dt.DreamTrainer):
    """A regression; what matters is which samples it sees."""

    def configure_models(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def configure_dataloaders(self) -> tuple[Any, None]:
        self.path = Path(f"samples_{self.world.rank}.jsonl")
        self.round = self.world.broadcast_object(time.time())
        return DataLoader(Numbered(), batch_size=GLOBAL_BATCH // self.world.world_size, shuffle=True), None

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        time.sleep(STEP_SECONDS)
        loss = (self.model(batch[0]) - 1).square().mean()
        self.backward(loss)
        self.step(self.model, self.optimizer)
        with self.path.open("a") as file:
            line = [self.round, self.global_step, self.world.world_size, batch[1].tolist()]
            file.write(json.dumps(line) + "\n")
        return {"loss": loss}


def main(n_steps: int) -> None:
    """Trains in the current directory."""
    torch.set_num_threads(1)
    config = dt.DreamTrainerConfig(
        project="tests",
        group="faults",
        experiment="elastic",
        device_parameters=dt.DeviceParameters(
            device="cpu", host_timeout_seconds=3.0, start_timeout_seconds=60.0, step_timeout_seconds=60.0
        ),
        training_parameters=dt.TrainingParameters(max_steps=n_steps, n_epochs=None, global_batch_size=GLOBAL_BATCH),
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_steps=5),
    )
    Elastic(config).fit()


if __name__ == "__main__":
    main(int(sys.argv[1]))
