"""Trainer: trains a model, a loss and an optimizer that exist already, without a user class."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from dream_trainer.best_value import mode_of
from dream_trainer.callbacks.weight_average import WeightAverage
from dream_trainer.checks import refuse
from dream_trainer.config.checkpoint_parameters import CheckpointParameters, Mode
from dream_trainer.config.device_parameters import DeviceParameters, DeviceType
from dream_trainer.config.logger_parameters import LoggerParameters
from dream_trainer.config.training_parameters import EvalParameters, TrainingParameters
from dream_trainer.data.loader import DistributedDataLoader, PerRankLoader
from dream_trainer.data.sampler import OrderedDataset
from dream_trainer.errors import CheckpointError, DataError
from dream_trainer.events.callback import Callback
from dream_trainer.modules.metrics import higher_is_better
from dream_trainer.nested import leaves
from dream_trainer.optim.learning_rates import ScheduleName, ScheduleParameters
from dream_trainer.optim.optimizers import OptimizerName, OptimizerParameters
from dream_trainer.simple.objects_trainer import (
    Epochs,
    Given,
    Loss,
    LossFunction,
    LossName,
    Metrics,
    ObjectsConfig,
    ObjectsTrainer,
    Row,
    Scheduler,
    Step,
    in_words,
    shapes,
)

EpochFunction = Callable[["Trainer", int, Row], None]
_UNNAMED = itertools.count()


class Trainer:
    """Trains a model in place, in one process or on every rank of a `torchrun`; `self.dream` is its DreamTrainer.

    Args:
        model: The model, with its weights. One in eval mode as a whole is set to train mode.
        train: Training data. Samples: a dataset, a list, arrays `(*inputs, targets)` or a dict of them. Or batches: a
            DataLoader, an iterable, a function that makes one for each epoch.
        val: Validation data, or a dict of several with names; None validates nothing.
        loss: Function of `(outputs, targets)` that returns a scalar, or a name: "cross_entropy",
            "binary_cross_entropy_with_logits", "nll", "mse", "mae" or "huber". None: the model returns its loss.
        step: Instead of `loss`, a function of `(model, batch)` that returns it, or a dict with "loss" and more values.
        val_step: The same for validations; None is `step`.
        target: Name of the target in batches that are dicts; of tuples it is the last part.
        metrics: For validations: names ("accuracy", "mse", "mae"), or a dict of torchmetrics' objects and of functions
            of `(outputs, targets)`, whose values are averaged over samples.
        optimizer: An optimizer over `model.parameters()`, a class or function that makes one of the parameters, a name
            or `OptimizerParameters`.
        lr: Learning rate for a name, class or function; None is its default.
        schedule: A name ("cosine"), `ScheduleParameters`, a schedule over the given optimizer, or a function of the
            optimizer; None keeps the rate. ReduceLROnPlateau follows `monitor`.
        schedule_unit: When a schedule object or function steps.
        batch_size: Samples of one rank's batch; None is `training`'s, 32 by default.
        shuffle: Whether each epoch of training samples has a different order; a Mixture has its own order.
        epochs: Epochs of the whole run; None is `training`'s, 1 without any limit.
        seed: Seed of the order of samples, and of random layers.
        monitor: Metric of validations for `best` and the best checkpoint, such as "val/accuracy", or a dict from it to
            "min" or "max". None: `best_metric` of `checkpoints`, or "val/loss".
        callbacks: `Callback`s, and functions `(trainer, epoch, metrics)`, called after each epoch, from 0.
        name: Name of the run, which then keeps checkpoints and numbers in `runs/simple/simple/<name>`, and resumes
            there; or a path that ends in `<project>/<group>/<name>`. None keeps no files.
        training: Limits, accumulation, clipping, and when to validate. None: a batch is validated before training if
            there are metrics.
        device: "auto" takes the accelerator if there is one, with a whole model on each rank. `DeviceParameters` has
            precision, sharding (its default on several ranks) and compilation.
        checkpoints: When to save, which to keep and what to resume; needs `name`. None: after each epoch and each best
            validation, keeping the newest and the best.
        loggers: Loggers of the run; needs `name`. None: metrics.jsonl.
        progress: Whether to print a line after each epoch, and each validation of `val_every_n_steps`.

    Raises:
        ConfigError: A value is invalid.
        DataError: `train` or `val` is no data, or could be samples as well as batches.
    """

    _mode: Mode

    def __init__(
        self,
        model: nn.Module,
        *,
        train: Any,
        val: Any = None,
        loss: LossFunction | LossName | None = None,
        step: Step | None = None,
        val_step: Step | None = None,
        target: str = "labels",
        metrics: Iterable[str] | Mapping[str, Any] = (),
        optimizer: Optimizer | OptimizerName | OptimizerParameters | Callable[..., Optimizer] = "adamw",
        lr: float | None = None,
        schedule: ScheduleName | ScheduleParameters | Scheduler | Callable[[Any], Scheduler] | None = None,
        schedule_unit: Literal["step", "epoch"] = "step",
        batch_size: int | None = None,
        shuffle: bool = True,
        epochs: int | None = None,
        seed: int = 42,
        monitor: str | Mapping[str, Mode] | None = None,
        callbacks: Sequence[EpochFunction | Callback] = (),
        name: str | None = None,
        training: TrainingParameters | None = None,
        device: DeviceType | DeviceParameters = "auto",
        checkpoints: CheckpointParameters | None = None,
        loggers: LoggerParameters | None = None,
        progress: bool = True,
    ) -> None:
        measured = Metrics(metrics)
        words = {"model": type(model).__name__, "loss": in_words(step or loss), "schedule": in_words(schedule)}
        has_rate = isinstance(optimizer, Optimizer | OptimizerParameters)
        for is_wrong, message in (
            (not isinstance(model, nn.Module), f"the model is a {type(model).__name__}. Give an object of a Module."),
            (loss and step, "loss= and step= both give the loss. Leave one of them out."),
            (measured and (step or val_step), "metrics= need loss=. Return more values from step= or val_step=."),
            (has_rate and lr is not None, f"lr={lr} is given twice: optimizer= has one. Leave lr= out."),
            (not name and (checkpoints or loggers), "checkpoints= and loggers= are of a named run. Give name=."),
            (monitor and val is None, f"monitor={monitor!r} is a metric of validations. Give val=."),
            (isinstance(optimizer, list | tuple), "optimizer= is one. Several need a class: docs/several-models.md."),
        ):
            refuse(is_wrong, message)
        if isinstance(schedule, str):
            schedule = ScheduleParameters(name=schedule)  # pyright: ignore[reportArgumentType]
        if isinstance(optimizer, str):
            rate = OptimizerParameters.lr if lr is None else lr
            optimizer = OptimizerParameters(name=optimizer, lr=rate)  # pyright: ignore[reportArgumentType]
        elif lr is not None and not isinstance(optimizer, Optimizer | OptimizerParameters):
            optimizer = functools.partial(optimizer, lr=lr)
        checks = training is None and val is not None and (measured or val_step)
        limits = training or TrainingParameters(num_sanity_val_steps=1 if checks else 0)
        if batch_size is not None:
            limits = replace(limits, train_batch_size=batch_size, val_batch_size=batch_size)
        if epochs is not None:
            limits = replace(limits, n_epochs=epochs)
        # A step of the user's sees float64 arrays as they were given.
        floats = None if step else next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        self._options = LoaderOptions(limits.val_batch_size, shuffle=False, floats=floats)
        loader = as_loader(train, LoaderOptions(limits.train_batch_size, shuffle, floats), "train")
        val_loader = None if val is None else as_loader(val, self._options, "val")
        self._metric, self._mode = _monitored(monitor, checkpoints, measured, val_loader)
        given = Given(
            model=model,
            train=loader,
            val=val_loader,
            loss=None if loss is None else Loss(loss),
            target=target,
            metrics=measured,
            step=step,
            val_step=val_step,
            optimizer=optimizer,
            schedule=schedule,
            schedule_unit=schedule_unit,
            monitor=self._metric or "val/loss",
            mode=self._mode,
        )
        self._functions = [one for one in callbacks if not isinstance(one, Callback)]
        self._epochs = Epochs(weakref.WeakMethod(self._tell), prints=progress)  # an unreferenced trainer is closed
        scratch = None if name else _scratch_directory()
        *above, project, group, experiment = ("simple", "simple", *Path(name or "unnamed").parts)
        runs_dir = scratch or (Path(*above[2:]) if above[2:] else None)
        config = ObjectsConfig(
            project=project,
            group=group,
            experiment=experiment,
            runs_dir=None if runs_dir is None else str(runs_dir),
            seed=seed,
            given_objects=words | {"metrics": [*measured.functions, *map(str, measured.objects or ())]},
            training_parameters=limits,
            device_parameters=DeviceParameters(device=device, dp_shard=1) if isinstance(device, str) else device,
            eval_parameters=EvalParameters(best_metrics={self._metric: self._mode} if self._metric else {}),
            checkpoint_parameters=checkpoints
            or _default_checkpoints(name, self._metric if name or monitor else "", self._mode),
            logger_parameters=loggers or LoggerParameters(loggers=("jsonl",) if name else ()),
            callbacks=[self._epochs, *(one for one in callbacks if isinstance(one, Callback))],
        )
        self.dream = ObjectsTrainer(config, given)
        self._closing = weakref.finalize(self, _close_and_remove, self.dream, scratch)

    # -- training

    def fit(self, *, epochs: int | None = None, steps: int | None = None) -> list[Row]:
        """Trains until the limits of the run, and returns `history`; another call continues.

        `epochs` and `steps` are new limits of the whole run; if only one is given, the other is unlimited.
        """
        if epochs is not None or steps is not None:
            self.dream.set_limits(n_epochs=epochs, max_steps=steps)
        self.dream.fit()
        return self.history

    def train_epoch(self) -> Row:
        """Trains to the end of the epoch, or the next one, regardless of limits, and returns its row of `history`."""
        self.dream.fit_epoch()
        return dict(self._epochs.rows[-1])

    def evaluate(self, data: Any = None, *, batch_size: int | None = None) -> dict[str, float]:
        """The loss and the metrics over `val`, or over `data` like it, exact over all samples and ranks."""
        return self.dream.evaluate(None if data is None else self._loader_of(data, batch_size))

    def predict(self, data: Any, *, batch_size: int | None = None) -> Any:
        """The model's outputs for `data`, on the CPU, in the data's order, on every rank.

        Tensors of all batches are joined along the first dimension, in the structure that the model returns; "logits"
        of models that have them. If their later dimensions differ, they are a list of batches' tensors, with a warning.

        Args:
            data: As `val`, or only the inputs: an array, a list of rows of numbers, or a dataset. The last of several
                parts in a tuple is the target, which is ignored.
            batch_size: For samples; None is that of `val`.
        """
        are_rows = isinstance(data, list) and data and all(isinstance(row, list | Array) for row in data)
        rows = [np.asarray(row) for row in data] if are_rows else []
        if rows and all(row.ndim == 1 and row.dtype.kind in "biuf" for row in rows):
            data = np.stack(rows)
        return self.dream.predict(self._loader_of(data, batch_size))

    def stop(self, reason: str = "requested") -> None:
        """Ends `fit` on all ranks; from a callback, after its epoch."""
        self.dream.request_stop(reason)

    @property
    def history(self) -> list[Row]:
        """A dict for each epoch: "epoch" from 0, "step", "seconds", "lr", and the metrics: "train/loss", "val/loss".

        Training's are exact means over its samples, or labels. `pandas.DataFrame(trainer.history)` is a table of it.
        """
        return [dict(row) for row in self._epochs.rows]

    @property
    def best(self) -> float | None:
        """The best value of `monitor` so far; None before the first validation, or without a monitor."""
        return self.dream.best.get(self._metric)

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.dream.given.model

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self.dream.current_epoch

    @property
    def step(self) -> int:
        """Optimizer steps completed."""
        return self.dream.global_step

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0; true before anything was launched."""
        return not self.dream.is_launched or self.dream.world.is_main

    @property
    def is_distributed(self) -> bool:
        """Whether there are several ranks; false before anything was launched."""
        return self.dream.is_launched and self.dream.world.world_size > 1

    # -- files

    def load_best(self) -> Path:
        """Loads the weights of the best checkpoint into the model, and returns its path.

        If an average of the weights is validated, such as EMA's, it is the checkpoint's average, and the average starts
        again from it. A later `fit` starts from these weights, with the optimizer, schedules and counters of the last
        step. Frozen weights that no checkpoint has (`save_frozen=False`) stay as they are.

        Raises:
            CheckpointError: There is none.
        """
        refuse(not self._metric, "load_best() needs name=, val= and a validation that was saved.", CheckpointError)
        return self.dream.load_best(self._metric, self._mode)

    def save(self, path: str | Path, *, weights: str | None = None, overwrite: bool = True) -> None:
        """Writes weights, whole, to a directory in Hugging Face's layout, or a .safetensors or .pt file.

        None writes the `weights` that `evaluate` and `predict` see: an average, such as EMA's, if one is validated.
        "model" writes the model's own; "ema" or "swa", or "ema.1", those of a callback.
        """
        averages = [one for one in self.dream.callbacks if isinstance(one, WeightAverage)]
        validated = next((one for one in averages if one.validate), None)
        if weights is None and validated is not None:
            alike = [one for one in averages if one.export_name == validated.export_name]
            weights = f"{validated.export_name}.{alike.index(validated)}"
        self.dream.export(path, weights=weights or "model", overwrite=overwrite)

    def close(self) -> None:
        """Closes loaders and loggers, on every rank; also called when the trainer is unreferenced."""
        self.dream.close()
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.dream.__exit__(kind, error, trace)
        self._closing()

    def _tell(self, epoch: int, metrics: Row) -> None:
        for function in self._functions:
            function(self, epoch, metrics)

    def _loader_of(self, data: Any, batch_size: int | None) -> Any:
        options = self._options if batch_size is None else self._options._replace(batch_size=batch_size)
        return as_loader(data, options, "data")


