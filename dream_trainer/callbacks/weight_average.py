"""EMA (Polyak and Juditsky 1992) and SWA (Izmailov et al. 2018, arXiv:1803.05407): averages of the weights, in addition
to the training weights. Each rank averages its shards, without communication; checkpoints keep averages as separate
tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from dream_trainer.checkpoint.model_state import parameter_fqns
from dream_trainer.checkpoint.saver import HostCopies
from dream_trainer.checkpoint.store import load_tensors, tensor_metadata
from dream_trainer.checks import check_between, check_names
from dream_trainer.compat.pytorch import foreach_copy_, foreach_lerp_, local_tensor, local_tensors, with_local
from dream_trainer.config.parameter_class import PositiveInt, check_fields, is_ours
from dream_trainer.distributed.ranks import on_all_ranks
from dream_trainer.errors import CheckpointError, ConfigError, HookError, StepError
from dream_trainer.events.callback import AveragingCallback
from dream_trainer.events.collection import numbered
from dream_trainer.parallel.sharding import ARE_GATHERED
from dream_trainer.trainer.abstract import AbstractTrainer
from dream_trainer.trainer.state_registry import CALLBACK_PREFIX

_AMOUNT = "amount"  # of copies to the host, in addition to the weights, whose names begin with "weight "


class ModelAverage:
    """The averages of one model, under the same names and layouts, and their history."""

    def __init__(self, parameters: Mapping[str, Tensor], averages: Mapping[str, Tensor] | None = None) -> None:
        self._parameters = parameters
        if averages is None:
            averages = {name: torch.empty_like(p.detach(), dtype=wide(p.dtype)) for name, p in parameters.items()}
        self.averages = dict(averages)
        self.has_stepped = False
        self.updates: int | Tensor = 0  # so far: a tensor if only the device knows, since it may have left some out
        self._skipped: Tensor | None = None  # the flag of the step, if only the device knows whether it was skipped

    def will_move(self) -> bool:
        """Whether the model has changed since the averages last moved. Waits for the device if only it knows."""
        return self.has_stepped and (self._skipped is None or not bool(self._skipped))

    def start(self) -> None:
        self.resume(updates=0)
        self.copy()

    @torch.no_grad()
    def copy(self) -> None:
        foreach_copy_(self.locals(), self.weights())

    def resume(self, updates: int, *, has_stepped: bool = False) -> None:
        self.updates, self.has_stepped, self._skipped = updates, has_stepped, None

    def note_step(self, skipped: Tensor | None) -> None:
        """The model has stepped, unless `skipped` is nonzero; it counts if any step since the last update was taken."""
        if not self.has_stepped:
            self.has_stepped = True
            self._skipped = None if skipped is None else skipped.clone()
        elif self._skipped is not None:
            self._skipped = None if skipped is None else self._skipped * skipped

    @torch.no_grad()
    def update(self, share: Callable[[Any], Any]) -> None:
        """Moves the averages towards the weights, if these have changed, by `share(updates)`: a number, or 0-dim."""
        self.has_stepped = False
        moves: int | Tensor = 1
        if self._skipped is not None:
            # never read on the host; MPS has no float64
            moves = (self._skipped == 0).to(torch.float32 if self._skipped.device.type == "mps" else torch.float64)
        amount = share(self.updates) * moves
        self.updates = self.updates + moves
        self._move(amount)

    def settle(self) -> None:
        """Brings the averages to where the last update left them, if that is still under way."""

    def _move(self, amount: float | Tensor) -> None:
        move_towards(self.locals(), self.weights(), amount)

    @torch.no_grad()
    def set_weights(self, values: list[Tensor]) -> None:
        foreach_copy_(self.weights(), values)

    def locals(self) -> list[Tensor]:
        return local_tensors(list(self.averages.values()))

    def weights(self) -> list[Tensor]:
        # Asked for each time: FSDP2 may give a parameter another local tensor at the first forward.
        return local_tensors(list(self._parameters.values()))


def trained_parameters(name: str, model: nn.Module) -> dict[str, Tensor]:
    """Maps names to a model's floating-point parameters that require gradients; tied ones have their first name."""
    return {
        fqn.removeprefix(f"{name}."): parameter
        for parameter, fqn in parameter_fqns({name: model}).items()
        if parameter.requires_grad and parameter.is_floating_point()
    }


