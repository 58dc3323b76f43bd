"""A search over hyperparameters with Optuna: one objective for one process and for many.

    python examples/search_optuna.py --trials 20
    torchrun --nproc-per-node=2 examples/search_optuna.py --trials 20

Rank 0 asks Optuna what to try, tells every rank, and reports each validation; where a trial is to be pruned, all ranks
stop at the same step. The study lies in an SQLite file beside the runs. Killed at any time, the same command goes on:
the trial that was running continues from its last checkpoint, with the values that it had.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import torch
import torch.distributed as dist
import torch.nn as nn
from optuna.trial import TrialState
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import dream_trainer as dt

STUDY = "digits"
GIVE_UP_AFTER = 3  # starts of one trial that ended without a result


@dataclass(kw_only=True)
class DigitsConfig(dt.DreamTrainerConfig):
    """What a trial may choose."""

    lr: float
    hidden: int
    dropout: float


def suggest(trial: optuna.Trial) -> dict[str, Any]:
    """The search space: fields of DigitsConfig."""
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True),
        "hidden": trial.suggest_categorical("hidden", [16, 64, 256]),
        "dropout": trial.suggest_float("dropout", 0.0, 0.5),
    }


class Digits(dt.DreamTrainer):
    """Handwritten digits of 8 x 8: 1,280 to train on, 517 to validate."""

    config: DigitsConfig

    def configure_models(self) -> None:
        hidden = self.config.hidden
        self.model = nn.Sequential(
            nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(self.config.dropout), nn.Linear(hidden, 10)
        )

    def configure_dataloaders(self) -> tuple[Any, Any]:
        digits: Any = load_digits()
        images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
        train, val = TensorDataset(images[:1280], labels[:1280]), TensorDataset(images[1280:], labels[1280:])
        # As many samples a step on any number of ranks.
        return DataLoader(train, 64 // self.world.dp_size, shuffle=True), DataLoader(val, 256)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.lr)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.backward(loss)
        self.step(self.model, self.optimizer)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        scores = self.model(batch[0])
        return {"loss": cross_entropy(scores, batch[1]), "accuracy": (scores.argmax(1) == batch[1]).float().mean()}


class Report(dt.Callback):
    """Tells Optuna of each validation, on rank 0 alone, and stops all ranks where it prunes."""

    main_process_only = True

    def __init__(self, trial: optuna.Trial | None) -> None:
        self.trial, self.is_pruned = trial, False

    def post_val_epoch(self, trainer: Any, metrics: dict[str, float]) -> None:
        assert self.trial is not None  # this is rank 0
        self.trial.report(metrics["val/accuracy"], trainer.current_epoch)
        if self.trial.should_prune():
            self.is_pruned = True
            trainer.request_stop(f"Optuna prunes trial {self.trial.number}")


def train(run: str, values: dict[str, Any], epochs: int, report: Report) -> float:
    """One trial on every rank; resumes if `run` has been started before. Returns the best accuracy."""
    config = DigitsConfig(
        project="examples",
        group="search_optuna",
        experiment=run,
        training_parameters=dt.TrainingParameters(n_epochs=epochs),
        device_parameters=dt.DeviceParameters.ddp(),
        eval_parameters=dt.EvalParameters(best_metrics={"val/accuracy": "max"}),
        checkpoint_parameters=dt.CheckpointParameters(keep_last=1),
        logger_parameters=dt.LoggerParameters(loggers=("jsonl",)),
        callbacks=[report],
        **values,
    )
    with Digits(config) as trainer:
        trainer.fit()
        return trainer.best["val/accuracy"]


# -- what is asked and told on rank 0


def open_study(seed: int) -> optuna.Study:
    """The study in its file. A trial that was running when its process died is put back into the queue."""
    directory = Path(os.environ.get("DREAM_TRAINER_RUNS") or "runs") / "examples" / "search_optuna"
    directory.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        storage=f"sqlite:///{directory / 'study.db'}",
        study_name=STUDY,
        direction="maximize",
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1),
    )
    for broken in study.get_trials(states=(TrialState.RUNNING,)):
        starts = broken.user_attrs.get("starts", 1)
        study.tell(broken.number, state=TrialState.FAIL)
        if starts < GIVE_UP_AFTER and broken.params:
            reported = {str(step): value for step, value in broken.intermediate_values.items()}
            run = broken.user_attrs.get("run", run_name(broken.number))
            study.enqueue_trial(broken.params, {"run": run, "starts": starts + 1, "reported": reported})
    return study


def run_name(number: int) -> str:
    return f"trial_{number:04}"


def ask(study: optuna.Study, trials: int) -> optuna.Trial | None:
    """The next trial; None once enough have a result."""
    if len(study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))) >= trials:
        return None
    trial = study.ask()
    for step, value in trial.user_attrs.get("reported", {}).items():
        trial.report(value, int(step))
    return trial


# -- what all ranks do


@contextmanager
def ranks() -> Iterator[int]:
    """This process's rank; under torchrun in a process group, which the trainers share."""
    if "RANK" not in os.environ:
        yield 0
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    yield dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()


def from_rank_0(value: Any) -> Any:
    """What rank 0 has, on every rank."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]


def main() -> None:
    """Searches until there are enough trials, and shows the best."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20, help="trials with a result, those of earlier starts included")
    parser.add_argument("--epochs", type=int, default=10, help="epochs of a trial that is not pruned")
    parser.add_argument("--seed", type=int, default=0, help="of the sampler")
    asked = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with ranks() as rank:
        study = open_study(asked.seed) if rank == 0 else None
        while True:
            trial = ask(study, asked.trials) if study is not None else None
            values = None if trial is None else suggest(trial)
            run = "" if trial is None else trial.user_attrs.get("run", run_name(trial.number))
            run, values = from_rank_0((run, values))
            if values is None:
                break
            report = Report(trial)
            accuracy = train(run, values, asked.epochs, report)
            if study is not None and trial is not None:
                state = TrialState.PRUNED if report.is_pruned else TrialState.COMPLETE
                study.tell(trial, None if report.is_pruned else accuracy, state)
                print(f"{run}  {state.name.lower()}  accuracy {accuracy:.4f}  {values}", flush=True)
        if study is not None:
            print(f"best of {asked.trials}: accuracy {study.best_value:.4f} with {study.best_params}")


if __name__ == "__main__":
    main()
