"""ObjectsTrainer: the DreamTrainer behind `dream_trainer.simple.Trainer`, whose hooks are answered by given objects."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import is_not
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

from dream_trainer.best_value import refuse_missing
from dream_trainer.checks import check_choice, check_names
from dream_trainer.compat.pytorch import has_values
from dream_trainer.config.trainer_config import DreamTrainerConfig
from dream_trainer.data.sample_count import IGNORED
from dream_trainer.errors import ConfigError, DataError, HookError
from dream_trainer.events.callback import Callback
from dream_trainer.loggers.buffer import MetricBuffer
from dream_trainer.modules.metrics import is_metric
from dream_trainer.nested import map_tensors
from dream_trainer.optim.learning_rates import ScheduleParameters, build_schedules
from dream_trainer.optim.optimizers import OptimizerParameters, build_optimizers
from dream_trainer.screen import format_metrics, format_number, show
from dream_trainer.trainer.abstract import AbstractTrainer
from dream_trainer.trainer.dream import DreamTrainer

Step = Callable[[nn.Module, Any], Tensor | Mapping[str, Any]]
LossFunction = Callable[[Any, Any], Tensor]
LossName = Literal["cross_entropy", "binary_cross_entropy_with_logits", "nll", "mse", "mae", "huber"]

LOSSES: dict[str, LossFunction] = {
    "cross_entropy": F.cross_entropy,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "nll": F.nll_loss,
    "mse": F.mse_loss,
    "mae": F.l1_loss,
    "huber": F.huber_loss,
}
# Losses that broadcast (n, 1) against (n) to n * n elements.
_BY_ELEMENT = (
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.poisson_nll_loss, F.kl_div, F.hinge_embedding_loss),
    *(F.soft_margin_loss, F.multilabel_soft_margin_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss, nn.KLDivLoss, nn.HingeEmbeddingLoss),
    *(nn.SoftMarginLoss, nn.MultiLabelSoftMarginLoss, nn.BCELoss, nn.BCEWithLogitsLoss),
)


def shapes(value: Any) -> str:
    """A batch in a message: each tensor by its type and shape."""
    return str(map_tensors(lambda tensor: f"{tensor.dtype} {[*tensor.shape]}", value))


class Loss:
    """A loss function, which knows how many labels its mean is over; `module` is itself, or None for a function."""

    def __init__(self, given: LossFunction | str) -> None:
        if isinstance(given, str):
            check_choice("loss", given, LOSSES)
            given = LOSSES[given]
        self.module = given if isinstance(given, nn.Module) else None
        if self.module is not None and any(parameter.requires_grad for parameter in self.module.parameters()):
            raise ConfigError(
                f"loss={type(given).__name__} has parameters, which nothing would train. Make it a part of the model, "
                "which then returns its loss."
            )
        of_classes = nn.CrossEntropyLoss() if given in (F.cross_entropy, F.nll_loss) else given
        self._of_classes = of_classes if isinstance(of_classes, nn.CrossEntropyLoss | nn.NLLLoss) else None
        self.is_of_classes = self._of_classes is not None
        self.ignore_index = IGNORED if self._of_classes is None else self._of_classes.ignore_index
        if type(of_classes).__module__ != nn.CrossEntropyLoss.__module__ and "forward" in vars(type(of_classes)):
            self._of_classes = None  # a forward of the user's may be a mean of something else
        self._function: LossFunction = given
        self._is_by_element = given in _BY_ELEMENT or type(given) in _BY_ELEMENT
        self._checks_classes = self._of_classes is not None  # at the first batch

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        if isinstance(targets, Tensor) and isinstance(outputs, Tensor):
            targets = self._fitting(outputs, targets)
        loss = self._function(outputs, targets)
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            raise HookError(f'loss= returned {shapes(loss)}, not a scalar. Use reduction="mean", or its mean().')
        return loss

    def labels_in(self, outputs: Any, targets: Any) -> Tensor | None:
        """The labels that the loss of a batch is a mean over, by the weights of their classes; None: its samples."""
        are_numbers = isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.shape != targets.shape
        if self._of_classes is None or self._of_classes.reduction != "mean" or not are_numbers:
            return None
        counts: Tensor = targets != self.ignore_index
        weight: Tensor | None = self._of_classes.weight
        return counts.sum() if weight is None else (weight[targets.long() * counts] * counts).sum()

    def _fitting(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Whole numbers of any width as class numbers, or as numbers to compare with."""
        if targets.dim() == 0 or (self._is_by_element and outputs.shape != targets.shape):
            raise DataError(
                f"the outputs are {shapes(outputs)} and the targets {shapes(targets)}, which loss= compares element by "
                "element. Give targets[:, None], or batches instead of samples."
            )
        if self._is_by_element and not targets.is_floating_point() and outputs.is_floating_point():
            return targets.to(outputs.dtype)
        if not self.is_of_classes or targets.is_floating_point() or targets.shape == outputs.shape:
            return targets
        targets = targets.long()
        if self._checks_classes and has_values(targets):  # on an accelerator a wrong one ends the process
            self._checks_classes = False
            counted, classes = targets[targets != self.ignore_index], outputs.shape[1]
            if counted.numel() and (counted.min() < 0 or counted.max() >= classes):
                raise DataError(
                    f"the targets go from {int(counted.min())} to {int(counted.max())}, and the model's outputs have "
                    f"{classes} classes. Count targets from 0, or use {self.ignore_index} for those that do not count."
                )
        return targets


