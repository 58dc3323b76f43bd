"""EvalMixin: torchmetrics, best values, `evaluate()` and `predict()`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from dream_trainer.config.checkpoint_parameters import Mode
from dream_trainer.config.training_parameters import EvalConfigMixin, EvalParameters
from dream_trainer.errors import ConfigError, HookError
from dream_trainer.modules.metrics import ValidationMetrics
from dream_trainer.nested import concatenated, detach, to_device
from dream_trainer.trainer.abstract import AbstractTrainer
from dream_trainer.trainer.data_setup import batches_to_validate
from dream_trainer.trainer.event_table import tell_end
from dream_trainer.trainer.hooks import Hooks
from dream_trainer.trainer.session import failing_for_all, start
from dream_trainer.trainer.validation import in_step, validate, validation_mode


class EvalMixin(AbstractTrainer):
    """Validation beyond the loaders' means."""

    _config_class: ClassVar[type | None] = EvalConfigMixin

    @property
    def best(self) -> dict[str, float]:
        """Maps each of `eval_parameters.best_metrics` and the checkpoints' `best_metric` to its best value so far;
        NaN is never best."""
        return self._runtime.best.values

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """The prediction for one batch, without gradients and in eval mode. Required by `predict`."""
        raise HookError(
            f"{type(self).__name__} does not override predict_step. Return the prediction for a batch from it."
        )

    def evaluate(self, dataloader: Any = None) -> dict[str, float]:
        """Runs `validation_step` over `dataloader`, or over the configured validation loaders, and returns the metrics.

        Launches and sets up on the first call, a resume included, so that it evaluates the newest checkpoint. Nothing
        is logged. Metrics are exact over all samples and ranks.

        Args:
            dataloader: A loader, or a dict of named ones, as `configure_dataloaders` could return for validation.

        Raises:
            HookError: There is no validation_step, or nothing to evaluate on.
        """
        with failing_for_all(self._runtime):
            start(self._runtime)
            if type(self).validation_step is Hooks.validation_step:
                raise HookError(f"{type(self).__name__} does not override validation_step, which evaluate() runs.")
            is_own_data, limit = dataloader is None, None
            if is_own_data:
                batches = self._runtime.data.validation
                limit = self._runtime.config.training_parameters.val_steps_per_epoch
            else:
                named = dataloader if isinstance(dataloader, Mapping) else {"": dataloader}
                batches = {name: batches_to_validate(self._runtime, loader) for name, loader in named.items()}
            if not batches:
                raise HookError("there is no validation loader. Pass evaluate(dataloader), or configure one.")
            # A listener to an evaluation's end may evaluate too.
            state = self._runtime.state
            was_evaluating, state.is_evaluating = state.is_evaluating, True
            try:
                metrics = validate(self._runtime, batches, limit, hears_signals=False)
                tell_end(self._runtime, "post_val_epoch", metrics)
            finally:
                state.is_evaluating = was_evaluating
                for loader in () if is_own_data else batches.values():
                    loader.close()
            return metrics

    def predict(self, dataloader: Any = "val") -> Any:
        """Runs `predict_step` over `dataloader` and returns the results on the CPU, in the data's order, on every rank.

        Tensors of all batches are joined along the first dimension, in the structure that `predict_step` returns. If
        their later dimensions differ, they are a list of batches' tensors, with a warning; so are results of other
        types.

        Args:
            dataloader: A DistributedDataLoader or plain DataLoader, whose samples are split over the ranks; "val": the
                configured validation loader, "val/NAME": that of this name.

        Raises:
            HookError: `predict_step` is not overridden, or there is no such validation loader.
        """
        with failing_for_all(self._runtime):
            start(self._runtime)
            local_results: list[Any] = []
            if isinstance(dataloader, str):
                named = {f"val/{key}" if key else "val": loader for key, loader in self.val_dataloaders.items()}
                if dataloader not in named:
                    raise HookError(
                        f"predict({dataloader!r}) names no validation loader. Use one of {sorted(named)}, or a loader."
                    )
                dataloader = named[dataloader]
            batches = batches_to_validate(self._runtime, dataloader)
            predict_step = self._wrap_step(self.predict_step)
            with validation_mode(self._runtime), self._validation_context(), self._runtime.parallel.whole():
                own_batches = in_step(self._runtime, batches, None, hears_signals=False)
                for batch_idx, (batch, is_padding) in enumerate(own_batches):
                    result = predict_step(self.move_batch(batch, self.world.device), batch_idx)
                    if not is_padding:
                        local_results.append(to_device(detach(result), torch.device("cpu")))
            batches.close()
            results_of_ranks = self.world.all_gather_object(local_results if self.world.counts_samples else None)
            ranks = [results for results in results_of_ranks if results is not None]
            longest = max(len(results) for results in ranks)
            in_order = [results[index] for index in range(longest) for results in ranks if index < len(results)]
            uneven = "predict() returns a list of batches' tensors: later dimensions differ. Pad samples to one length."
            return concatenated(in_order, lambda _: self.warn_once("uneven", uneven))

    def _finish_setup(self) -> None:
        super()._finish_setup()
        self.__metrics = ValidationMetrics(self.named_metrics, self.world, self.warn_once)
        self._runtime.validation_metrics = self.__metrics
        parameters: EvalParameters = self._runtime.config.eval_parameters
        modes = self._best_modes()
        for name, mode in parameters.best_metrics.items():
            if modes[name] != mode and parameters != EvalParameters():  # not for the default metrics
                raise ConfigError(
                    f"best_metrics has {name}={mode!r}, and checkpoint_parameters.best_metric keeps those where it is "
                    f"best by {modes[name]!r}. Set best_metrics or best_mode, so that both say the same."
                )

    @contextmanager
    def _validation_context(self) -> Iterator[None]:
        with self.__metrics.validation(), super()._validation_context():
            yield

    def _validated(self, metrics: dict[str, float]) -> None:
        super()._validated(metrics)
        parameters = self._runtime.config.eval_parameters
        missing = sorted(parameters.best_metrics.keys() - metrics.keys())
        if missing and parameters != EvalParameters():  # not for the default metrics
            self.warn_once(
                "best_metrics",
                f"best_metrics names {missing}, which the validation did not give. It gave {sorted(metrics)}.",
            )

    def _best_modes(self) -> dict[str, Mode]:
        known = super()._best_modes()  # the checkpoints' own metric comes first
        return known | dict(self._runtime.config.eval_parameters.best_metrics) | known