def move_towards(averages: list[Tensor], weights: list[Tensor], share: float | Tensor) -> None:
    """`average += share * (weight - average)`, in place."""
    alike: tuple[list[Tensor], list[Tensor]] = [], []
    for average, weight in zip(averages, weights, strict=True):
        if average.dtype == weight.dtype:
            alike[0].append(average)
            alike[1].append(weight)
        else:  # one at a time, so that only one is ever held in both widths
            average.lerp_(weight.to(average.dtype), share.to(average.dtype) if isinstance(share, Tensor) else share)
    if not alike[0]:
        return
    if isinstance(share, Tensor):
        foreach_lerp_(*alike, [share.to(average.dtype) for average in alike[0]])
    else:
        foreach_lerp_(*alike, share)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that weights of this type are averaged in."""
    return torch.float32 if dtype.itemsize < 4 else dtype


class HostAverage(ModelAverage):
    """The averages of one model's shards on the CPU; the copy of an update is applied when the next one comes."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        on_host = {}
        for name, parameter in parameters.items():
            local = local_tensor(parameter.detach())
            empty = torch.empty(local.shape, dtype=wide(local.dtype), device="cpu")
            on_host[name] = with_local(parameter.detach(), empty)
        super().__init__(parameters, on_host)
        self._copies: HostCopies | None = None
        self._copied: dict[str, Tensor] = {}
        self._amount: float | Tensor = 0.0

    def resume(self, updates: int, *, has_stepped: bool = False) -> None:
        super().resume(updates, has_stepped=has_stepped)
        self._copied = {}

    @torch.no_grad()
    def settle(self) -> None:
        if self._copies is None or not self._copied:
            return
        self._copies.wait()
        amount = self._copied.pop(_AMOUNT, self._amount)
        weights, self._copied = local_tensors(list(self._copied.values())), {}
        move_towards(self.locals(), weights, amount)

    def _move(self, amount: float | Tensor) -> None:
        self.settle()
        if self._copies is None:
            self._copies = HostCopies(self.weights()[0].device)
        tensors = {f"weight {name}": parameter for name, parameter in self._parameters.items()}
        if isinstance(amount, Tensor):
            tensors[_AMOUNT] = amount
        self._amount = amount
        # All in order with the device's other work: the next step may change the weights right away.
        copied = self._copies.copy(tensors, at_once=tensors)
        self._copied = {name: copied[name] for name in tensors}