def _parts(batch: Any, target: str) -> tuple[Any, Any]:
    """The inputs, and the target or None."""
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key != target}, batch.get(target)
    if isinstance(batch, tuple | list):
        return (batch[:-1], batch[-1]) if len(batch) > 1 else (batch, None)
    return batch, None


def scores(outputs: Any) -> Any:
    return outputs["logits"] if isinstance(outputs, Mapping) and "logits" in outputs else outputs


def _called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _own_loss(outputs: Any, model: nn.Module, batch: Any) -> Tensor:
    found = outputs
    if isinstance(outputs, Mapping):
        found = outputs.get("loss")
    elif isinstance(outputs, tuple | list) and outputs:
        found = outputs[0]
    if isinstance(found, Tensor) and found.dim() == 0:
        return found
    raise HookError(
        f"without loss= the model is to return its loss, and {type(model).__name__} returned none for a batch of "
        f'{shapes(batch)}. Give loss=; models of Hugging Face return theirs if the batch has "labels".'
    )


def values_of(result: Tensor | Mapping[str, Any], name: str) -> dict[str, Any]:
    if isinstance(result, Tensor):
        return {"loss": result}
    if isinstance(result, Mapping) and "loss" in result:
        return dict(result)
    raise HookError(f'{name} returned {shapes(result)}. Return the loss, or a dict with "loss" and what to log.')


# -- metrics


def accuracy(outputs: Tensor, targets: Tensor, loss: Loss | None = None) -> tuple[Tensor, Tensor]:
    """Share of the labels that count whose class has the highest score, and how many these are."""
    # The classes are dimension 1 in PyTorch's losses, and the last one in models that return their loss.
    dims = (-1, 1) if loss is None else (1,) if loss.is_of_classes else (1, -1)
    for dim in dims:
        if outputs.dim() > 1 and outputs.shape[dim] > 1 and outputs.select(dim, 0).shape == targets.shape:
            counts = targets != (IGNORED if loss is None else loss.ignore_index)
            count = counts.sum()
            return ((outputs.argmax(dim) == targets) & counts).sum() / count, count
    raise DataError(
        f'metrics=["accuracy"] needs scores [batch, classes, ...] and targets [batch, ...], and got {shapes(outputs)} '
        f"and {shapes(targets)}. Give a function: metrics={{'accuracy': lambda outputs, targets: ...}}."
    )


METRICS: dict[str, Callable[[Any, Any], Any]] = {"accuracy": accuracy, "mse": Loss("mse"), "mae": Loss("mae")}


class Metrics:
    """A validation's named metrics: `functions` are averaged over samples, `objects` (torchmetrics) are updated."""

    def __init__(self, given: Iterable[str] | Mapping[str, Any]) -> None:
        self.functions: dict[str, Callable[[Any, Any], Any]] = {}
        self.objects: Any = None
        if is_metric(given) and isinstance(given, nn.ModuleDict):  # a collection
            self.objects = given
            return
        if not isinstance(given, Mapping):
            check_names("metrics", given, example="accuracy")
            for name in given:
                check_choice("metrics", name, METRICS)
            given = {name: METRICS[name] for name in given}
        objects: dict[str, Any] = {name: metric for name, metric in given.items() if is_metric(metric)}
        self.functions = {name: metric for name, metric in given.items() if name not in objects}
        if objects:
            from torchmetrics import MetricCollection

            self.objects = MetricCollection(objects, compute_groups=False)

    def measure(self, found: Any, targets: Any, loss: Loss | None) -> Iterator[tuple[str, Any, Tensor | None]]:
        """Name, value, and labels that it is a mean over (None: samples) of each function; objects are updated."""
        if self and (targets is None or (isinstance(found, Tensor) and found.dim() == 0)):
            raise HookError(
                f"metrics= need outputs and targets, and got {shapes(found)} and {shapes(targets)}. Give val_step=, a "
                "function of (model, batch) that returns a dict of values."
            )
        if self.objects is not None:
            self.objects.update(found, targets)
        for name, function in self.functions.items():
            if function is accuracy:
                yield name, *accuracy(found, targets, loss)
            else:
                yield name, function(found, targets), None

    def __bool__(self) -> bool:
        return bool(self.functions) or self.objects is not None