def _monitored(
    monitor: str | Mapping[str, Mode] | None, checkpoints: CheckpointParameters | None, metrics: Metrics, val: Any
) -> tuple[str, Mode]:
    """The metric that a run monitors, "" for none, and whether lower or higher is better."""
    mode: Mode | None = None
    if isinstance(monitor, Mapping):
        monitor, mode = next(iter(monitor.items()))
    elif monitor is None and checkpoints is not None:
        monitor, mode = checkpoints.best_metric, checkpoints.best_mode
    metric = monitor or ("" if isinstance(val, dict) else "val/loss")
    if val is None or not metric:
        return "", "min"
    is_high = None if metrics.objects is None else higher_is_better({"": metrics.objects}, metric)
    by = f"monitor={{{metric!r}: ...}}, with "
    return metric, mode_of(metric, mode, higher_is_better=is_high, named_by="monitor", set_by=by)


def _default_checkpoints(name: str | None, metric: str, mode: Mode) -> CheckpointParameters:
    best: dict[str, Any] = {"best_metric": metric, "best_mode": mode} if metric else {}
    if not name:
        return CheckpointParameters(save_every_n_epochs=None, save_at_end=False, save_on_exception=False, **best)
    if not metric:
        return CheckpointParameters(keep_last=1)
    return CheckpointParameters(keep_last=1, keep_best=1, save_on_best=True, **best)