@dataclass(eq=False, repr=False, kw_only=True)
class WeightAverage(AveragingCallback):
    """An average of the weights, separate from the training weights: an interface. Use `EMA` or `SWA`."""

    models: Annotated[Sequence[str], partial(check_names, example="model")] | None = None
    validate: bool = True
    _follows_at_first: ClassVar[bool] = False  # whether averages are the weights of now until their time has come

    def __post_init__(self) -> None:
        check_fields(self, next(filter(is_ours, type(self).__mro__)))
        self._averages: dict[str, ModelAverage] = {}
        self._in_use: set[str] = set()
        self._trainer: AbstractTrainer | None = None

    # -- the rule

    @abstractmethod
    def share(self, updates: Any) -> Any:
        """By how much the averages move towards the weights, between 0 and 1."""

    @abstractmethod
    def is_due(self, trainer: AbstractTrainer) -> bool:
        """Whether the averages move after the window just completed."""

    def _new_average(self, parameters: Mapping[str, Tensor]) -> ModelAverage:
        return ModelAverage(parameters)

    # -- called by the user

    def averaged(self, model_name: str) -> dict[str, Tensor]:
        """Maps one model's parameter names to averages, sharded like its parameters; tied ones have their first name.
        Training keeps changing these tensors: clone those that should stay."""
        self._catch_up()
        if model_name not in self._averages:
            raise KeyError(f"no averages of {model_name!r}; averaged are {list(self._averages)}.")
        return dict(self._averages[model_name].averages)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside, the averaged models hold their averages, to evaluate or export them. Every rank must call it.

        Weights and buffers are always restored at the end. Inside, nothing can be trained, saved or resumed.

        Raises:
            HookError: The trainer is not set up yet.
            StepError: Called inside an accumulation window.
        """
        trainer = self._set_up_trainer()
        if trainer.accumulation_window.is_open:
            raise StepError(
                "averaged_weights() was called inside an accumulation window. Call it in post_train_step or later."
            )
        names = self._averages.keys() - self._in_use
        buffers = {buffer: buffer.clone() for name in names for buffer in trainer.named_models()[name].buffers()}
        with self._standing_in(trainer, names):
            try:
                yield
            finally:
                for buffer, former in buffers.items():
                    buffer.copy_(former)

    # -- weights from a checkpoint

    def load_as_weights(self, checkpoint: Path) -> bool:
        """Loads a checkpoint's averages, also into the models; returns whether it has any. A collective."""
        trainer = self._set_up_trainer()
        own = next(name for name, callback in numbered(trainer.callbacks) if callback is self)
        averages = {f"{CALLBACK_PREFIX}{own}.{name}": tensor for name, tensor in self.checkpoint_tensors().items()}
        stored = on_all_ranks(trainer.world, f"load {checkpoint}", lambda: tensor_metadata(checkpoint))
        has_averages = any(name in stored for name in averages)
        if has_averages:
            load_tensors(checkpoint, averages, world=trainer.world, optional_prefix="")
        with trainer.changing_weights():
            for average in self._averages.values():
                if has_averages:
                    average.resume(int(average.updates))
                    average.set_weights(average.locals())
                else:
                    average.start()
        return has_averages

    # -- events

    def post_setup(self, trainer: AbstractTrainer) -> None:
        self._trainer = trainer
        trained = {
            name: parameters
            for name, model in trainer.named_models().items()
            if trainer.get_optimizers_by_model(model) and (parameters := trained_parameters(name, model))
        }
        chosen = tuple(trained) if self.models is None else self.models
        lacking = [name for name in chosen if name not in trained]
        if lacking or not chosen:
            raise ConfigError(
                f"{type(self).__name__}(models={self.models}): no optimizer trains "
                f"{', '.join(map(repr, lacking)) or 'any model'}. Trained are {list(trained)}."
            )
        self._averages = {name: self._new_average(trained[name]) for name in chosen}
        self._owned: dict[tuple[Optimizer, int], list[ModelAverage]] = {}
        # Until training starts or a checkpoint restores them, the averages equal the weights.
        self._has_started = self._was_given_back = False
        for other in averages_of(trainer):
            both = self._averages.keys() & other._averages.keys()
            if other is not self and both and self.validate and other.validate:
                raise ConfigError(
                    f"two averages would validate {sorted(both)}, and only one can. Pass validate=False to the others, "
                    "and evaluate those inside their averaged_weights()."
                )

    def pre_fit(self, trainer: AbstractTrainer) -> None:
        """Takes the weights that training starts from, unless the averages were resumed."""
        self._catch_up()
        self._has_started = True

    def post_optimizer_step(self, trainer: AbstractTrainer, model: nn.Module, optimizer: Optimizer) -> None:
        if self._in_use:
            raise StepError("an optimizer has stepped inside averaged_weights(). Leave the `with` before training on.")
        key = (optimizer, len(optimizer.param_groups))  # its models are looked for again when it is given a group
        if key not in self._owned:
            models = trainer.named_models()
            self._owned[key] = [
                average
                for name, average in self._averages.items()
                if optimizer in trainer.get_optimizers_by_model(models[name])
            ]
        for average in self._owned[key]:
            average.note_step(trainer.accumulation_window.step_was_skipped)

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        if self.is_due(trainer):
            self._move_those_due()

    def validation_context(self, trainer: AbstractTrainer) -> AbstractContextManager[None]:
        """The averages replace the weights, except in models whose averages were chosen by hand."""
        if not self.validate:
            return nullcontext()
        in_use = {name for other in averages_of(trainer) for name in other._in_use}
        return self._standing_in(trainer, self._averages.keys() - in_use)

    # -- state

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The averages as `<model>.<parameter>`."""
        if self._in_use:
            raise CheckpointError(
                "a checkpoint would hold the averages as the model's weights here. Save and load it outside of "
                "averaged_weights() and of validations."
            )
        # Not brought up to date here: for a save, state_dict has done so before they are copied. A resume asks for
        # them too, and must not change what it has just loaded.
        return {
            f"{name}.{fqn}": tensor
            for name, average in self._averages.items()
            for fqn, tensor in average.averages.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """How often each model's averages have moved, and which are due."""
        if self._averages:
            self._catch_up()
        return {
            "has_started": self._has_started,
            "updates": {name: int(average.updates) for name, average in self._averages.items()},
            "has_stepped": {name: average.will_move() for name, average in self._averages.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the counts back, after the tensors were loaded."""
        if state["has_started"]:
            for name, average in self._averages.items():
                has_stepped = state.get("has_stepped", {}).get(name, False)
                average.resume(state["updates"][name], has_stepped=has_stepped)
            self._has_started = self._was_given_back = True

    def on_load(self, trainer: AbstractTrainer, path: Path) -> None:
        """Starts again from the loaded weights if the checkpoint had no averages."""
        if not self._was_given_back:
            self._has_started = False
        self._was_given_back = False

    # -- the parts

    def _set_up_trainer(self) -> AbstractTrainer:
        if self._trainer is None:
            name = type(self).__name__
            raise HookError(f"{name} has averages from post_setup on. Call it after fit() or evaluate() has set up.")
        return self._trainer

    def _catch_up(self) -> None:
        """Brings the averages to where training is: a checkpoint may be asked for before `post_train_step` comes."""
        self._move_those_due()
        for average in self._averages.values():
            average.settle()

    def _move_those_due(self) -> None:
        trainer = self._set_up_trainer()
        may_move = not trainer.accumulation_window.is_open and self.is_due(trainer)
        for average in self._averages.values():
            if self._has_started and may_move and average.has_stepped:
                average.update(self.share)
            elif not self._has_started:
                average.start()
            elif self._follows_at_first and average.updates == 0:
                average.copy()

    @contextmanager
    def _standing_in(self, trainer: AbstractTrainer, names: set[str]) -> Iterator[None]:
        whole = [name for name in names if trainer.named_models()[name] in ARE_GATHERED]
        if whole:
            raise StepError(
                f"averages were to stand in for the weights of {', '.join(sorted(whole))} inside gathered(), which has "
                "copies of the weights. Evaluate outside of it, or enter gathered() inside averaged_weights()."
            )
        chosen = [self._averages[name] for name in self._averages if name in names]
        with trainer.changing_weights():
            self._catch_up()
            weights = [[weight.detach().clone() for weight in average.weights()] for average in chosen]
            self._in_use |= names
            for average in chosen:
                average.set_weights(average.locals())
        try:
            yield
        finally:
            with trainer.changing_weights():
                for average, former_weights in zip(chosen, weights, strict=True):
                    average.set_weights(former_weights)
            self._in_use -= names


def averages_of(trainer: AbstractTrainer) -> list[WeightAverage]:
    return [callback for callback in trainer.callbacks if isinstance(callback, WeightAverage)]


@dataclass(eq=False, repr=False)
class EMA(WeightAverage):
    """Keeps an exponential moving average of the weights, validates with it, and saves it with the checkpoints.

    Averages cover the floating-point parameters that require gradients when setup ends, narrow ones in float32.
    Everything else, such as BatchNorm's statistics, stays the model's own, also while averages replace the weights.
    The average starts from the weights that training starts from, and moves at most once per accumulation window, if
    the model has changed since.

    Args:
        decay: Share of the average that an update keeps; between 0 and 1.
        models: Names of the models to average. None for all that an optimizer trains.
        every_n_steps: Optimizer steps (`global_step`) between two updates. `decay` is per update.
        warm_up: Whether update n = 0, 1, ... keeps only `min(decay, (1 + n) / (10 + n))`, as TensorFlow's
            `ExponentialMovingAverage` does with `num_updates`, so that the first weights are soon forgotten.
        validate: Whether validations, `evaluate` and `predict` see the averages instead of the weights, so that
            `val/*` metrics belong to the averages. This needs memory to keep the weights.
        device: "cpu" keeps the averages in host memory. None keeps them on the weights' device. With "cpu" each update
            copies the weights to the host without waiting, and the host computes the average while the device works.

    Raises:
        ConfigError: A value is invalid; at the end of setup, also if `models` names none that is trained, or if two
            averages would validate one model.

    Example:
        ```python
        ema = EMA(0.999)
        config = DreamTrainerConfig(..., callbacks=[ema])
        trainer.fit()
        with ema.averaged_weights():
            torch.save(trainer.model.state_dict(), "averaged.pt")
        ```
    """

    export_name: ClassVar[str] = "ema"

    decay: Annotated[float, partial(check_between, low=0.0, high=1.0, below=True)] = 0.999
    _: KW_ONLY
    every_n_steps: PositiveInt = 1
    warm_up: bool = True
    device: Literal["cpu"] | None = None

    def share(self, updates: Any) -> Any:
        if not self.warm_up:
            return 1.0 - self.decay
        keep = (1 + updates) / (10 + updates)
        return 1.0 - (keep.clamp(max=self.decay) if isinstance(keep, Tensor) else min(keep, self.decay))

    def _new_average(self, parameters: Mapping[str, Tensor]) -> ModelAverage:
        return HostAverage(parameters) if self.device == "cpu" else ModelAverage(parameters)

    def is_due(self, trainer: AbstractTrainer) -> bool:
        # A branch with new counters may bring steps along to its step 0 that the averages have not moved by.
        return trainer.global_step > 0 and trainer.global_step % self.every_n_steps == 0


@dataclass(eq=False, repr=False)
class SWA(WeightAverage):
    """Keeps the mean of the weights after `start` steps or epochs and every `every` from there on.

    Until `start` the averages are the current weights, also for validations, checkpoints and exports. Everything else
    is as for `EMA`. BatchNorm's statistics belong to the weights that trained: compute them again inside
    `averaged_weights` by `torch.optim.swa_utils.update_bn`.

    Args:
        start: Steps or epochs completed when the first weights are taken; at least 1.
        every: Steps or epochs between two; at least 1.
        unit: "epochs", or "steps" for optimizer steps (`global_step`).
        models: As for `EMA`.
        validate: As for `EMA`, with its errors.

    Example:
        ```python
        swa = SWA(start=8, models=["model"])  # of 10 epochs, the mean of those after 8, 9 and 10
        trainer.fit()
        with swa.averaged_weights():
            torch.optim.swa_utils.update_bn(loader, trainer.model)
            trainer.export("averaged")
        ```
    """

    export_name: ClassVar[str] = "swa"
    _follows_at_first: ClassVar[bool] = True

    start: PositiveInt
    _: KW_ONLY
    every: PositiveInt = 1
    unit: Literal["epochs", "steps"] = "epochs"

    def share(self, updates: Any) -> Any:
        return 1.0 / (updates + 1)

    def is_due(self, trainer: AbstractTrainer) -> bool:
        done = trainer.global_step
        if self.unit == "epochs":
            owed = trainer.progress.owed
            if owed is None or not owed.epoch_ended:
                return False
            done = trainer.current_epoch + 1  # counted when its validation is over
        return done >= self.start and (done - self.start) % self.every == 0