Row = dict[str, float]
Scheduler = LRScheduler | ReduceLROnPlateau

READ_EVERY = 1000  # steps between reads of values on the device; an epoch may have any number
# Warnings for the author of a class, who builds models and loaders in hooks.
_EXPECTED = frozenset({"real weights", "no-val", "no checkpoint"})


@dataclass(kw_only=True)
class ObjectsConfig(DreamTrainerConfig):
    # descriptions of the objects, to distinguish runs; a run cannot be rebuilt from them
    given_objects: dict[str, Any] = field(default_factory=dict)


def in_words(value: Any) -> str | None:
    """A name as it is, and an object by its representation without its address."""
    return value if isinstance(value, str | None) else " ".join(repr(value).partition(" at 0x")[0].split())


@dataclass(frozen=True, kw_only=True)
class Given:
    model: nn.Module
    train: Any
    val: Any
    loss: Loss | None  # None: the model returns it
    target: str  # its name in batches that are dicts
    metrics: Metrics
    step: Step | None
    val_step: Step | None
    optimizer: Optimizer | OptimizerParameters | Callable[..., Optimizer]
    schedule: ScheduleParameters | Scheduler | Callable[[Any], Scheduler] | None
    schedule_unit: str
    monitor: str
    mode: Literal["min", "max"]


