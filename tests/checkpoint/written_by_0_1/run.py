"""The run whose directories lie here, written by dream_trainer 0.1.0 (commit 17a2c72) with torch 2.13.0 on a CPU.

`one_rank`, `two_ranks` (sharded) and `two_replicas` hold the run after its fourth step, in the middle of its second
epoch; the `expected` files hold what version 0.1.0 itself made of each by going on to the end. They are never written
again: a later version has to read them as they are. They were made, at that commit, by

    python -m tests.checkpoint.written_by_0_1.run one_rank
    torchrun --standalone --nproc-per-node 2 -m tests.checkpoint.written_by_0_1.run two_ranks
    torchrun --standalone --nproc-per-node 2 -m tests.checkpoint.written_by_0_1.run two_replicas

What is used of dream_trainer here is public, so that this file stays as it is.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

import dream_trainer as dt
from dream_trainer.data import DistributedDataLoader
from dream_trainer.loggers import read_jsonl

HERE = Path(__file__).parent
FEATURES, CLASSES = 5, 3
STOP_AFTER, LAST_STEP = 4, 9


class Network(nn.Module):
    """Two blocks to shard by, and each kind of state: parameters, buffers, and layers that draw."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def samples(count: int, seed: int) -> TensorDataset:
    """Labelled points, the same everywhere."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(count, FEATURES, dtype=torch.float64, generator=generator)
    return TensorDataset(points, points[:, :CLASSES].argmax(dim=1))


class Written(dt.DreamTrainer):
    """A trainer with state of every kind; `stop_after` ends it early, as a signal would."""

    def __init__(self, config: dt.DreamTrainerConfig, stop_after: int | None = None) -> None:
        super().__init__(config)
        self.stop_after = stop_after
        self.batches_trained = 0
        self.loaded: dict[str, Tensor] = {}

    def configure_models(self) -> None:
        self.model = Network().double()

    def configure_dataloaders(self) -> tuple[Any, Any]:
        size = 4 // self.world.world_size
        train = DistributedDataLoader(samples(20, seed=3), size, shuffle=True, drop_last=False)
        return train, DataLoader(samples(50, seed=4), size)

    def configure_optimizers(self) -> None:
        groups = dt.parameter_groups(self.model, lr=0.02, weight_decay=0.1)
        self.optimizer = torch.optim.AdamW(groups, fused=True)

    def configure_schedulers(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5, 5, 8], gamma=0.5)

    def configure_metrics(self) -> None:
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.mean_loss = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, labels = batch
        loss = cross_entropy(self.model(x), labels)
        self.backward(loss)
        self.mean_loss.update(loss.detach())
        self.batches_trained += 1
        self.log("draw", torch.rand(()))
        if not self.is_accumulating_gradients:
            self.step(self.model, self.optimizer, self.scheduler)
        return {"loss": loss}

    def post_train_step(self) -> None:
        if self.global_step == self.stop_after:
            self.request_stop("the first part ends here")

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, labels = batch
        scores = self.model(x)
        self.accuracy.update(scores, labels)
        return {"loss": cross_entropy(scores, labels)}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"batches_trained": self.batches_trained}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.batches_trained = state["batches_trained"]

    def on_load(self, path: Path) -> None:
        self.loaded = tensors(self)


def make_config(experiment: str, *, replicated: bool = False) -> dt.DreamTrainerConfig:
    """The config of the run; it lies in `runs/old/before/<experiment>` of the working directory."""
    return dt.DreamTrainerConfig(
        project="old",
        group="before",
        experiment=experiment,
        seed=7,
        callbacks=dt.CallbackCollection([dt.EMA(0.9)]),
        device_parameters=dt.DeviceParameters(device="cpu", dp_shard=1 if replicated else "auto"),
        fsdp_parameters=dt.FSDPParameters(min_group_mib=0),  # 0.1 gathered every model block by block
        training_parameters=dt.TrainingParameters(
            n_epochs=3,
            gradient_accumulation_steps=2,
            gradient_clip_val=0.5,
            val_every_n_steps=2,
            val_every_n_epochs=1,  # at both, the default of 0.1
        ),
        eval_parameters=dt.EvalParameters(best_metrics={"val/loss": "min", "val/accuracy": "max"}),
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_steps=4, save_every_n_epochs=None),
        logger_parameters=dt.LoggerParameters(loggers=("jsonl",), log_every_n_steps=1),
    )


def tensors(trainer: Written) -> dict[str, Tensor]:
    """Whole copies of weights, statistics, averages and optimizer state by name; called by every rank."""
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    found = {f"model.{name}": tensor for name, tensor in trainer.model.state_dict().items()}
    found |= {f"ema.{name}": tensor for name, tensor in trainer.get_callback(dt.EMA).averaged("model").items()}
    for parameter, state in trainer.optimizer.state.items():
        found |= {f"optimizer.{names[parameter]}.{key}": tensor for key, tensor in state.items()}
    return {name: whole(tensor).detach().clone() for name, tensor in found.items()}


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered; another as it is."""
    return tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


