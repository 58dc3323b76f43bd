"""The training script that these tests kill, signal and starve, and what it tells of itself while it runs.

    python -m tests.faults.job '{"ranks": 1}'      alone, or under torchrun; `ranks.py` starts it faster

It writes under the working directory:

    runs/...                        the run
    attempts/000/rank_0.log         "resumed 6", "step 7", "saved 8", ...: one line each, as it happens
    attempts/000/rank_0.pid
    attempts/000/paused             a rank has come to its pause
    outcome.json                    by rank 0 at the end: the step, digests of all tensors, every validation
"""

import contextlib
import hashlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import dream_trainer as dt
from tests.api import DistributedDataLoader, PerRankLoader, named_step
from tests.faults.phases import Fault, arm
from tests.trainer.resumable import Augmented, Network, state_tensors, stateful_loader
from tests.trainer.saves import Validated

STEPS_PER_EPOCH = 12
VALIDATE_EVERY = 4


@dataclass(frozen=True, kw_only=True)
class Pause:
    """A wait on one rank that happens once in the life of a run."""

    where: str
    """"setup"; "train" or "val": in the dataset, so inside a loader's worker if there is one."""
    rank: int = 0
    sample: int = 0
    """Which of this rank's samples, counted from 0 over the life of a process."""
    seconds: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: the same for all its attempts, but for `fault`."""

    ranks: int = 1
    n_steps: int = 24
    step_seconds: float = 0.01
    workers: int = 0
    foreign: str | None = None
    """"own" or "stateful": a training loader that is not ours, with "-plain" or "-persistent" workers."""
    checkpoint: dict[str, Any] = field(default_factory=lambda: {"save_every_n_steps": 2})
    devices: dict[str, Any] = field(default_factory=dict)
    local_sgd: dict[str, Any] | None = None
    imports: str | None = None
    """A module that lies in the directory `OWN_CODE`."""
    fault: Fault | None = None
    pause: Pause | None = None

    @classmethod
    def from_json(cls, text: str) -> "Job":
        values = json.loads(text)
        fault, pause = values.pop("fault", None), values.pop("pause", None)
        return cls(**values, fault=fault and Fault(**fault), pause=pause and Pause(**pause))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def run_dir(directory: Path) -> Path:
    """The run's directory under a job's working directory."""
    return directory / "runs" / "tests" / "faults" / "run"


class Diary(dt.Callback):
    """Writes down what happens, at once and for good: a line that is there was true when the process was killed."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._file = os.open(directory / f"rank_{rank}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def write(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())

    def on_load(self, trainer: Any, path: Path) -> None:
        self.write(f"resumed {trainer.global_step}")

    def pre_fit(self, trainer: Any) -> None:
        self.write(f"begins {trainer.global_step}")

    def post_train_step(self, trainer: Any) -> None:
        self.write(f"step {trainer.global_step}")

    def pre_val_epoch(self, trainer: Any) -> None:
        self.write(f"validating {trainer.global_step}")

    def on_save(self, trainer: Any, path: Path) -> None:
        self.write(f"saved {named_step(path)}")

    def on_interrupt(self, trainer: Any) -> None:
        self.write(f"interrupted {trainer.global_step}")


class Points(Augmented):
    """Labelled points, moved a little at each visit; one of them makes one rank wait."""

    def __init__(self, length: int, pause: Pause | None, marker: Path) -> None:
        super().__init__(length, noise=0.1)
        self.pause, self.marker, self.visits = pause, marker, 0

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        if self.pause is not None and self.visits == self.pause.sample:
            take(self.pause, self.marker)
        self.visits += 1
        return super().__getitem__(index)


class Slow(Augmented):
    """Samples that workers are still loading whenever a signal comes."""

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        time.sleep(0.02)
        return super().__getitem__(index)


class OwnLoader(DataLoader[Any]):
    """A user's class."""


def foreign_loader(kind: str, ranks: int) -> Any:
    """A rank's loader, whose pass does not end."""
    name, workers = kind.split("-")
    persists = workers == "persistent"
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": persists, "multiprocessing_context": "fork"}
    data = Slow(10_000, noise=0.1)
    loader = OwnLoader(data, 2, **options) if name == "own" else stateful_loader(data, 2, options)
    return PerRankLoader(loader) if ranks > 1 else loader


def take(pause: Pause, marker: Path) -> None:
    """Waits, unless an earlier attempt did; the file `goes on` ends it."""
    if int(os.environ.get("RANK", "0")) == pause.rank:
        with contextlib.suppress(FileExistsError):
            marker.touch(exist_ok=False)
            until = time.monotonic() + pause.seconds
            while time.monotonic() < until and not marker.with_name("goes on").exists():
                time.sleep(0.05)


