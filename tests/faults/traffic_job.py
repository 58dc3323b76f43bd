"""A rank that counts what its host sends in a step, by the counters of its interfaces, beside what `describe` says."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import dream_trainer as dt
from tests.api import PerRankLoader, step_traffic
from tests.faults.namespaces import enter

FIRST, STEPS = 5, 13
WIDTH = 512


def bytes_sent() -> dict[str, int]:
    """By interface of this thread's network namespace."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    return {name.strip(): int(values.split()[8]) for name, values in (line.split(":") for line in lines)}


class Wide(dt.DreamTrainer):
    """Blocks of a MiB each, some frozen, so that their bytes are more than what is spoken beside them."""

    def configure_models(self) -> None:
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.model[1].requires_grad_(False)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=0.01)

    def configure_dataloaders(self) -> tuple[Any, None]:
        return PerRankLoader([torch.randn(2, WIDTH) for _ in range(2 * STEPS)]), None

    def post_train_step(self) -> None:
        if self.global_step == FIRST:
            self.world.barrier()  # the others of this host may still be sending
            self.before = bytes_sent()

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        self.backward(self.model(batch).square().mean())
        self.step(self.model, self.optimizer)
        return {}


class LocalWide(Wide, dt.LocalSGDMixin):
    """With hosts that train on their own."""


@dataclass
class LocalConfig(dt.DreamTrainerConfig, dt.LocalSGDConfigMixin): ...


def run(environment: dict[str, str], namespace: Path, directory: Path, name: str, options: dict[str, Any]) -> None:
    """Trains, and writes what was counted and what is said; the first rank of each host."""
    os.chdir(directory)
    os.environ.update(environment)
    enter(namespace)
    torch.set_num_threads(1)
    rounds = {"local_sgd_parameters": dt.LocalSGDParameters(every_n_steps=4)} if options.get("local") else {}
    config = (LocalConfig if rounds else dt.DreamTrainerConfig)(
        project="tests",
        group="traffic",
        experiment=name,
        fsdp_parameters=dt.FSDPParameters(min_group_mib=0),
        device_parameters=dt.DeviceParameters(device="cpu", host_timeout_seconds=None, **options["devices"]),
        training_parameters=dt.TrainingParameters(
            max_steps=STEPS, n_epochs=None, gradient_accumulation_steps=options.get("accumulation", 1)
        ),
        logger_parameters=dt.LoggerParameters(loggers=(), log_every_n_steps=1000),
        checkpoint_parameters=dt.CheckpointParameters(save_at_end=False, save_every_n_epochs=None),
        **rounds,
    )
    with (LocalWide if rounds else Wide)(config) as trainer:
        trainer.fit()
        trainer.world.barrier()
        after, said = bytes_sent(), step_traffic(trainer._runtime)
        counted = {key: (after[key] - trainer.before[key]) / (STEPS - FIRST) for key in after}
        text = trainer.describe()
    if os.environ["LOCAL_RANK"] == "0":
        found = {"counted": counted, "inside": said.inside, "between": said.between, "text": text}
        Path(f"{name}-{environment['GROUP_RANK']}.json").write_text(json.dumps(found))
