"""Trials of an Optuna study on all ranks of a program: rank 0 asks and tells, and a killed trial is started again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import torch
import torch.distributed as dist
from optuna.trial import TrialState

import dream_trainer as dt

STARTS = 3  # of one trial, after which one without a result is given up


class Report(dt.Callback):
    """Tells Optuna of each validation, on rank 0, and stops all ranks where it prunes."""

    main_process_only = True

    def __init__(self, metric: str, trial: Any) -> None:
        self.metric, self.trial, self.state = metric, trial, TrialState.COMPLETE

    def post_val_epoch(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.trial.report(metrics[f"val/{self.metric}"], trainer.current_epoch)
        if self.trial.should_prune():
            self.state = TrialState.PRUNED
            trainer.request_stop(f"Optuna prunes trial {self.trial.number}")


def search(
    name: str,
    space: dict[str, Any],
    train: Callable[[str, dict[str, Any], Report], float],
    *,
    metric: str,
    trials: int,
    seed: int = 0,
) -> None:
    """Runs `train(run, values, report)`, which returns the best `metric` of validations, until there are enough trials.

    The study lies in an SQLite file beside the runs. Values are asked for before a trainer is built, so configs and
    models are the same on every rank.
    """
    if "RANK" in os.environ:  # under torchrun; the trainers use this group too
        dist.init_process_group()
    study = open_study(name, seed) if int(os.environ.get("RANK", 0)) == 0 else None
    while True:
        trial = None if study is None else ask(study, space, trials)
        found = from_rank_0(trial and (run_name(trial), trial.params))
        if found is None:
            break
        report = Report(metric, trial)
        run, values = found
        value = train(run, values, report)
        if study is not None:
            study.tell(report.trial, value if report.state == TrialState.COMPLETE else None, report.state)
            print(f"{run}  {report.state.name.lower()}  {metric} {value:.4f}  {values}", flush=True)
    if study is not None:
        print(f"best of {trials}: {metric} {study.best_value:.4f} with {study.best_params}")
    if dist.is_initialized():
        dist.destroy_process_group()


def open_study(name: str, seed: int) -> optuna.Study:
    """The study in its file. A trial that was running when its process died is put back into the queue."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    directory = Path(os.environ.get("DREAM_TRAINER_RUNS") or "runs") / "examples" / "search_optuna"
    directory.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        storage=f"sqlite:///{directory / 'study.db'}",
        study_name=name,
        direction="maximize",
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1),
    )
    for broken in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(broken.number, state=TrialState.FAIL)
        starts = broken.user_attrs.get("starts", 1)
        if starts < STARTS and broken.params:
            again = optuna.trial.create_trial(
                state=TrialState.WAITING,
                params=broken.params,
                distributions=broken.distributions,
                user_attrs={"run": run_name(broken), "starts": starts + 1},
                intermediate_values=broken.intermediate_values,
            )
            study.add_trial(again)
    return study


def ask(study: optuna.Study, space: dict[str, Any], trials: int) -> optuna.Trial | None:
    """The next trial; None once enough have a result, those of earlier starts included."""
    ended = study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))
    return study.ask(space) if len(ended) < trials else None


def run_name(trial: Any) -> str:
    """The run of a trial, which one that is started again continues."""
    name: str = trial.user_attrs.get("run", f"trial_{trial.number:04}")
    return name


def from_rank_0(value: Any) -> Any:
    """What rank 0 has, on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]
