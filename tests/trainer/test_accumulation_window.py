"""What a callback of a user's sees of the accumulation window, and may do between two."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import dream_trainer as dt
from tests.trainer.small import Alone, batches, fit, make_config


class Looks(dt.Callback):
    """Notes what the window says at each event."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []
        self.losses: list[list[float]] = []
        self.batches: list[Any] = []
        self.skipped: list[Any] = []

    def pre_fit(self, trainer: dt.AbstractTrainer) -> None:
        trainer.accumulation_window.watch(lambda optimizer: None)
        self.seen.append(("pre_fit", trainer.accumulation_window.is_open))

    def pre_train_batch(self, trainer: dt.AbstractTrainer, batch: Any, batch_idx: int) -> None:
        assert trainer.accumulation_window.batch is batch
        self.seen.append(("pre_train_batch", trainer.accumulation_window.is_open))

    def post_optimizer_step(self, trainer: dt.AbstractTrainer, model: Any, optimizer: Any) -> None:
        self.losses.append([float(loss) for loss in trainer.accumulation_window.losses])
        self.skipped.append(trainer.accumulation_window.step_was_skipped)
        assert trainer.accumulation_window.loss_scale is None

    def post_train_step(self, trainer: dt.AbstractTrainer) -> None:
        self.seen.append(("post_train_step", trainer.accumulation_window.is_open))


def test_a_window_is_open_from_its_first_batch_until_it_is_counted() -> None:
    looks = Looks()
    config = make_config(n_epochs=1, gradient_accumulation_steps=2, callbacks=[looks])
    with Alone(config, batches(4)) as trainer:
        assert not trainer.accumulation_window.is_open
        assert trainer.accumulation_window.data is None
        assert trainer.accumulation_window.losses == ()
        trainer.fit()
        assert not trainer.accumulation_window.is_open
    window = [("pre_train_batch", True), ("pre_train_batch", True), ("post_train_step", False)]
    assert looks.seen == [("pre_fit", False), *window, *window]


def test_the_losses_are_those_of_the_last_micro_batch() -> None:
    looks = Looks()
    given: list[float] = []

    class Notes(Alone):
        def backward(self, loss: Any, **options: Any) -> None:
            given.append(float(loss.detach()))
            super().backward(loss, **options)

    fit(Notes(make_config(n_epochs=1, gradient_accumulation_steps=2, callbacks=[looks]), batches(4)))
    assert looks.losses == [[given[1]], [given[3]]]


@pytest.mark.usefixtures("late_norms")
def test_whether_a_step_was_skipped_is_known_on_the_device_alone() -> None:
    looks = Looks()
    data = batches(3)
    data[1][0].fill_(float("nan"))
    with Alone(make_config(n_epochs=1, nonfinite="skip", callbacks=[looks]), data) as trainer:
        before_and_after = trainer
        trainer.fit()
    assert before_and_after.skipped_steps == 1
    taken = [flag is None or float(flag) == 0 for flag in looks.skipped]
    assert taken.count(True) == 2


def test_steps_of_a_pass_and_time_spent_are_numbers_of_the_trainer() -> None:
    config = make_config(n_epochs=1, train_steps_per_epoch=3)
    with Alone(config, batches(4)) as trainer:
        assert (trainer.steps_per_pass, trainer.seconds_waiting_for_data, trainer.seconds_saving) == (None, 0.0, 0.0)
        trainer.fit()
        assert (trainer.steps_per_pass, trainer.steps_per_epoch) == (4, 3)
        assert trainer.seconds_waiting_for_data > 0
        assert trainer.seconds_saving == 0.0


def test_a_warning_is_logged_once_for_each_key(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dream_trainer"), Alone(make_config(n_epochs=1), batches(1)) as trainer:
        for _ in range(2):
            trainer.warn_once("one", "first")
            trainer.warn_once("two", "second")
    assert [record.message for record in caplog.records] == ["first", "second"]


def test_weights_changed_by_hand_between_windows_are_those_of_the_next_step() -> None:
    class Zeroes(dt.Callback):
        def post_train_step(self, trainer: dt.AbstractTrainer) -> None:
            with torch.no_grad(), trainer.changing_weights():
                for parameter in trainer.named_models()["model"].parameters():
                    parameter.zero_()

        def pre_train_batch(self, trainer: dt.AbstractTrainer, batch: Any, batch_idx: int) -> None:
            found.append(all(not p.any() for p in trainer.named_models()["model"].parameters()))

    found: list[bool] = []
    fit(Alone(make_config(n_epochs=1, callbacks=[Zeroes()]), batches(3)))
    assert found == [False, True, True]
