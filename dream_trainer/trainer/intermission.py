"""What happens between two windows: log, validate, end the epoch, save; in this order and on all ranks alike.

A signal may end a validation in its midst, an exception any of it. What is left undone then is written into the
checkpoint, and a resumed run does it first.
"""

from __future__ import annotations

import math

from dream_trainer.compat.pytorch import write_count
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.distributed.signals import Interrupted
from dream_trainer.errors import StepError
from dream_trainer.trainer.abstract import AbstractTrainer
from dream_trainer.trainer.agreement import Agreement
from dream_trainer.trainer.schedule import Schedule, limits
from dream_trainer.trainer.validation import validate

WINDOWS_WITHOUT_STEP = 100
"""Windows of an epoch after which it is said that none has stepped yet, or none with a gradient; the end of the epoch
says it sooner."""


BATCHES_WITHOUT_STEP = 10_000
"""Batches after which a run that only a number of steps ends is an error, if it never stepped nor changed a weight."""


class Intermission(AbstractTrainer):
    """The part of BaseTrainer's loop that is no window."""

    def __init__(self, config: BaseTrainerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        self._cadence = Schedule(config.training_parameters)
        self._agreement = Agreement(self, self._cadence)
        self._limits = limits(config.training_parameters)
        self._has_stepped = False  # whether any window of this process counted as an optimizer step
        self._writes_before = 0
        self._has_trained = False  # whether any of these steps had a gradient

    def _between_windows(self, *, epoch_ended: bool) -> bool:
        """After a window: log, validate, end the epoch, save, in this order and on all ranks alike.

        Returns:
            Whether this window was the last of the run.
        """
        is_last = self._limit_reached(epochs=self.progress.current_epoch + epoch_ended)
        self._window_finished(is_last=is_last)
        stepped = self._accumulation.stepped
        if is_last or epoch_ended or self._window.validates:
            return self._conclude(stepped=stepped, epoch_ended=epoch_ended, validates=self._window.validates)
        self._save_if_due(stepped=stepped, epoch_ended=False, is_last=False, requested=False)
        return False

    def _note_what_follows(self, *, epoch_ended: bool) -> None:
        """Writes into the counters what is to be done after the window just completed, for a checkpoint of before."""
        stepped = self._accumulation.stepped
        self._window.validates = bool(self._val_batches) and self._cadence.validation_is_due(
            self.progress, stepped=stepped, epoch_ended=epoch_ended, by_the_clock=bool(self._window.flags.validate)
        )
        self._owe(stepped=stepped, epoch_ended=epoch_ended, validates=self._window.validates)

    def _owe(self, *, stepped: bool, epoch_ended: bool, validates: bool) -> None:
        is_owed = validates or epoch_ended
        self.progress.owed = (
            {"stepped": stepped, "epoch_ended": epoch_ended, "validates": validates} if is_owed else None
        )

    def _conclude(self, *, stepped: bool, epoch_ended: bool, validates: bool) -> bool:
        """After a window that is not like most: it ends the run or an epoch, or a validation follows it."""
        is_last = self._limit_reached(epochs=self.progress.current_epoch + epoch_ended)
        if validates and not self._validate(stepped=stepped, epoch_ended=epoch_ended):
            return True
        if epoch_ended:
            self._end_epoch()
        self._say_if_nothing_is_trained()
        # What their events ask for (early stopping) counts here and now; and after the last window, what it asked.
        requested = bool(self._agreement.exchange().save)
        if self._agreement.stopped and not is_last:
            is_last = True
            self._window_finished(is_last=True)
        self._save_if_due(stepped=stepped, epoch_ended=epoch_ended, is_last=is_last, requested=requested)
        return is_last

    def _say_if_nothing_is_trained(self) -> None:
        """Warns and raises nothing: training without gradients, or a late first step, may be meant."""
        if self._has_trained or self.local_batches == 0:
            return
        if self._has_stepped:
            self._say_once(
                "no gradient",
                "training_step calls self.step(...), but no parameter that it steps has had a gradient so far: steps "
                "are counted, and nothing is learnt. Call self.backward(loss) before it, with a loss of the model that "
                "the optimizer trains.",
            )
            return
        self._refuse_to_go_on_for_ever()
        self._say_once(
            "no step",
            "training_step has not called self.step(...) so far: no optimizer step is counted, and a limit in steps "
            "never comes. Call self.backward(loss) there, and self.step(model, optimizer) when "
            "`not self.is_accumulating_gradients`.",
        )

    def _note_weights(self) -> None:
        """Training begins with the weights as they are now."""
        self._writes_before = self._writes()

    def _writes(self) -> int:
        return sum(write_count(parameter) for model in self.named_models().values() for parameter in model.parameters())

    def _refuse_to_go_on_for_ever(self) -> None:
        """Raises where nothing but a number of steps ends the run, and none is ever counted.

        A first step may come late, when a replay buffer is full, so a run that leaves its weights alone has time.
        """
        epochs, steps, samples = self._limits
        has_other_limit = min(epochs, samples) < math.inf or self.config.training_parameters.max_time is not None
        if steps == math.inf or has_other_limit:
            return
        parameters = [parameter for model in self.named_models().values() for parameter in model.parameters()]
        trains = self._writes() != self._writes_before or any(parameter.grad is not None for parameter in parameters)
        if trains or self.local_batches >= BATCHES_WITHOUT_STEP:
            raise StepError(
                f"max_steps={steps} never comes: {self.local_batches} batches were trained, and training_step has not "
                "called self.step(...), which alone counts a step. Call self.backward(loss) in the place of "
                "loss.backward(), and self.step(model, optimizer) in the place of optimizer.step(), when "
                "`not self.is_accumulating_gradients`; or set n_epochs."
            )

    def _end_epoch(self) -> None:
        self.progress.finish_epoch()
        self.progress.owed = None
        self._notify("post_epoch")

    def _validate(self, *, stepped: bool, epoch_ended: bool) -> bool:
        """Validates; returns False if a signal ended the run in its midst.

        The checkpoint saved then says what is owed: a resumed run validates first, and goes on as this one would
        have. After a signal that only asks for a checkpoint, the validation begins anew.
        """
        self.settle()
        self._land()
        while True:
            try:
                metrics = validate(self, self._val_batches, self._cadence.validation_batches, self._agreement)
                break
            except Interrupted:
                for batches in self._val_batches.values():
                    batches.close()  # its workers may be at something long
                stopped = self._agreement.stopped
                self._agreement.signals.save_asked = False
                if stopped:
                    self._window_finished(is_last=True)
                self._save_if_due(stepped=False, epoch_ended=False, is_last=stopped, requested=not stopped)
                if stopped:
                    return False
        self._owe(stepped=stepped, epoch_ended=epoch_ended, validates=False)
        self._cadence.validated()
        self._validated(metrics)
        self._tell_validated(metrics)
        return True

    def _finish_what_is_owed(self) -> None:
        """Does what a signal or an exception kept the last run from doing after its last window."""
        if self.global_step > 0:
            self._window_finished(is_last=False)
        if self.progress.owed is not None:
            self._conclude(**self.progress.owed)

    def _validate_for_sanity(self) -> None:
        batches = self.config.training_parameters.num_sanity_val_steps
        if not batches or not self._val_batches:
            return
        self.is_sanity_validation = True
        try:
            self._tell_validated(validate(self, self._val_batches, batches, self._agreement))
        except Interrupted:
            self._save_if_due(
                stepped=False, epoch_ended=False, is_last=self._agreement.stopped, requested=not self._agreement.stopped
            )
        finally:
            self.is_sanity_validation = False

    def settle(self) -> None:
        """Looks at the gradient norms not yet looked at; raises, or counts skipped steps, as the policy says.

        Waits for the device. The trainer calls it before a validation, before a save, and at the end.

        Raises:
            NonFiniteError: The policy is "raise" and a norm was not finite.
        """
        if self._is_ready:
            self._cadence.update(self.progress)
            self._accumulation.settle()

    def _say_that_it_is_finished(self) -> None:
        progress, parameters = self.progress, self.config.training_parameters
        counted = (
            ("n_epochs", "epochs", progress.current_epoch),
            ("max_steps", "steps", progress.global_step),
            ("max_samples", "samples", progress.samples_seen),
        )
        reached = [
            (name, f"{done} of {limit} {unit}")
            for (name, unit, done), limit in zip(counted, self._limits, strict=True)
            if done >= limit
        ]
        remedy = "Raise " + " and ".join(name for name, _ in reached)
        if parameters.fast_dev_run:
            remedy = "Use fast_dev_run=False"
        done = " and ".join(text for _, text in reached)
        self._say_once(
            "finished",
            f"nothing to train at step {progress.global_step}: {done} are done. {remedy} to go on, or use another "
            "experiment name.",
        )

    def _last_window_is_done(self) -> bool:
        """Whether a limit of the run is reached with the window just completed, its epoch's end included."""
        owed = self.progress.owed
        return self._limit_reached(epochs=self.progress.current_epoch + bool(owed and owed["epoch_ended"]))

    def _limit_reached(self, *, epochs: int) -> bool:
        n_epochs, max_steps, max_samples = self._limits
        progress = self.progress
        return epochs >= n_epochs or progress.global_step >= max_steps or progress.samples_seen >= max_samples