def _scratch_directory() -> Path:
    """A directory for an unnamed run, the same on all ranks of a host."""
    if "MASTER_PORT" not in os.environ or "RANK" not in os.environ:
        return Path(tempfile.mkdtemp(prefix="dream_trainer_"))
    job = f"{os.environ.get('MASTER_ADDR')}_{os.environ['MASTER_PORT']}_{next(_UNNAMED)}"
    return Path(tempfile.gettempdir()) / f"dream_trainer_{job}"


def _close_and_remove(dream: ObjectsTrainer, scratch: Path | None) -> None:
    """Several ranks are not unreferenced together: they close at the end of the program."""
    if not dream.is_launched or dream.world.world_size == 1:
        dream.close()
    if scratch is not None and (not dream.is_launched or dream.world.is_main):
        shutil.rmtree(scratch, ignore_errors=True)


@runtime_checkable
class MapStyle(Protocol):
    def __getitem__(self, index: int, /) -> Any: ...

    def __len__(self) -> int: ...


@runtime_checkable
class Array(Protocol):
    """Samples along a first dimension: a tensor, numpy's array, a table of pandas."""

    def __array__(self) -> Any: ...


class LoaderOptions(NamedTuple):
    """Batch size of a rank, whether each epoch has a different order, and the type that float64 arrays get."""

    batch_size: int
    shuffle: bool
    floats: torch.dtype | None = None