class ObjectsTrainer(DreamTrainer):
    config: ObjectsConfig

    def __init__(self, config: ObjectsConfig, given: Given) -> None:
        super().__init__(config)
        self.given, self.is_launched = given, False

    @override
    def warn_once(self, key: str, message: str) -> None:
        if key not in _EXPECTED:
            super().warn_once(key, message)

    @override
    def configure_models(self) -> None:
        self.is_launched = True
        self.model = self.given.model
        loss = self.given.loss
        if loss is not None and loss.module is not None:  # such as weights of classes
            loss.module.to(self.world.device)
        if not self.model.training:  # as from_pretrained returns it, which would train without dropout
            self.model.train()
        # Sharding replaces the parameters of an optimizer that is there already.
        is_built = isinstance(self.given.optimizer, Optimizer)
        self.names = {parameter: name for name, parameter in self.model.named_parameters()} if is_built else {}

    @override
    def configure_dataloaders(self) -> tuple[Any, Any]:
        return self.given.train, self.given.val

    @override
    def configure_optimizers(self) -> None:
        given = self.given.optimizer
        if isinstance(given, OptimizerParameters):
            self.optimizers = build_optimizers(given, self.model, blocks=self.model_blocks(self.model))
        elif isinstance(given, Optimizer):
            self.optimizers = [self._over_shards(given)]
        else:
            self.optimizers = [given([parameter for parameter in self.model.parameters() if parameter.requires_grad])]
        plain = {name: value for name, value in self.optimizers[0].defaults.items() if isinstance(value, int | float)}
        rate = plain.pop("lr", None)
        names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        self.config.given_objects |= {"optimizer": {"name": names} | plain, "lr": rate}

    def _over_shards(self, optimizer: Optimizer) -> Optimizer:
        now = dict(self.model.named_parameters())
        for group in optimizer.param_groups:
            parameters = [now.get(self.names.get(one, ""), one) for one in group["params"]]
            if optimizer.state and any(map(is_not, parameters, group["params"])):
                raise ConfigError(
                    f"optimizer= is of type {type(optimizer).__name__} and has stepped already, so its state cannot be "
                    "sharded. Give a new one, or device=DeviceParameters(dp_shard=1)."
                )
            group["params"] = parameters
        self.names.clear()  # they would keep the whole model alive
        return optimizer

    @override
    def configure_schedulers(self) -> None:
        given, schedule = self.given, self.given.schedule
        self.schedulers: list[Any] = []
        if isinstance(schedule, ScheduleParameters):
            if schedule.name == "plateau" and schedule.mode is None:
                schedule = replace(schedule, mode=given.mode)
            steps, in_epoch = self.total_steps, self.steps_per_epoch
            self.schedulers = [*build_schedules(schedule, self.optimizers, total_steps=steps, steps_per_epoch=in_epoch)]
        elif schedule is not None:
            self.schedulers = [schedule] if isinstance(schedule, Scheduler) else [*map(schedule, self.optimizers)]
        for scheduler in self.schedulers:
            if not isinstance(scheduler, Scheduler) or scheduler.optimizer not in self.optimizers:
                raise ConfigError(
                    f"schedule={given.schedule!r} is not a schedule of optimizer=. Give one of that optimizer, a "
                    "function of the optimizer, or a name."
                )
            if isinstance(scheduler, ReduceLROnPlateau) and (given.val is None or scheduler.mode != given.mode):
                raise ConfigError(
                    f"the schedule, with mode={scheduler.mode!r}, follows {given.monitor} of validations, which is "
                    f"better by {given.mode!r}. Give val=, and ReduceLROnPlateau(mode={given.mode!r})."
                )

    @override
    def configure_metrics(self) -> None:
        if self.given.metrics.objects is not None:
            self.metrics = self.given.metrics.objects

    # -- steps

    def _forward(self, batch: Any) -> tuple[Tensor, Any, Any, Tensor | None]:
        """The loss of a batch, what metrics get (outputs and targets), and the labels that the loss is a mean over."""
        loss, target = self.given.loss, self.given.target
        inputs, targets = _parts(batch, target)
        if loss is None:
            outputs = _called(self.model, batch)
            behind = [*outputs[1:2]] if isinstance(outputs, tuple | list) else []
            return _own_loss(outputs, self.model, batch), behind[0] if behind else scores(outputs), targets, None
        if targets is None:
            raise DataError(
                f"loss= needs a target, and there is none in a batch of {shapes(batch)}. Yield (inputs, target), or a "
                f"dict with {target!r} (target= names another), or give step=, a function of (model, batch)."
            )
        outputs = _called(self.model, inputs)
        return loss(outputs, targets), scores(outputs), targets, loss.labels_in(outputs, targets)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Each sample of a window counts the same, or each label if the loss is a mean over labels."""
        given, window, labels = self.given, self.accumulation_window, None
        if given.step is None:
            loss, _, _, labels = self._forward(batch)
            result: dict[str, Any] = {"loss": loss}
        else:
            result = {name: v for name, v in values_of(given.step(self.model, batch), "step").items() if v is not None}
        if labels is not None:
            window.weight = labels
        loaded = window.data
        are_several = loaded is None or loaded.size > 1 or loaded.is_uneven
        is_weighted = are_several or (labels is not None and self.world.dp_size > 1)
        self.backward(result.get("loss"), weight=window.weight if is_weighted else None)
        self.step(self.model, self.optimizers, self.scheduled("step"))
        return result

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any] | tuple[dict[str, Any], int]:
        given = self.given
        step = given.val_step or given.step
        if step is not None:
            return values_of(step(self.model, batch), "step" if given.val_step is None else "val_step")
        loss, outputs, targets, labels = self._forward(batch)
        result: dict[str, Any] = {"loss": loss}
        self.log("loss", loss, weight=labels)
        for name, value, counted in given.metrics.measure(outputs, targets, given.loss):
            self.log(name, value, weight=counted)
            result[name] = value
        return result, 0  # for listeners: it is logged already

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """The model's outputs of a batch, with or without its target; half precision as float32, which numpy has."""
        is_whole = self.given.loss is None and isinstance(batch, Mapping)
        found = scores(_called(self.model, batch if is_whole else _parts(batch, self.given.target)[0]))
        is_half = (torch.bfloat16, torch.float16)
        return map_tensors(lambda tensor: tensor.float() if tensor.dtype in is_half else tensor, found)

    def scheduled(self, unit: str) -> list[Any]:
        schedule = self.given.schedule
        own_unit = schedule.unit if isinstance(schedule, ScheduleParameters) else self.given.schedule_unit
        is_due = (own_unit == "epoch") == (unit == "epoch")
        return [one for one in self.schedulers if is_due and not isinstance(one, ReduceLROnPlateau)]


