"""EMA: an exponential moving average of the weights, beside the ones that train.

Averages late in training generalise better than the last weights (Polyak and Juditsky 1992, "Acceleration of Stochastic
Approximation by Averaging"). Each rank averages the shards it holds, so nothing is gathered or communicated, and memory
grows by one more copy of the trained parameters, divided over the ranks as they are.

    post_optimizer_step   which models have stepped; nothing is computed
    post_train_step       the window is complete: average += (1 - decay) * (weight - average), once
    validation_context    the averages stand in for the weights, and the weights come back however it ends

Checkpoints keep averages as tensors of their own, never in place of the model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from dream_trainer.callbacks.base import Callback
from dream_trainer.callbacks.model_average import ModelAverage
from dream_trainer.checkpoint.model_state import parameter_fqns
from dream_trainer.errors import CheckpointError, ConfigError, HookError, StepError

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer


class EMA(Callback):
    """Keeps an exponential moving average of the weights, validates with it, and saves it with the checkpoints.

    Averaged are the floating-point parameters that require gradients when setup ends. Everything else, BatchNorm's
    statistics for instance, is the model's own, also while the averages stand in. Parameters narrower than 32 bits are
    averaged in float32, where steps of `1 - decay` do not vanish.

    The average starts from the weights that training starts from. It moves once after an accumulation window whose step
    changed the model, however many micro-batches, optimizers or `step` calls the window had, and not after a step that
    was skipped. Nothing waits for the device.

    Args:
        decay: Share of the average that an update keeps; between 0 and 1.
        models: Names of the models to average; None for all that an optimizer trains.
        every_n_steps: Optimizer steps (`global_step`) between two updates. `decay` is per update.
        warm_up: Whether update n = 0, 1, ... keeps only `min(decay, (1 + n) / (10 + n))`, as TensorFlow's
            `ExponentialMovingAverage` does with `num_updates`, so that the first weights are soon forgotten.
        validate: Whether validations, `evaluate` and `predict` see the averages instead of the weights. They need
            memory for the weights meanwhile.

    Raises:
        ConfigError: A value cannot work; when setup ends, also if `models` names none that is trained, or if two EMAs
            would validate one model.

    Example:
        ```python
        ema = EMA(0.999)
        config = DreamTrainerConfig(..., callbacks=CallbackCollection([ema]))
        trainer.fit()
        with ema.averaged_weights():
            torch.save(trainer.model.state_dict(), "averaged.pt")
        ```
    """

    def __init__(
        self,
        decay: float = 0.999,
        *,
        models: Sequence[str] | None = None,
        every_n_steps: int = 1,
        warm_up: bool = True,
        validate: bool = True,
    ) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"decay={decay} is not in [0, 1). Use 0.999, or nearer to 1 for longer averages.")
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ConfigError(f"every_n_steps={every_n_steps!r} is not a positive integer. Use 1 for every step.")
        if isinstance(models, str):
            raise ConfigError(f"models={models!r} is a string. Pass a list of names: models=[{models!r}].")
        self.decay = decay
        self.models = None if models is None else tuple(models)
        self.every_n_steps = every_n_steps
        self.warm_up = warm_up
        self.validate = validate
        self._averages: dict[str, ModelAverage] = {}
        self._owned: dict[tuple[Optimizer, int], list[ModelAverage]] = {}
        self._in_use: set[str] = set()
        # Until training starts or a checkpoint gives them back, the averages are whatever the weights are.
        self._has_started = self._was_given_back = False
        self._trainer: AbstractTrainer | None = None

    # -- what the user calls

    def averaged(self, model_name: str) -> dict[str, Tensor]:
        """The averages of one model by parameter name, sharded as its parameters; of tied ones the first name.

        They are those that training goes on to change: clone what is to stay.

        Raises:
            HookError: The trainer is not set up yet.
            KeyError: No model of that name is averaged.
        """
        self._catch_up()
        if model_name not in self._averages:
            raise KeyError(f"no averages of {model_name!r}; averaged are {list(self._averages)}.")
        return dict(self._averages[model_name].averages)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside, the averaged models hold their averages: to evaluate or export them by hand. Called by every rank.

        The weights come back at the end, whatever happens. Inside, nothing can be trained, saved or resumed.

        Raises:
            HookError: The trainer is not set up yet.
            StepError: Called inside an accumulation window.
        """
        trainer = self._set_up_trainer()
        trainer._refuse_inside_window("averaged_weights")
        with self._standing_in(trainer, self._averages.keys() - self._in_use):
            yield

    # -- events

    def post_setup(self, trainer: AbstractTrainer) -> None:
        """Allocates the averages.

        Raises:
            ConfigError: `models` names one that is not trained, or another EMA validates one of these models too.
        """
        self._trainer = trainer
        found = trainer.named_models()
        trained = {name: parameters for name, model in found.items() if (parameters := _trained(trainer, name, model))}
        chosen = tuple(trained) if self.models is None else self.models
        lacking = [name for name in chosen if name not in trained]
        if lacking or not chosen:
            raise ConfigError(
                f"EMA(models={self.models}): {lacking or 'no model'} has parameters that an optimizer trains. "
                f"Trained are {list(trained)}."
            )
        self._averages = {name: ModelAverage(trained[name]) for name in chosen}
        self._refuse_two_validating(trainer)

    def pre_fit(self, trainer: AbstractTrainer) -> None:
        """Takes the weights that training starts from, unless the averages were resumed."""
        self._catch_up()
        self._has_started = True

    def post_optimizer_step(self, trainer: AbstractTrainer, model: nn.Module, optimizer: Optimizer) -> None:
        """Notes which models the optimizer has changed; another one may change them too before the window ends.

        Raises:
            StepError: The averages stand in for the weights.
        """
        if self._in_use:
            raise StepError("an optimizer has stepped inside averaged_weights(). Leave the `with` before training on.")
        for average in self._owned_by(trainer, optimizer):
            average.note_step(trainer._accumulation.maybe_skipped)

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        """Moves the averages of the models that have stepped."""
        self._catch_up()

    def validation_context(self, trainer: AbstractTrainer) -> AbstractContextManager[None]:
        """The averages stand in for the weights, except in models whose averages somebody chose by hand."""
        if not self.validate:
            return nullcontext()
        taken = {name for other in _all_of(trainer) for name in other._in_use}
        return self._standing_in(trainer, self._averages.keys() - taken)

    # -- state

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The averages as `<model>.<parameter>`.

        Raises:
            CheckpointError: The averages stand in for the weights, which would be saved as the model.
        """
        if self._in_use:
            raise CheckpointError(
                "a checkpoint would hold the averages as the model's weights here. Save and load it outside of "
                "averaged_weights() and of validations."
            )
        if self._has_started:  # else a resume, which asks for them too, would find its tensors written over
            self._catch_up()
        return {f"{name}.{fqn}": tensor for name, own in self._averages.items() for fqn, tensor in own.averages.items()}

    def state_dict(self) -> dict[str, Any]:
        """How often each model's averages have moved."""
        if self._averages:
            self._catch_up()
        updates = {name: average.count() for name, average in self._averages.items()}
        return {"has_started": self._has_started, "updates": updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the counts back, after the tensors were loaded."""
        if state["has_started"]:
            for name, average in self._averages.items():
                average.resume(state["updates"][name])
            self._has_started = self._was_given_back = True

    def on_load(self, trainer: AbstractTrainer, path: Path) -> None:
        """Starts anew from the loaded weights if the checkpoint had no averages."""
        if not self._was_given_back:
            self._has_started = False
        self._was_given_back = False

    # -- the parts

    def _set_up_trainer(self) -> AbstractTrainer:
        if self._trainer is None:
            raise HookError("EMA has averages from post_setup on. Call it after fit() or evaluate() has set up.")
        return self._trainer

    def _catch_up(self) -> None:
        """Brings the averages to where training is: a checkpoint may be asked for before `post_train_step` comes."""
        trainer = self._set_up_trainer()
        for average in self._averages.values():
            if not self._has_started:
                average.start()
            elif average.has_stepped and not trainer._accumulation.is_open:
                average.has_stepped = False
                if trainer.global_step % self.every_n_steps == 0:
                    average.update(self.decay, warm_up=self.warm_up)

    @contextmanager
    def _standing_in(self, trainer: AbstractTrainer, names: set[str]) -> Iterator[None]:
        self._catch_up()
        chosen = [self._averages[name] for name in self._averages if name in names]
        # A checkpoint may still be copying the weights, and a gathered parameter would keep its old values.
        trainer._before_update()
        trainer._reshard()
        weights = [average.clone_weights() for average in chosen]
        self._in_use |= names
        try:
            for average in chosen:
                average.set_weights(average.locals)
            yield
        finally:
            trainer._reshard()
            for average, own in zip(chosen, weights, strict=True):
                average.set_weights(own)
            self._in_use -= names

    def _owned_by(self, trainer: AbstractTrainer, optimizer: Optimizer) -> list[ModelAverage]:
        """The averages of the models that `optimizer` trains; looked for again when it is given a group."""
        key = (optimizer, len(optimizer.param_groups))
        if key not in self._owned:
            models = trainer.named_models()
            self._owned[key] = [
                average
                for name, average in self._averages.items()
                if optimizer in trainer.get_optimizers_by_model(models[name])
            ]
        return self._owned[key]

    def _refuse_two_validating(self, trainer: AbstractTrainer) -> None:
        for other in _all_of(trainer):
            both = self._averages.keys() & other._averages.keys()
            if other is not self and both and self.validate and other.validate:
                raise ConfigError(
                    f"two EMAs would validate {sorted(both)}, and only one can. Pass validate=False to the others, "
                    "and evaluate those inside their averaged_weights()."
                )


def _trained(trainer: AbstractTrainer, name: str, model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters to average, by name; none if no optimizer trains the model."""
    if not trainer.get_optimizers_by_model(model):
        return {}
    return {
        fqn.removeprefix(f"{name}."): parameter
        for parameter, fqn in parameter_fqns({name: model}).items()
        if isinstance(parameter, nn.Parameter) and parameter.requires_grad and parameter.is_floating_point()
    }


def _all_of(trainer: AbstractTrainer) -> list[EMA]:
    return [callback for callback in trainer.callbacks if isinstance(callback, EMA)]