def log_lines(run_dir: Path) -> list[dict[str, float]]:
    """The lines of the run's log without the clock."""
    lines = read_jsonl(run_dir / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]


def train(experiment: str, stop_after: int | None = None, *, replicated: bool = False) -> dict[str, Any]:
    """Trains in the working directory to the end or to `stop_after`, and tells what is there then."""
    trainer = Written(make_config(experiment, replicated=replicated), stop_after)
    with trainer:
        trainer.fit()
        result = {
            "tensors": tensors(trainer),
            "loaded": trainer.loaded,
            "told": {
                "global_step": trainer.global_step,
                "current_epoch": trainer.current_epoch,
                "batches_trained": trainer.batches_trained,
                "mean_loss": float(trainer.mean_loss.compute()),
                "best": dict(trainer.best),
                "rates": [group["lr"] for group in trainer.optimizer.param_groups],
                "history": [{k: v for k, v in line.items() if k != "time"} for line in trainer.history],
            },
        }
    if trainer.world.is_main:
        result["told"]["lines"] = log_lines(trainer.config.run_dir)
    return result


def arithmetic() -> dict[str, str]:
    """What decides the last bits of a sum on this machine: with the same instructions MKL goes other ways on an AMD."""
    instructions = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "instructions": instructions, "processor": maker_of_processor()}


def maker_of_processor() -> str:
    """As Linux spells it; elsewhere nothing."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("vendor_id")), "")


def expected(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """What version 0.1.0 had in memory when it had resumed, what at the end, and what it told of it."""
    stored = load_file(HERE / f"{name}.expected.safetensors")
    loaded = {key.removeprefix("loaded/"): value for key, value in stored.items() if key.startswith("loaded/")}
    end = {key.removeprefix("end/"): value for key, value in stored.items() if key.startswith("end/")}
    return loaded, end, json.loads((HERE / f"{name}.expected.json").read_text())


def put_run(name: str, directory: Path, experiment: str) -> Path:
    """Copies a run that lies here to where a trainer with the working directory `directory` looks for it."""
    run_dir = directory / make_config(experiment).run_dir
    shutil.copytree(HERE / name, run_dir)
    return run_dir


def main(name: str) -> None:
    """Writes `name`, which is to be made once."""
    is_first = os.environ.get("RANK", "0") == "0"
    directory = Path(tempfile.gettempdir()) / f"written_by_0_1_{name}"
    directory.mkdir(exist_ok=True)
    os.chdir(directory)
    replicated = name == "two_replicas"
    train("run", stop_after=STOP_AFTER, replicated=replicated)
    if is_first:
        shutil.copytree(make_config("run").run_dir, HERE / name)
    result = train("run", replicated=replicated)
    if is_first:
        stored = {f"loaded/{key}": value for key, value in result["loaded"].items()}
        stored |= {f"end/{key}": value for key, value in result["tensors"].items()}
        save_file(stored, HERE / f"{name}.expected.safetensors")
        text = json.dumps(result["told"] | {"arithmetic": arithmetic()}, indent=1)
        (HERE / f"{name}.expected.json").write_text(text + "\n")
        shutil.rmtree(directory)


if __name__ == "__main__":
    main(sys.argv[1])