class Epochs(Callback):
    """Rows of exact means for each epoch, passed to `tell`; and schedules by epochs or a metric."""

    order = -100  # before callbacks that log or save learning rates

    def __init__(self, tell: weakref.WeakMethod[Callable[[int, Row], None]], *, prints: bool) -> None:
        self.rows: list[Row] = []
        self._tell, self._prints = tell, prints
        self._is_partial = False
        self._seconds = 0.0  # of this epoch, before the resume
        self._began = 0.0
        self._begin()

    def _begin(self) -> None:
        self._training = MetricBuffer()
        self._validation: dict[str, float] = {}
        # By batch, since a window may run again.
        self._window: dict[int, tuple[dict[str, Any], Tensor | float]] = {}

    # -- events

    @override
    def post_setup(self, trainer: AbstractTrainer) -> None:
        self._world = trainer.world
        self._began = time.monotonic()

    @override
    def pre_fit(self, trainer: AbstractTrainer) -> None:
        for optimizer in trainer.named_optimizers().values():
            optimizer.zero_grad()  # of a look at the loss before, for instance
        self._began = time.monotonic()
        if self._is_partial:
            self._is_partial = False
            self.rows.pop()

    @override
    def post_train_batch(self, trainer: AbstractTrainer, result: dict[str, Any], batch_idx: int) -> None:
        self._window[batch_idx] = result, trainer.accumulation_window.weight

    @override
    def post_train_step(self, trainer: AbstractTrainer) -> None:
        for result, weight in self._window.values():
            self._training.add_result(result, weight, "train/")
        self._window.clear()
        if trainer.progress.epoch_steps % READ_EVERY == 0:
            self._training.state_dict(trainer.world)

    @override
    def post_val_epoch(self, trainer: AbstractTrainer, metrics: dict[str, float]) -> None:
        if trainer.is_evaluating or trainer.is_sanity_validation:
            return
        assert isinstance(trainer, ObjectsTrainer)
        self._validation = dict(metrics)
        if trainer.config.training_parameters.val_every_n_steps is not None:
            self._print(trainer, trainer.current_epoch, format_metrics(metrics))
        for scheduler in trainer.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                refuse_missing(trainer.given.monitor, metrics, named_by="monitor")
                scheduler.step(metrics[trainer.given.monitor])

    @override
    def post_epoch(self, trainer: AbstractTrainer) -> None:
        assert isinstance(trainer, ObjectsTrainer)
        for scheduler in trainer.scheduled("epoch"):
            scheduler.step()
        row = self._complete(trainer, trainer.current_epoch - 1)
        self._begin()
        self._began, self._seconds = time.monotonic(), 0.0
        if (tell := self._tell()) is not None:
            tell(int(row["epoch"]), {name: value for name, value in row.items() if "/" in name})

    @override
    def post_fit(self, trainer: AbstractTrainer) -> None:
        if trainer.progress.epoch_steps > 0:
            self._complete(trainer, trainer.current_epoch)
            self._is_partial = True

    # -- state

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "rows": [dict(row) for row in self.rows[: len(self.rows) - self._is_partial]],
            "training": self._training.state_dict(self._world),
            "validation": self._validation,
            "seconds": self._seconds_of_epoch(),
        }

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begin()
        self.rows[:] = [dict(row) for row in state["rows"]]
        self._is_partial = False
        self._training.load_state_dict(state["training"], self._world)
        self._validation, self._seconds = dict(state["validation"]), state["seconds"]

    @override
    def begin_branch(self, *, new_counters: bool, new_data: bool) -> None:
        if new_counters:
            self.rows.clear()
        if new_counters or new_data:
            self._begin()
            self._seconds, self._began = 0.0, time.monotonic()

    def _seconds_of_epoch(self) -> float:
        """By rank 0's clock, since rows are the same on all ranks; a collective."""
        return float(self._world.broadcast_object(self._seconds + time.monotonic() - self._began))

    def _complete(self, trainer: AbstractTrainer, epoch: int) -> Row:
        optimizer = next(iter(trainer.named_optimizers().values()))
        seconds, rate = self._seconds_of_epoch(), float(optimizer.param_groups[0]["lr"])
        state = self._training.state_dict(self._world)
        metrics = self._training.reduce(self._world) | self._validation
        self._training.load_state_dict(state, self._world)  # an incomplete epoch continues
        row = {"epoch": epoch, "step": trainer.global_step, "seconds": seconds, "lr": rate} | metrics
        self.rows.append(row)
        numbers = "  ".join(f"{name} {format_number(value)}" for name, value in metrics.items())
        self._print(trainer, epoch, f"{numbers}  {seconds:.1f} s")
        return row

    def _print(self, trainer: AbstractTrainer, epoch: int, numbers: str) -> None:
        """`epoch 2/5  step 40/100  ...`."""
        if self._prints and trainer.world.is_main:
            epochs, steps = trainer.config.training_parameters.epoch_limit, trainer.total_steps
            counts = ("epoch", epoch + 1, epochs), ("step", trainer.global_step, steps)
            place = [f"{name} {done}" + (f"/{of}" if of and done <= of else "") for name, done, of in counts]
            show("  ".join([*place, numbers]).rstrip())
