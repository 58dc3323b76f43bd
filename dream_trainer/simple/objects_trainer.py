"""ObjectsTrainer: the DreamTrainer that a `dream_trainer.simple.Trainer` is, with its hooks answered by objects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dream_trainer.data.loader import DistributedDataLoader
from dream_trainer.data.ordered import ENDLESS
from dream_trainer.data.sample_count import SampleCount
from dream_trainer.errors import ConfigError, HookError
from dream_trainer.events.callback import Callback
from dream_trainer.nested import map_tensors
from dream_trainer.optim.learning_rates import ScheduleParameters
from dream_trainer.simple.best_weights import best_of, take_weights
from dream_trainer.simple.given_data import LoaderOptions, as_loader
from dream_trainer.simple.given_metrics import GivenMetrics, telling_of
from dream_trainer.simple.given_optimizer import GivenSchedule, OptimizerPlan, build_given_schedules
from dream_trainer.simple.given_record import ObjectsConfig, in_arguments, optimizers_in_words
from dream_trainer.simple.given_together import DEFAULT_MONITOR, refuse_unknown_monitor
from dream_trainer.simple.integers import as_int
from dream_trainer.simple.model_calls import ModelCalls, Step, scores, values_of
from dream_trainer.trainer.branch_parent import run_name
from dream_trainer.trainer.dream import DreamTrainer
from dream_trainer.trainer.other_run import changed_fields

if TYPE_CHECKING:
    from dream_trainer.checkpoint.manifest import Manifest
    from dream_trainer.config.checkpoint_parameters import BranchParameters
    from dream_trainer.modules.joined_buffers import BufferPolicy
    from dream_trainer.trainer.abstract import AbstractTrainer

logger = logging.getLogger("dream_trainer")

# What a class's author is warned of; here it is as it should be, or said otherwise.
_EXPECTED = frozenset({"built early", "real weights", "no-val", "no checkpoint", "finished", "best_metrics"})


class Given(NamedTuple):
    """What a trainer is made of.

    Attributes:
        model: The model, built.
        optimizer: What is to update it.
        schedule: What drives the learning rate; None keeps it.
        schedule_unit: When schedules that are objects step: after each optimizer step, or each epoch.
        train: Training loader.
        val: Validation loader or loaders; None for none.
        options: How datasets for `evaluate` and `predict` become loaders.
        calls: How the model is called with a batch.
        step: The user's own training step; None for the model's call.
        val_step: The user's own validation step; None for `step`, or the model's call.
        count_samples: The user's own count of a batch's samples; None for the loader's, or a guess.
        metrics: What is measured in validations.
        monitor: Metric of validations that the run goes by; None for none.
        better: Whether lower or higher values of it are better.
        has_name: Whether the run is kept, to be found again.
        buffers: How ranks join buffers, by pattern.
    """

    model: nn.Module
    optimizer: OptimizerPlan
    schedule: GivenSchedule | None
    schedule_unit: str
    train: Any
    val: Any
    options: LoaderOptions
    calls: ModelCalls
    step: Step | None
    val_step: Step | None
    count_samples: Callable[[Any], int] | None
    metrics: GivenMetrics
    monitor: str | None
    better: Literal["min", "max"]
    has_name: bool
    buffers: Mapping[str, BufferPolicy]

    def loader_of(self, data: Any, batch_size: int | None) -> Any:
        """A loader over `data`; None over none."""
        options = self.options if batch_size is None else self.options._replace(batch_size=as_int(batch_size))
        return None if data is None else as_loader(data, options, "data")


class ObjectsTrainer(DreamTrainer):
    """The same loop, with hooks that look up what was given.

    Args:
        config: The run's configuration.
        given: What it is made of.
    """

    _another_run = (
        "give another name=, which trains from the start, or from the checkpoint with checkpoints="
        "dt.CheckpointParameters(resume=<its path>, branch=dt.BranchParameters({words}))"
    )

    _policies_in = "buffers="

    def __init__(self, config: ObjectsConfig, given: Given) -> None:
        super().__init__(config)
        self._given = given
        self._record = config.given_objects
        self._changed: list[str] = []  # since the checkpoint that the run goes on from
        self._begins_from = ""  # another run's checkpoint, in words
        # What was taken of a checkpoint since the last window, and the checkpoint's step.
        self._taken: tuple[str, int] | None = None

    def take_best(self) -> Path:
        """Puts into the model what was validated at the run's best checkpoint: its weights, or their average."""
        best = best_of(self)
        self._taken = take_weights(self, best), best.step
        return best.path

    def say_whose_weights(self) -> None:
        """Where training goes on from weights that are not those of its last step."""
        taken, self._taken = self._taken, None
        if taken is not None and taken[1] != self.global_step:
            what, step = taken
            self.warn_once(
                f"weights of {step}",
                f"training goes on from step {self.global_step} with the {what} of step {step}, which load_best() put "
                "into the model; optimizer and schedules are those of the last step. To go on as before load_best(), "
                "build the trainer anew: it resumes from its newest checkpoint.",
            )

    def say_uneven(self, outputs: list[Tensor]) -> None:
        """Why predictions are a list."""
        shapes = list(dict.fromkeys(str([*output.shape]) for output in outputs))
        self.warn_once(
            "uneven",
            f"predict() returns a list of {len(outputs)} batches' tensors and not one tensor, since their later "
            f"dimensions differ: {', '.join(shapes[:3])}{', ...' if len(shapes) > 3 else ''}. Pad all samples to one "
            "length for one tensor.",
        )

    def warn_once(self, key: str, message: str) -> None:
        """Leaves out what only a class's author could mend."""
        if key not in _EXPECTED:
            super().warn_once(key, message)

    # -- what it is made of

    def configure_models(self) -> None:
        """The model is there already. One in eval mode, as `from_pretrained` gives it, would train without dropout."""
        self.model = self._given.model
        if not self.model.training:
            self.model.train()

    def buffer_policies(self) -> Mapping[str, BufferPolicy]:
        """What is given."""
        return self._given.buffers

    def configure_dataloaders(self) -> tuple[Any, Any]:
        """The loaders are there already."""
        return self._given.train, self._given.val

    def configure_optimizers(self) -> None:
        """The optimizer follows its model's parameters, or is built."""
        self.optimizers = self._given.optimizer.build(self.model, self.model_blocks(self.model))
        self._record.optimizer, self._record.lr = optimizers_in_words(self.optimizers)

    def configure_schedulers(self) -> None:
        """Schedules are built for `total_steps`; objects are what they are."""
        given = self._given
        self.schedulers = build_given_schedules(
            given.schedule, self.optimizers, self.total_steps, self.steps_per_epoch, given.better
        )
        plateaus = [scheduler for scheduler in self.schedulers if isinstance(scheduler, ReduceLROnPlateau)]
        if plateaus and given.val is None:
            raise ConfigError("the schedule follows a validation's metric, and there is none. Give val=.")
        for plateau in plateaus:
            if plateau.mode != given.better:
                raise ConfigError(
                    f"the schedule's mode={plateau.mode!r} would lower the rate while "
                    f"{given.monitor or DEFAULT_MONITOR} improves. Give ReduceLROnPlateau(mode={given.better!r}), or "
                    f"the trainer mode={plateau.mode!r}."
                )

    def configure_metrics(self) -> None:
        """torchmetrics' objects move to the device."""
        if self._given.metrics.objects is not None:
            self.metrics = self._given.metrics.objects

    def post_setup(self) -> None:
        """A loss may have tensors, such as the weights of classes."""
        loss = self._given.calls.loss
        if loss is not None and loss.module is not None:
            loss.module.to(self.world.device)

    def _sample_count(self) -> SampleCount:
        warn = partial(self.warn_once, "samples of a batch")
        return SampleCount(self._given.count_samples, warn, "Give count_samples=, a function of the batch.")

    def _leaves_nothing(self) -> bool:
        return super()._leaves_nothing() or not self._given.has_name

    # -- steps

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Forward, backward, and at the window's end the optimizers and the schedules that go by steps.

        Each sample of a window counts the same, or each label where the loss is a mean of those, however they are
        shared out among its batches and the ranks.
        """
        given, window = self._given, self._accumulation
        labels = None
        if given.step is None:
            loss, _, _, labels = given.calls.forward(self.model, batch)
            result: dict[str, Any] = {"loss": loss}
        else:
            result = values_of(given.step(self.model, batch), "step")
        # One batch alone is the mean already.
        counts = window.size > 1 or window.is_uneven or (labels is not None and self.world.dp_size > 1)
        if counts:
            self.backward(result["loss"], weight=self._window.batch_samples if labels is None else labels)
        else:
            self.backward(result["loss"])
            window.batch_weight = labels  # in what is logged
        if not self.is_accumulating_gradients:
            self.step(self.model, self.optimizers, self._scheduled("step"))
        return {name: value for name, value in result.items() if value is not None}

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any] | tuple[dict[str, Any], int]:
        """The loss and the metrics, each with a weight of its own: what it is a mean of."""
        given = self._given
        step = given.step if given.val_step is None else given.val_step
        if step is not None:
            return values_of(step(self.model, batch), "val_step" if given.val_step else "step")
        loss, outputs, targets, labels = given.calls.forward(self.model, batch)
        result: dict[str, Any] = {"loss": loss}
        weights: dict[str, Tensor | None] = {"loss": labels}
        if given.metrics:
            found = self._measured(outputs, targets, batch)
            if given.metrics.objects is not None:
                with telling_of("metrics=", found, targets):
                    self.metrics.update(found, targets)
            for name in given.metrics.functions:
                result[name], weights[name] = given.metrics.value(name, found, targets, given.calls.loss)
        buffer, samples = self._validation.buffer, self._validation.weight
        if buffer is not None:
            for name, weight in weights.items():
                buffer.add_result({name: result[name]}, samples if weight is None else weight)
        return result, 0  # for listeners: it is counted already

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """What the model says; half precision as float32, since numpy has no bfloat16."""
        return map_tensors(_in_full_precision, self._given.calls.predict(self.model, batch))

    def _measured(self, outputs: Any, targets: Any, batch: Any) -> Any:
        found = scores(outputs)
        if self._given.calls.returns_loss and isinstance(outputs, tuple | list) and len(outputs) > 1:
            found = outputs[1]
        if targets is None or (isinstance(found, Tensor) and found.dim() == 0):
            raise HookError(
                "metrics= need the model's outputs and a target, and "
                f"{'the model returns its loss alone' if targets is not None else 'the batch has no target'}. Give "
                "val_step=, a function of (model, batch) that returns a dict of values."
            )
        return found

    # -- a run that was there before under this name

    def was_there_before(self) -> str:
        """Whose weights and history these are, when nothing was left to train, and what to do."""
        if self._begins_from:
            return (
                f"The run {self.experiment!r} begins from {self._begins_from}: the weights and the history are that "
                "run's, and nothing was trained. Raise epochs= or steps=, which count that run's, or count anew with "
                'dt.BranchParameters(counters="new").'
            )
        changed = f" Given otherwise now, and not used: {'; '.join(self._changed)}." if self._changed else ""
        return (
            f"The run {self.experiment!r} was there already, in {self.run_dir}: its weights and its history are what "
            f"you have now, and nothing was trained.{changed} Give another name= to train from the start, or "
            "fit(epochs=) or steps= to train this one further."
        )

    def _say_what_changed(self, manifest: Manifest, begins: BranchParameters | None) -> None:
        self._changed = in_arguments(changed_fields(manifest, self))
        self._begins_from = "" if begins is None else f"step {manifest.step} of {run_name(manifest)}"
        if not self._changed or not self.world.is_main:
            return
        changed = "; ".join(self._changed)
        if begins is None:
            logger.warning(
                "the run %r, which goes on from step %d, was begun with other arguments: %s. What is given now "
                "counts from here, but for the optimizer's numbers, which stay the run's. Give another name= to train "
                "from the start.",
                self.experiment,
                self.global_step,
                changed,
            )
        else:
            logger.warning(
                "the run %r begins from %s, which had other arguments: %s. What is given now counts%s.",
                self.experiment,
                self._begins_from,
                changed,
                ", but for the optimizer's numbers, which go along" if begins.optimizer == "keep" else "",
            )

    # -- schedules

    def _scheduled(self, unit: str) -> list[Any]:
        schedule = self._given.schedule
        if isinstance(schedule, ScheduleParameters):
            own_unit: str = schedule.unit
        else:
            own_unit = "step" if isinstance(schedule, str) else self._given.schedule_unit
        if own_unit != unit:
            return []
        return [scheduler for scheduler in self.schedulers if not isinstance(scheduler, ReduceLROnPlateau)]


def _in_full_precision(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


class StepsSchedules(Callback):
    """Steps the schedules that go by epochs, and those that follow a metric; the optimizers begin without gradients."""

    order = -100  # before what shows or keeps learning rates

    def pre_fit(self, trainer: AbstractTrainer) -> None:
        """Gradients of before, from a look at the loss for instance, are not part of the first step."""
        assert isinstance(trainer, ObjectsTrainer)  # nothing else makes this callback
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
        trainer.say_whose_weights()
        if trainer._given.metrics and trainer._given.val is None:
            trainer.warn_once(
                "metrics without val",
                "metrics= are of validations, and there are none: fit() measures the loss alone. Give val=; "
                "evaluate(data) has the metrics, too.",
            )
        if trainer._given.val is not None and _ends_in_its_first_epoch(trainer):
            trainer.warn_once(
                "no validation",
                "val= is validated after each epoch, and the run ends in its first one. Set val_every=, in steps.",
            )

    def post_fit(self, trainer: AbstractTrainer) -> None:
        """What was given to be validated should have been."""
        assert isinstance(trainer, ObjectsTrainer)
        names = {name for line in trainer.history for name in line}
        has_validated = trainer._given.val is None or any(name.startswith("val/") for name in names)
        if not has_validated and not trainer._agreement.stopped:
            every = trainer.config.training_parameters.val_every_n_steps
            when = "no epoch is complete" if every is None else f"val_every={every} is more than the steps so far"
            trainer.warn_once("no validation", f"val= was not validated yet: {when}. Set val_every=, in steps.")

    def post_epoch(self, trainer: AbstractTrainer) -> None:
        """An epoch is over."""
        assert isinstance(trainer, ObjectsTrainer)
        for scheduler in trainer._scheduled("epoch"):
            scheduler.step()

    def post_val_epoch(self, trainer: AbstractTrainer, metrics: dict[str, float]) -> None:
        """A validation is over."""
        assert isinstance(trainer, ObjectsTrainer)
        if trainer.is_evaluating or trainer.is_sanity_validation:
            return
        given = trainer._given
        if given.monitor is not None:
            refuse_unknown_monitor(given.monitor, metrics)
        for scheduler in trainer.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                monitor = given.monitor or DEFAULT_MONITOR
                refuse_unknown_monitor(monitor, metrics)
                scheduler.step(metrics[monitor])


def _ends_in_its_first_epoch(trainer: ObjectsTrainer) -> bool:
    """Whether that is known before, and nothing else than an epoch's end is validated at."""
    limits, steps, loader = trainer.config.training_parameters, trainer.steps_per_epoch, trainer._given.train
    if limits.max_steps is None or limits.val_every_n_steps is not None:
        return False
    is_endless = isinstance(loader, DistributedDataLoader) and len(loader.dataset) == ENDLESS
    return is_endless or (steps is not None and steps > limits.max_steps)