class Trainer(dt.DreamTrainer):
    """Dropout, augmentation, AdamW and a scheduler in float64; each step takes a while, so that kills land anywhere."""

    def __init__(self, config: Any, job: Job) -> None:
        super().__init__(config)
        self.job = job
        self.marker = Path("paused").resolve()

    def configure_models(self) -> None:
        if self.job.pause is not None and self.job.pause.where == "setup":
            take(self.job.pause, self.marker)
        self.model = Network(0.3, batch_norm=False).double()

    def configure_dataloaders(self) -> tuple[Any, Any]:
        def loader(length: int, where: str, **options: Any) -> DistributedDataLoader:
            pause = self.job.pause if self.job.pause is not None and self.job.pause.where == where else None
            workers: dict[str, Any] = {"num_workers": self.job.workers}
            if self.job.workers:
                workers["multiprocessing_context"] = "fork"
            return DistributedDataLoader(Points(length, pause, self.marker), 2, **workers, **options)

        # One sample too many for whole batches in each.
        train: Any = loader(STEPS_PER_EPOCH * 2 * self.job.ranks + 1, "train", shuffle=True)
        if self.job.foreign is not None:
            train = foreign_loader(self.job.foreign, self.job.ranks)
        return train, loader(9, "val")

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, weight_decay=0.1)

    def configure_schedulers(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, self.job.n_steps)

    def _loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return cross_entropy(self.model(batch[0]), batch[1])

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        time.sleep(self.job.step_seconds)
        loss = self._loss(batch)
        self.backward(loss)
        self.step(self.model, self.optimizer, self.scheduler)
        return {"loss": loss}

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        return {"loss": self._loss(batch)}


class LocalTrainer(Trainer, dt.LocalSGDMixin):
    """The same, with workers that train on their own."""


@dataclass
class LocalConfig(dt.DreamTrainerConfig, dt.LocalSGDConfigMixin): ...


def make_trainer(job: Job, diary: Diary, validations: Validated) -> Trainer:
    rounds = {} if job.local_sgd is None else {"local_sgd_parameters": dt.LocalSGDParameters(**job.local_sgd)}
    config_class = LocalConfig if rounds else dt.DreamTrainerConfig
    config = config_class(
        project="tests",
        group="faults",
        experiment="run",
        seed=42,
        callbacks=[diary, validations],
        device_parameters=dt.DeviceParameters(**{"device": "cpu", **job.devices}),
        training_parameters=dt.TrainingParameters(
            max_steps=job.n_steps,
            val_every_n_steps=VALIDATE_EVERY,
            val_every_n_epochs=None,
            train_batch_size=2,
            val_batch_size=2,
        ),
        checkpoint_parameters=dt.CheckpointParameters(**{"save_every_n_epochs": None, **job.checkpoint}),
        logger_parameters=dt.LoggerParameters(loggers=("jsonl",), log_every_n_steps=5),
        **rounds,
    )
    return LocalTrainer(config, job) if rounds else Trainer(config, job)


def outcome(trainer: Trainer, validations: Validated) -> dict[str, Any]:
    """What two runs that are the same have in common, bit for bit; a collective."""
    tensors = state_tensors(trainer)
    return {
        "step": trainer.global_step,
        "tensors": {name: digest(tensor) for name, tensor in sorted(tensors.items())},
        "lr": trainer.optimizer.param_groups[0]["lr"],
        "validations": validations._found,
    }


def digest(tensor: Tensor) -> str:
    content = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + content).hexdigest()


def main(job: Job, attempt: int) -> None:
    """Trains until the run ends, is ended, or breaks; in the current directory."""
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    directory = Path("attempts") / f"{attempt:03d}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"rank_{rank}.pid").write_text(str(os.getpid()))
    if job.imports is not None:
        sys.path.insert(0, os.environ["OWN_CODE"])
        import_module(job.imports)
    if job.fault is not None:
        arm(job.fault, rank, directory)
    diary, validations = Diary(directory, rank), Validated()
    trainer = make_trainer(job, diary, validations)
    trainer.fit()
    found = outcome(trainer, validations)
    if rank == 0:
        Path("described.md").write_text(trainer.describe())
        Path("outcome.tmp").write_text(json.dumps(found))
        Path("outcome.tmp").rename("outcome.json")
    trainer.close()


if __name__ == "__main__":
    # A fault befalls the first start alone; torchrun starts the same command again.
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    given = Job.from_json(sys.argv[1])
    main(given if restart == 0 else Job.from_json(json.dumps(asdict(given) | {"fault": None})), restart)