def as_loader(data: Any, options: LoaderOptions, name: str) -> Any:
    """A loader over `data`: samples are batched, a loader stays as it is; `name` is for messages."""
    if isinstance(data, Mapping) and not _are_arrays(data.values()):
        return {key: as_loader(value, options, f"{name}[{key!r}]") for key, value in data.items()}
    if isinstance(data, IterableDataset):
        return DataLoader(data, options.batch_size)
    dataset = _dataset(data, options, name)
    if dataset is not None:
        collate = functools.partial(_named, [*data]) if isinstance(data, Mapping) else None
        shuffle = options.shuffle and not isinstance(dataset, OrderedDataset)
        return DistributedDataLoader(dataset, options.batch_size, shuffle=shuffle, drop_last=False, collate_fn=collate)
    if isinstance(data, PerRankLoader) or (isinstance(data, Iterable) and not isinstance(data, str | bytes | type)):
        return data
    if callable(data) and not isinstance(data, type):
        return _Made(data)
    raise DataError(
        f"{name}={data!r} is no data. Give a DataLoader, a dataset, arrays (inputs, targets), a list of samples, an "
        "iterable of batches, or a function that makes one."
    )


def _dataset(data: Any, options: LoaderOptions, name: str) -> Any:
    """`data` as a dataset by number; None if it is not made of samples."""
    if isinstance(data, Array):
        return _tensor(data, options)
    if isinstance(data, Mapping | tuple):
        parts = [*data.values()] if isinstance(data, Mapping) else [*data]
        arrays = [_tensor(part, options) for part in parts] if _are_arrays(parts) else []
        if not arrays or len({array.shape[:1] for array in arrays} | {arrays[0].shape[:1] or None}) > 1:
            raise DataError(
                f"{name}= has {shapes(arrays or [*map(type, parts)])}. Make each of them an array of all samples by "
                "numpy.asarray, of one first dimension; or give a list of samples."
            )
        return TensorDataset(*arrays)
    if isinstance(data, list):  # its first item tells
        parts = list(leaves(data[0] if data else None))
        are_arrays = all(isinstance(part, Tensor | np.ndarray) and part.ndim > 0 for part in parts)
        is_loader = isinstance(parts[0] if parts else None, Dataset | DataLoader)
        if is_loader or (are_arrays and len({len(part) for part in parts}) == 1):
            raise DataError(
                f"{name}= is a list whose first item, {shapes(data[0])}, could be a sample or a batch. Give "
                f"DataLoader({name}, batch_size=32) for samples, DataLoader({name}, batch_size=None) for batches, a "
                "tuple (inputs, targets) of arrays of all samples, or a dict of several named data."
            )
    return data if isinstance(data, MapStyle) and not isinstance(data, str | bytes | type) else None


def _named(names: list[str], samples: list[tuple[Tensor, ...]]) -> dict[str, Any]:
    return dict(zip(names, default_collate(samples), strict=True))


def _are_arrays(parts: Iterable[Any]) -> bool:
    kinds = [isinstance(part, Array) for part in parts]
    return bool(kinds) and all(kinds)


def _tensor(array: Any, options: LoaderOptions) -> Tensor:
    if isinstance(array, Tensor):
        return array
    # A copy if PyTorch cannot use the memory: read-only, or with negative strides.
    found = torch.as_tensor(np.require(array, requirements=["C", "W"]))
    return found.to(options.floats) if found.dtype is torch.float64 and options.floats is not None else found


class _Made:
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())
