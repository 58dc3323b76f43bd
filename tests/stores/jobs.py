"""A small run whose checkpoints lie in an object store; also as a command, to be killed:

python -m tests.stores.jobs URL MAX_STEPS [PHASE]     in the working directory, which is its local disk
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dream_trainer as dt
from tests.trainer.small import FromSeed, weights

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


class Fit(FromSeed):
    """A regression, with dropout so that random states count."""

    make_model: Any = staticmethod(lambda: nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.Linear(16, 1)))

    def configure_dataloaders(self) -> Any:
        return DataLoader(TensorDataset(X), 8 // self.world.world_size, shuffle=True), DataLoader(TensorDataset(X), 16)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.loss_of(batch)}

    def loss_of(self, batch: Any) -> torch.Tensor:
        return (self.model(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()


class Wide(Fit):
    """Large enough that a part of a shard is less than all of it."""

    make_model = staticmethod(lambda: nn.Sequential(nn.Linear(4, 60_000), nn.Dropout(0.1), nn.Linear(60_000, 1)))


def config(url: str | None, max_steps: int, **parameters: Any) -> dt.DreamTrainerConfig:
    return dt.DreamTrainerConfig(
        project="p",
        group="g",
        experiment=parameters.pop("experiment", "e"),
        device_parameters=dt.DeviceParameters(device="cpu"),
        training_parameters=dt.TrainingParameters(max_steps=max_steps, n_epochs=None, global_batch_size=8),
        checkpoint_parameters=dt.CheckpointParameters(
            **{"directory": url, "save_every_n_steps": 2, "save_every_n_epochs": None, **parameters}
        ),
    )


def train(url: str | None, max_steps: int, trainer: type[Fit] = Fit, **parameters: Any) -> Fit:
    """One start of the command."""
    with trainer(config(url, max_steps, **parameters)) as run:
        run.fit()
    return run


def die_at(phase: str) -> None:
    """Kills this process in the midst of the second checkpoint that is sent."""
    from dream_trainer.stores.store_path import StorePath

    name, number, is_after = {
        "before the upload": ("upload", 1, False),
        "between files": ("upload", 2, False),
        "before the manifest": ("create", 1, False),
        "after the manifest": ("create", 1, True),
    }[phase]
    original, calls = getattr(StorePath, name), 0

    def dying(self: StorePath, *arguments: Any) -> Any:
        nonlocal calls
        is_of_second = "step_00000004" in str(self)
        calls += is_of_second
        dies = is_of_second and calls == number
        result = original(self, *arguments) if is_after or not dies else None
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(StorePath, name, dying)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 3:
        die_at(sys.argv[3])
    run = train(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({name: value.tolist() for name, value in weights(run.model).items()}))
