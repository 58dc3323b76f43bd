"""EarlyStopping: what counts, when it stops, and that a resume goes on counting."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

import dream_trainer as dt
from tests.api import CheckpointParameters, ConfigError, EarlyStopping
from tests.trainer.small import Alone, Config, batches, fit, make_config

NAN = math.nan


class Told(Alone, dt.EvalMixin):
    """Its validations find what they are told, one value after each epoch of two steps."""

    def __init__(self, config: Config, values: Sequence[float], name: str = "loss") -> None:
        super().__init__(config, batches(2), batches(1))
        self.values, self.name = values, name

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {self.name: -1e9 if self.is_sanity_validation else self.values[self.current_epoch]}


def epochs_until_stopped(stopping: EarlyStopping, values: Sequence[float], **training: Any) -> int:
    with Told(make_config(n_epochs=len(values), callbacks=[stopping], **training), values) as trainer:
        trainer.fit()
        return trainer.current_epoch


@pytest.mark.parametrize(
    ("options", "values", "epochs"),
    [
        ({"patience": 2}, [3, 2, 2, 2, 1, 1], 4),
        ({"patience": 1, "mode": "max"}, [0.0, 1.0, 0.5, 2.0], 3),
        ({"patience": 2}, [1.0, NAN, NAN, 0.0], 3),
        ({"patience": 2}, [NAN, 1.0, NAN, 2.0, 0.0], 4),
        ({"patience": 2, "min_delta": 0.5}, [3.0, 2.75, 2.5, 2.25], 3),
    ],
    ids=str,
)
def test_it_stops_without_improvement(options: dict[str, Any], values: list[float], epochs: int) -> None:
    assert epochs_until_stopped(EarlyStopping(**options), values) == epochs


@pytest.mark.pitfall(48)
def test_a_sanity_validation_and_an_evaluate_do_not_count() -> None:
    stopping, values = EarlyStopping(patience=2), [2.0, 3.0, 1.0, 1.0]
    with Told(make_config(n_epochs=2, num_sanity_val_steps=1, callbacks=[stopping]), values) as trainer:
        trainer.evaluate()
        trainer.fit()
        trainer.evaluate()
    assert (stopping.best, stopping.validations_without_improvement) == (2.0, 1)


class Saved(Told, dt.CheckpointMixin):
    pass


def test_a_resumed_run_goes_on_with_its_patience() -> None:
    values = [1.0, 2.0, 2.0, 2.0, 2.0, 0.5, 2.0]

    def run(n_epochs: int, patience: int) -> Saved:
        stopping = [EarlyStopping(patience=patience)]
        return fit(Saved(make_config(n_epochs=n_epochs, callbacks=stopping, checkpoint=CheckpointParameters()), values))

    assert run(2, 3).get_callback(EarlyStopping).state_dict() == {"best": 1.0, "validations_without_improvement": 1}
    assert run(7, 3).current_epoch == 4
    again = run(7, 3)
    assert (again.current_epoch, again.local_batches) == (4, 0)
    assert run(7, 4).current_epoch == 5
    assert run(7, 5).current_epoch == 7


def test_a_metric_that_does_not_come_is_an_error_that_names_those_that_do() -> None:
    for training in ({}, {"num_sanity_val_steps": 1}):
        config = make_config(n_epochs=3, callbacks=[EarlyStopping("val/los", mode="min")], **training)
        with Told(config, [1.0] * 3) as trainer, pytest.raises(ConfigError, match=r"mean 'val/loss'\?.*\['val/loss'\]"):
            trainer.fit()
        assert trainer.global_step == (0 if training else 2)


@pytest.mark.parametrize(
    ("training", "remedy"),
    [
        ({"val_every_n_epochs": None}, "set val_every_n_epochs, val_every_n_steps or val_every_minutes"),
        ({"val_steps_per_epoch": 0}, "val_steps_per_epoch=None"),
    ],
    ids=str,
)
def test_a_run_that_never_validates_is_an_error_that_says_what_would(training: dict[str, Any], remedy: str) -> None:
    with (
        Told(make_config(n_epochs=1, callbacks=[EarlyStopping()], **training), [1.0]) as trainer,
        pytest.raises(ConfigError, match=f"EarlyStopping.'val/loss'. gets no validation.*{remedy}"),
    ):
        trainer.fit()
    assert epochs_until_stopped(EarlyStopping(), [1.0], fast_dev_run=True, **training) == 1  # which validates anyway
    config = make_config(n_epochs=1, callbacks=[EarlyStopping()])
    with Alone(config, batches(1)) as trainer, pytest.raises(ConfigError, match="gets no validation.*loader"):
        trainer.fit()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([NAN, NAN, NAN, NAN], "val/loss was NaN in each of 2 validations"),
        ([0.5, NAN, 1.0, 0.0], "val/loss was not better than 0.5000 in 2 validations"),
    ],
    ids=str,
)
def test_the_reason_names_the_best(values: list[float], message: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "dream_trainer"):
        epochs_until_stopped(EarlyStopping(patience=2), values)
    assert message in caplog.text
