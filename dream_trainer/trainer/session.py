"""Session: how a trainer begins and ends. It launches, sets up and resumes once, fails for all ranks, and closes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, Self

from dream_trainer.cleanup import call_each, followed_by, in_a_line
from dream_trainer.config.trainer_config import BaseTrainerConfig, let_go
from dream_trainer.data.feed import WindowFeed
from dream_trainer.distributed.lost_ranks import is_lost_connection
from dream_trainer.distributed.seeds import hash_seed, seed_everything
from dream_trainer.errors import NonFiniteError, StepError
from dream_trainer.trainer.data_setup import connect_data
from dream_trainer.trainer.describe import describe
from dream_trainer.trainer.intermission import Intermission
from dream_trainer.trainer.launch import launch
from dream_trainer.trainer.registry import refuse_closures
from dream_trainer.trainer.step.accumulation import Accumulation


class Session(Intermission):
    """The part of BaseTrainer before and after its loop."""

    def __init__(self, config: BaseTrainerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        self._is_closed = self._has_failed = self._is_half_set_up = self._is_training = False
        self._is_nonfinite = False  # whether that is what it failed for

    def describe(self) -> str:
        """The setup order and the table of events and listeners, printed and returned as Markdown. Works before
        launch."""
        text = describe(self)
        print(text)
        return text

    def close(self) -> None:
        """Closes loaders and loggers and leaves the process group. Safe to call twice; the end of a `with` calls it.

        Everything is closed, though a part of it failed; the first exception is raised then, and the process group is
        left at the end of the process, since the other ranks may be elsewhere. After an exception of `fit`, or in the
        `with`, it is only said: that one counts.
        """
        let_go(self.config, self)
        if self._is_closed or self._world is None:
            return
        self._is_closed, has_failed = True, self._has_failed
        try:
            with self._failing_for_all(), followed_by(self._close_data), followed_by(self._close):
                call_each(self._events["teardown"])
        except Exception as error:
            if not has_failed:
                raise
            self._say_once(in_a_line(error), f"the trainer could not be closed: {in_a_line(error)}")
        try:
            self._world.close()
        except RuntimeError as error:
            if is_lost_connection(error):
                self._world.fail(error)
            raise

    def _close_data(self) -> None:
        streams = [] if self._train_stream is None else [self._train_stream.close]
        call_each([*streams, *(batches.close for batches in self._val_batches.values())])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._world is not None and self._world.world_size > 1 and isinstance(exc, Exception):
            self._world.fail_unless_all_do(exc)
        elif self._world is not None and self._world.world_size == 1:
            self._has_failed |= issubclass(kind, Exception)
            self.close()

    def _start(self) -> None:
        """Launches, builds and resumes, once."""
        if self._is_closed or self._is_half_set_up:
            self._refuse_to_go_on("closed" if self._is_closed else "left half set up by an exception")
        if not self._is_ready:
            try:
                self._launch_and_set_up()
            except BaseException:
                self._has_failed = self._is_half_set_up = True
                raise
        if not self._is_training:  # in a notebook a step may have been written anew since the last call
            self._training_step = self._wrap_step(self.training_step)
            self._validation_step = self._wrap_step(self.validation_step)

    def _go_on(self) -> None:
        """After an exception, or a signal that ended a wait for data: back to the end of the last finished window."""
        if self._has_failed:
            if self._is_nonfinite:
                self._refuse_to_go_on("left by gradients that were not finite, and later steps changed nothing")
            if self._accumulation.is_open:
                self._refuse_to_go_on("left in the middle of a step by an exception")
            for model in self.named_models().values():
                model.zero_grad(set_to_none=True)
        if self._has_failed or self._agreement.signals.broke_a_wait:
            self._feed.seek(self.progress.data, self._feed.rank_state, is_pass_over=self.progress.is_pass_over)
        self._has_failed = self._agreement.signals.broke_a_wait = False

    def _refuse_to_go_on(self, state: str) -> NoReturn:
        raise StepError(f"this trainer is {state}. Build a new one to train on; it resumes from the checkpoints.")

    def _launch_and_set_up(self) -> None:
        self._notify("pre_launch")
        launch(self)
        self._notify("post_launch")
        self._notify("pre_configure")
        self.configure()
        self._notify("post_configure")
        self._notify("pre_setup")
        self.setup()
        if self._train_stream is None:
            for model in self.named_models().values():
                model.to(self.world.device)
            connect_data(self)
        refuse_closures(self)
        assert self._train_stream is not None  # connect_data sets it
        self._ranks_are_even = self._train_stream.is_even
        self._feed = WindowFeed(self._train_stream, self.world, self.accumulation_steps)
        self._accumulation = Accumulation(self)
        self._agreement.begin()
        self._is_ready = True
        self._finish_setup()
        self._notify("post_setup")
        # Layers draw different numbers on each data-parallel rank; a resume puts each rank's state back over this.
        seed_everything(hash_seed(b"rank", self.config.seed, self.world.dp_rank))
        self._resume()

    @contextmanager
    def _failing_for_all(self) -> Iterator[None]:
        """Turns an exception on this rank into the end of the job; alone in the world, it is simply raised.

        What is inside is for all ranks together, so a rank that is alone in it is refused before it begins.
        """
        if self._world is not None:
            self._world.refuse_if_forbidden()
        is_inside_fit = self._is_training and not self._has_failed
        try:
            yield
        except BaseException as exc:
            if is_inside_fit and self._world is not None and self._world.world_size == 1:
                raise  # a callback may catch it; if none does, `fit` comes here
            # Outside of training nothing is left that later calls meet: an evaluation puts everything back.
            self._has_failed |= self._is_training
            try:
                self._tell_of(exc)
            finally:
                if self._world is not None and self._world.world_size > 1:
                    self._world.fail(exc)
                if self._is_training:
                    self._is_nonfinite |= isinstance(exc, NonFiniteError)
                    if self._accumulation.is_open:
                        self.progress.batch_idx = self._window.first_batch_idx
                        self._window_dropped()
                        self._accumulation.drop_window()
                    if isinstance(exc, Exception):
                        self._save_after_exception()
                    self._is_training = False
            raise

    def _tell_of(self, exc: BaseException) -> None:
        """Calls everyone who listens to `on_exception`, though some of them fail: most let go of something there."""
        for listener in self._events["on_exception"]:
            try:
                listener(exc)
            except Exception as later:
                exc.add_note(f"on_exception failed after this: {in_a_line(later)}")
