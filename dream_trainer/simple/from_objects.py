"""Trainer: trains a model, a loss and an optimizer that are there already, without a class of one's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, Self

import torch.nn as nn

from dream_trainer.callbacks.early_stopping import EarlyStopping
from dream_trainer.config.checkpoint_parameters import CheckpointParameters
from dream_trainer.config.device_parameters import DeviceParameters, DeviceType, Precision
from dream_trainer.config.logger_parameters import LoggerName, LoggerParameters
from dream_trainer.config.training_parameters import EvalParameters, TrainingParameters
from dream_trainer.errors import ConfigError
from dream_trainer.events.callback import Callback, CallbackCollection
from dream_trainer.modules.joined_buffers import BufferPolicy
from dream_trainer.nested import concatenated
from dream_trainer.screen import show
from dream_trainer.simple.argument_names import refuse_wrong_arguments
from dream_trainer.simple.epoch_rows import EpochRows, Row
from dream_trainer.simple.given_data import LoaderOptions, as_loader, as_rows, can_begin_again, float_type
from dream_trainer.simple.given_loss import GivenLoss, LossFunction, LossName
from dream_trainer.simple.given_metrics import GivenMetrics
from dream_trainer.simple.given_optimizer import GivenOptimizer, GivenSchedule, OptimizerPlan, check_schedule
from dream_trainer.simple.given_record import (
    GivenObjects,
    ObjectsConfig,
    batch_size_of,
    data_in_words,
    function_in_words,
    model_in_words,
    schedule_in_words,
)
from dream_trainer.simple.given_together import (
    DEFAULT_MONITOR,
    monitored,
    refuse_both,
    refuse_no_model,
    refuse_no_value,
    refuse_without_name,
    refuse_without_validation,
    refuse_wrong_function,
    what_to_keep,
)
from dream_trainer.simple.given_values import options_of, values_digest
from dream_trainer.simple.integers import as_int
from dream_trainer.simple.model_calls import ModelCalls, Step
from dream_trainer.simple.objects_trainer import Given, ObjectsTrainer, StepsSchedules
from dream_trainer.simple.scratch import close_and_remove, scratch_directory
from dream_trainer.trainer.limits import ending_with_the_epoch
from dream_trainer.trainer.validation import validation_mode

EpochFunction = Callable[["Trainer", int, Row], None]


class Trainer:
    """Trains a model that is there already; alone, or on every rank of a `torchrun`.

    Inside is a DreamTrainer, `self.dream`, with the same loop as any: what is here is there under the same name or the
    one that docs/simple.md lists. Without a `name` the run keeps no files.

    Args:
        model: The model, with its weights. It is moved to the device and trained in place; one in eval mode, as
            `from_pretrained` gives it, is set to train mode as a whole.
        loss: Function of `(outputs, targets)` that returns a scalar, or a name: "cross_entropy",
            "binary_cross_entropy_with_logits", "nll", "mse", "mae" or "huber". None: the model returns its loss itself,
            as those of Hugging Face do with "labels" in the batch.
        optimizer: An optimizer over `model.parameters()`, its class or a function of the parameters (with `lr`, if that
            is given), or a name or `OptimizerParameters` ("adamw" by default).
        lr: Learning rate for a name or a class; None for its own default.
        train: Training data. Samples, which `batch_size` and so on make batches of: a dataset, a list, arrays
            `(*inputs, targets)` or a dict of them. Or batches: a DataLoader, an iterable, a function that makes one for
            each epoch. A batch is `(*inputs, target)`, a dict of the model's arguments with the target under `target`,
            or whatever `step` takes.
        val: Validation data, or a dict of them by name; None validates nothing.
        val_every: Optimizer steps between validations; None validates after each epoch.
        metrics: For validations: names ("accuracy", "mse", "mae"), or a dict of functions of `(outputs, targets)`,
            whose values are averaged over samples, and torchmetrics' objects.
        schedule: A name ("cosine"), `ScheduleParameters`, a schedule over the given optimizer, or a function of the
            optimizer; None keeps the rate. ReduceLROnPlateau follows `monitor`, in its mode.
        schedule_unit: When a schedule that is an object or made by a function steps; a name goes by steps.
        step: Function of `(model, batch)` that returns the loss, or a dict with "loss" and values to log; it takes the
            place of `loss`.
        val_step: The same for validations; None takes `step`.
        target: Name of the target in batches that are dicts.
        batch_size: Samples of one rank's batch.
        val_batch_size: The same for `val`; None is `batch_size`.
        shuffle: Whether each epoch of a training dataset has an order of its own; a Mixture has its order.
        workers: Processes that load a dataset; 0 loads in this one.
        collate: Makes a batch of a list of a dataset's samples; None is torch's.
        count_samples: Function of a batch that returns its number of samples; None counts those that were dealt, and
            guesses for ready batches.
        epochs: Epochs of the whole run; with neither this nor `steps` one.
        steps: Optimizer steps of the whole run; the first limit that is reached counts.
        accumulate: Batches per optimizer step.
        clip: Largest norm of the gradients; None does not clip.
        precision: "fp32", "tf32", "bf16" or "fp16".
        device: "auto" takes the accelerator, if there is one; "cpu", "cuda", "mps" or "xpu".
        shard: Whether several ranks share one copy of the model (FSDP) instead of having one each.
        compile: Whether the model's blocks are compiled.
        seed: Of the order of a dataset's samples, and of random layers.
        patience: Validations without an improvement of `monitor` that end the run; None does not stop early.
        monitor: Metric that `patience`, `best` and the best checkpoint go by; with a dict of `val` such as
            "val/clean/loss".
        mode: Whether lower ("min") or higher ("max") is better; None asks the metric: losses and errors are better
            low, an accuracy high, and torchmetrics' objects know it themselves.
        callbacks: Functions `(trainer, epoch, metrics)`, called after each epoch, numbered from 0, on every rank; and
            `dream_trainer.Callback`s.
        name: Of the run, which then keeps its checkpoints (the newest and the best), its config and its log under
            `<runs_dir>/<project>/<group>/<name>`, and goes on where it was when it is started again.
        project: First part of that directory.
        group: Second part of that directory.
        runs_dir: Where runs lie; None: `DREAM_TRAINER_RUNS` in the environment, else "runs".
        loggers: Where numbers go; needs `name`. None: a file, metrics.jsonl.
        checkpoints: When to save, which to keep and what to resume; needs `name`. None: after each epoch and each best
            validation, keeping the newest and the best.
        buffers: How several ranks join buffers that forwards change: "mean", "rank 0" or "as is", by regular expression
            on names such as "model.running". None compares them.
        progress: Whether a line is printed after each epoch, and every ten seconds in long ones.

    Raises:
        ConfigError: A value cannot work, alone or with another one, or there is no such argument.
        DataError: `train` or `val` is no data, or could be samples as well as batches.

    Example:
        ```python
        trainer = Trainer(model, loss=nn.MSELoss(), optimizer="adamw", lr=1e-3, train=loader, epochs=5)
        history = trainer.fit()
        ```
    """

    def __new__(cls, *given: Any, **named: Any) -> Self:
        """Names an argument that there is not, before Python does."""
        refuse_wrong_arguments(cls.__init__, given, named)
        return super().__new__(cls)

    def __init__(
        self,
        model: nn.Module,
        *,
        train: Any,
        loss: LossFunction | LossName | None = None,
        optimizer: GivenOptimizer = "adamw",
        lr: float | None = None,
        val: Any = None,
        val_every: int | None = None,
        metrics: Iterable[str] | Mapping[str, Any] = (),
        schedule: GivenSchedule | None = None,
        schedule_unit: Literal["step", "epoch"] = "step",
        step: Step | None = None,
        val_step: Step | None = None,
        target: str = "labels",
        batch_size: int = 32,
        val_batch_size: int | None = None,
        shuffle: bool = True,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        count_samples: Callable[[Any], int] | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        accumulate: int = 1,
        clip: float | None = None,
        precision: Precision = "fp32",
        device: DeviceType = "auto",
        shard: bool = False,
        compile: bool = False,
        seed: int = 42,
        patience: int | None = None,
        monitor: str = DEFAULT_MONITOR,
        mode: Literal["min", "max"] | None = None,
        callbacks: Sequence[EpochFunction | Callback] = (),
        name: str | None = None,
        project: str = "simple",
        group: str = "simple",
        runs_dir: str | None = None,
        loggers: tuple[LoggerName, ...] | None = None,
        checkpoints: CheckpointParameters | None = None,
        buffers: Mapping[str, BufferPolicy] | None = None,
        progress: bool = True,
    ) -> None:
        refuse_no_model(model)
        refuse_no_value(name, lr, epochs=epochs, steps=steps)
        refuse_both(loss, step, val_step, metrics)
        refuse_without_name(name, loggers=loggers, checkpoints=checkpoints, runs_dir=runs_dir)
        refuse_wrong_function("step", step, "model", "batch")
        refuse_wrong_function("val_step", val_step, "model", "batch")
        refuse_wrong_function("count_samples", count_samples, "batch")
        check_schedule(schedule)
        floats = float_type(model) if step is None else None  # a step of the user's own sees what was given
        options = LoaderOptions(as_int(batch_size), shuffle, as_int(workers), collate, floats)
        options_of_val = options._replace(batch_size=as_int(val_batch_size or batch_size), shuffle=False)
        measured = GivenMetrics(metrics, model if loss is None else None)
        loaders_of_val = None if val is None else as_loader(val, options_of_val, "val")
        watched = None
        if val is None:
            refuse_without_validation(patience, monitor, val_every)
        else:
            watched = monitored(
                monitor,
                loaders_of_val,
                measured.functions,
                are_all=step is None and val_step is None and measured.objects is None,
                is_needed=patience is not None or (name is not None and checkpoints is None),
            )
        better = "min" if watched is None else mode or measured.better(watched, named_by="monitor", set_by="mode")
        given = Given(
            model=model,
            optimizer=OptimizerPlan(optimizer, lr, model),
            schedule=schedule,
            schedule_unit=schedule_unit,
            train=as_loader(train, options, "train"),
            val=loaders_of_val,
            options=options_of_val,
            calls=ModelCalls(None if loss is None else GivenLoss(loss), target),
            step=step,
            val_step=val_step,
            count_samples=count_samples,
            metrics=measured,
            monitor=watched,
            better=better,
            has_name=name is not None,
            buffers=buffers or {},
        )
        me: weakref.ref[Trainer] = weakref.ref(self)  # so that a trainer nobody has any more is closed at once
        functions = [_telling(me, function) for function in callbacks if not isinstance(function, Callback)]
        self._rows = EpochRows(functions, prints=progress)
        watchers = [StepsSchedules(), self._rows, *(one for one in callbacks if isinstance(one, Callback))]
        if patience is not None:
            watchers.append(EarlyStopping(monitor, mode=better, patience=as_int(patience)))
        scratch = scratch_directory() if name is None else None
        config = ObjectsConfig(
            project=project,
            group=group,
            experiment=name or "unnamed",
            runs_dir=runs_dir if scratch is None else str(scratch),
            seed=as_int(seed),
            given_objects=GivenObjects(
                model=model_in_words(model),
                loss=function_in_words(step if loss is None else loss),
                loss_options=options_of(loss),
                schedule=schedule_in_words(schedule),
                metrics=measured.names,
                shuffle=shuffle,
                train=data_in_words(given.train),
                val=None if val is None else data_in_words(loaders_of_val),
                train_values=values_digest(given.train),
                val_values=values_digest(loaders_of_val),
            ),
            training_parameters=TrainingParameters(
                train_batch_size=batch_size_of(given.train, options.batch_size),
                val_batch_size=batch_size_of(loaders_of_val, options_of_val.batch_size),
                n_epochs=as_int(epochs),
                max_steps=as_int(steps),
                gradient_accumulation_steps=as_int(accumulate),
                gradient_clip_val=clip,
                val_every_n_steps=as_int(val_every),
                val_every_n_epochs=1 if val_every is None else None,
                num_sanity_val_steps=1 if (measured or val_step) and can_begin_again(loaders_of_val) else 0,
            ),
            device_parameters=DeviceParameters(
                device=device,
                precision=precision,
                dp_replicate=1 if shard else "auto",
                dp_shard="auto" if shard else 1,
                compile=compile,
            ),
            eval_parameters=EvalParameters(best_metrics={} if watched is None else {watched: better}),
            checkpoint_parameters=what_to_keep(name, checkpoints, watched, better),
            logger_parameters=LoggerParameters(
                loggers=(("jsonl",) if name else ()) if loggers is None else loggers, log_every_n_steps=10
            ),
            callbacks=CallbackCollection(watchers),
        )
        self.dream = ObjectsTrainer(config, given)
        self._closing = weakref.finalize(self, close_and_remove, self.dream, scratch)

    # -- training

    def fit(self, *, epochs: int | None = None, steps: int | None = None) -> list[Row]:
        """Trains until the limits of the run, and returns `history`. Called again it goes on.

        Args:
            epochs: Epochs of the whole run from now on, those that are done included.
            steps: Optimizer steps of the whole run from now on. What of the two is not given is no limit then.
        """
        if epochs is not None or steps is not None:
            self.dream.set_limits(n_epochs=as_int(epochs), max_steps=as_int(steps))
        before = self.dream.local_batches
        self.dream.fit()
        is_finished = self.dream.local_batches == before and not self.dream._agreement.stopped
        if is_finished and self.is_main:
            self._say_nothing_is_left()
        return self.history

    def _say_nothing_is_left(self) -> None:
        done = f"nothing to train: {self.epoch} epochs and {self.step} steps are done."
        if self.dream.local_batches == 0 and self.step > 0:
            # The numbers look like those of what was given now, so it is said also where no lines are printed.
            was_there = f"{done} {self.dream.was_there_before()}"
            show(was_there) if self._rows.prints else self.dream.warn_once("was there", was_there)
        elif self._rows.prints:
            show(f"{done} Raise fit(epochs=) or steps=")

    def train_epoch(self) -> Row:
        """Trains to the end of the epoch, or the next one, whatever the limits, and returns its row of `history`."""
        with ending_with_the_epoch(self._started()):
            self.dream.fit()
        return dict(self._rows.rows[-1])

    def evaluate(self, data: Any = None, *, batch_size: int | None = None) -> dict[str, float]:
        """The loss and the metrics over `data`, or over `val`, exact over all samples and ranks.

        Args:
            data: As `val`; None takes that.
            batch_size: For samples; None is that of `val`.

        Raises:
            ConfigError: There is neither.
        """
        if data is None and self.dream._given.val is None:
            raise ConfigError("evaluate() goes over val=, and there is none. Give val=, or evaluate(data).")
        return self.dream.evaluate(self.dream._given.loader_of(data, batch_size))

    def predict(self, data: Any, *, batch_size: int | None = None) -> Any:
        """What the model says of `data`, on the CPU, in the data's order, on every rank.

        Args:
            data: As `val`, or the inputs alone: an array, a list of rows of numbers, or a dataset. Of several parts in
                a tuple the last one is the target, which is not looked at.
            batch_size: For samples; None is that of `val`.

        Returns:
            Tensors of all batches joined along the first dimension, in the structure that the model returns; of models
            that return "logits" these. Half precision is float32, which numpy has. Where later dimensions differ
            between batches, as of texts padded batch by batch, a list of the batches' tensors, and a warning.
        """
        data = as_rows(data, self.dream._given.train)
        results = self.dream.predict(self.dream._given.loader_of(data, batch_size))
        return concatenated(results, self.dream.say_uneven)

    def stop(self, reason: str = "requested") -> None:
        """Ends `fit` on all ranks; from a callback, say, after its epoch."""
        self.dream.request_stop(reason)

    # -- what came of it

    @property
    def history(self) -> list[Row]:
        """A dict for each epoch: "epoch" from 0, "step", "seconds", "lr", and the metrics: "train/loss", "val/loss".

        Training's are exact means over its samples, or labels. `pandas.DataFrame(trainer.history)` is a table of it.
        """
        return [dict(row) for row in self._rows.rows]

    @property
    def best(self) -> float | None:
        """The best value of `monitor` so far; None before the first validation, or of several `val` without one."""
        return next(iter(self.dream.best.values()), None)

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.dream._given.model

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
        return self.dream._world is None or self.dream.world.is_main

    @property
    def is_distributed(self) -> bool:
        """Whether there are several ranks."""
        return self.dream._world is not None and self.dream.world.world_size > 1

    # -- files

    def load_best(self) -> Path:
        """Puts the weights of the best checkpoint into the model, and returns its path; the rest stays as it is.

        Where that is not the one of `best`, since your `checkpoints` did not save or keep it, or a branch took its best
        value from the run that it began from, a warning names both. Frozen weights that checkpoints are saved without
        (`save_frozen=False`) stay as they are.

        Where an average of the weights is validated, such as EMA's, it is the checkpoint's average that is put into the
        model, and the average of now begins from it; a warning says where nothing averages any more. A `fit` that
        trains on goes on from there, with the optimizer, schedules and counters of the last step.

        Raises:
            CheckpointError: There is none, or it was saved without frozen weights that are others now.
        """
        return self._started().take_best()

    def save(self, path: str | Path, *, weights: str | None = None, overwrite: bool = True) -> None:
        """Writes weights, whole, to a directory in Hugging Face's layout, or a .safetensors or .pt file.

        Args:
            path: Where to.
            weights: None writes what `evaluate` and `predict` see: an average, such as EMA's, where one is validated,
                else the model's. "model" writes the model's own; "ema" or "swa", or "ema.1", those of a callback.
            overwrite: Whether to replace what is there.
        """
        dream = self._started()
        with validation_mode(dream) if weights is None else nullcontext():
            dream.export(path, weights=weights or "model", overwrite=overwrite)

    def _started(self) -> ObjectsTrainer:
        with self.dream._session.failing_for_all():
            self.dream._session.start()
        return self.dream

    def close(self) -> None:
        """Closes loaders and loggers, on every rank; at the latest when nobody has the trainer, or the program ends."""
        self.dream.close()
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.dream.__exit__(kind, error, trace)
        self._closing()


def _telling(me: weakref.ref[Trainer], function: EpochFunction) -> Callable[[int, Row], None]:
    refuse_wrong_function("callbacks", function, "trainer", "epoch", "metrics")

    def tell(epoch: int, metrics: Row) -> None:
        trainer = me()
        assert trainer is not None  # it is training
        function(trainer, epoch, metrics)

    return tell
