"""When a run is saved, by its metrics, by request and after an exception; and which checkpoints stay."""

import math
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

import dream_trainer as dt
from tests.api import NonFiniteError, read_shared
from tests.trainer import saves
from tests.trainer.small import Batch, assert_same_weights, weights

NAN, INF = math.nan, math.inf


@pytest.mark.pitfall(7, 36)
@pytest.mark.parametrize(
    ("script", "mode", "steps"),
    [
        ((5.0, 1.0, 4.0, NAN, 3.0, 0.0, -1.0), "min", [1, 2, 6, 7]),
        ((NAN, None, -2.0, -2.0, -1.0, 0.0, INF), "max", [3, 5, 6, 7]),
    ],
    ids=str,
)
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_better_one_is_saved(script: tuple[float | None, ...], mode: str, steps: list[int], in_parts: bool) -> None:
    parameters: dict[str, Any] = {"save_on_best": True, "best_mode": mode, "save_at_end": in_parts}
    if in_parts:  # each part saves its end too
        assert saves.fit_scripted(script, stop_after=3, **parameters).saved == sorted({*steps, 3} & {1, 2, 3})
    saved = saves.fit_scripted(script, **parameters).saved
    first = 4 if in_parts else 1
    assert saved == sorted({step for step in steps if step >= first} | ({len(script)} if in_parts else set()))


@pytest.mark.pitfall(36)
def test_odd_metrics_are_kept_as_they_are_and_break_nothing() -> None:
    script = (-1.5, NAN, None, INF, 0.0, -INF)
    parameters: dict[str, Any] = {"save_every_n_steps": 1, "keep_best": 1, "keep_last": 6, "best_mode": "min"}
    found = [manifest.metrics for manifest in saves.fit_scripted(script, save_on_best=True, **parameters).checkpoints()]
    expected = [{} if value is None else {"val/loss": value} for value in script]
    assert repr(found) == repr(expected)
    again = saves.fit_scripted((*script, 2.0), **parameters)
    assert (again.loaded, again.saved) == (["step_00000006"], [7])


def test_a_checkpoint_without_a_validation_at_its_step_has_no_metrics() -> None:
    script = (9.0, 8.0, 7.0, 6.0, 5.0, 4.0)
    saves.fit_scripted(script, val_every=2, save_every_n_steps=1, stop_after=4)
    found = saves.fit_scripted(script, val_every=2, save_every_n_steps=1)  # step 5 comes right after a resume
    metrics = {manifest.step: manifest.metrics for manifest in found.checkpoints()}
    assert metrics == {1: {}, 2: {"val/loss": 8.0}, 3: {}, 4: {"val/loss": 6.0}, 5: {}, 6: {"val/loss": 4.0}}


# -- retention

RETAINED: dict[str, Any] = {"save_every_n_steps": 1, "keep_last": 2, "keep_best": 1}


@pytest.mark.pitfall(30)
@pytest.mark.parametrize("stops", [(), (2, 4), (1, 2, 3, 4, 5)], ids=str)
def test_the_best_and_the_last_two_stay_wherever_the_run_was_interrupted(stops: tuple[int, ...]) -> None:
    script = (5.0, 1.0, 4.0, NAN, 3.0, 2.0)
    for stop in (*stops, None):
        trainer = saves.fit_scripted(script, stop_after=stop, **RETAINED)
    assert saves.steps_of(trainer) == [2, 5, 6]


class Acts(saves.Saves):
    """Does something in `place` once, when `at` steps are trained; in events as the last listener."""

    def __init__(self, config: saves.Config, place: str, at: int, action: "Callable[[Acts], object]") -> None:
        config.callbacks = dt.CallbackCollection([*config.callbacks, Actor()])
        super().__init__(config)
        self.when, self.action, self.has_acted = (place, at), action, False

    def act_in(self, place: str) -> None:
        if (place, self.global_step) == self.when and not self.has_acted:
            self.has_acted = True
            self.action(self)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if not self.is_accumulating_gradients:  # in the midst of a window, if it has several batches
            self.act_in("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 1:
            self.act_in("validation_step")
        return super().validation_step(batch, batch_idx)


class Actor(dt.Callback):
    order = 1000

    def pre_train_batch(self, trainer: Any, batch: Any, batch_idx: int) -> None:
        trainer.act_in("pre_train_batch")

    def post_train_step(self, trainer: Any) -> None:
        trainer.act_in("post_train_step")

    def post_val_epoch(self, trainer: Any, metrics: dict[str, float]) -> None:
        trainer.act_in("post_val_epoch")

    def post_epoch(self, trainer: Any) -> None:
        trainer.act_in("post_epoch")


def acts(place: str, at: int, action: Callable[[Any], object], **checkpoint: Any) -> Acts:
    return Acts(
        saves.make_config(training=saves.VALIDATING, callbacks=[saves.Validated()], **checkpoint), place, at, action
    )


ASKS: dict[str, Callable[[Any], object]] = {
    "signal": lambda trainer: os.kill(os.getpid(), signal.SIGUSR1),
    "request": lambda trainer: trainer.request_save(),
    "save": lambda trainer: trainer.save_checkpoint(),
}


def fail(trainer: Any) -> None:
    raise KeyError("broken")


@pytest.fixture
def straight() -> saves.Saves:
    """Two epochs of a run that nothing disturbs, validated at steps 3, 6, 9 and 12."""
    trainer = saves.run(experiment="straight", training=saves.VALIDATING, callbacks=[saves.Validated()])
    assert [step for step, _ in trainer.get_callback(saves.Validated)._found] == [3, 6, 9, 12]
    return trainer


@pytest.mark.pitfall(6)
@pytest.mark.parametrize(
    ("place", "at", "asks", "saved"),
    [
        ("training_step", 2, "signal", 3),
        ("post_train_step", 3, "request", 3),
        ("validation_step", 3, "signal", 3),
        ("post_val_epoch", 3, "request", 3),
        *(("post_train_step", step, "save", step) for step in (3, 6)),  # which know of what comes after them
        *(("post_val_epoch", 6, "save", 6), ("post_epoch", 6, "save", 6)),
    ],
)
def test_a_save_asked_for_anywhere_is_made_at_that_step_and_the_run_goes_on(
    place: str, at: int, asks: str, saved: int, straight: saves.Saves
) -> None:
    trainer = saves.fit(acts(place, at, ASKS[asks], **saves.NOTHING))
    assert set(trainer.saved) == set(saves.steps_of(trainer)) == {saved}
    saves.assert_as(straight, trainer)
    resumed = saves.run(training=saves.VALIDATING, callbacks=[saves.Validated()], **saves.NOTHING)
    assert resumed.loaded == [f"step_{saved:08d}"]
    saves.assert_as(straight, resumed)


@pytest.mark.parametrize(
    ("place", "at"),
    [
        *(("pre_train_batch", 6), ("training_step", 4), ("post_train_step", 3)),
        *(("validation_step", 3), ("post_val_epoch", 6), ("post_epoch", 12)),
    ],
)
def test_an_exception_ends_a_run_with_its_last_step_saved(place: str, at: int, straight: saves.Saves) -> None:
    trainer = acts(place, at, fail, **saves.NOTHING)
    with pytest.raises(KeyError, match="broken"):
        saves.fit(trainer)
    assert trainer.saved == saves.steps_of(trainer) == [at]
    resumed = saves.run(training=saves.VALIDATING, callbacks=[saves.Validated()], **saves.NOTHING)
    assert resumed.loaded == [f"step_{at:08d}"]
    saves.assert_as(straight, resumed)


@pytest.mark.pitfall(2, 6)
def test_an_exception_in_the_midst_of_a_window_leaves_nothing_of_it() -> None:
    training = saves.VALIDATING | {"gradient_accumulation_steps": 2}
    expected = saves.run(experiment="straight", training=training, callbacks=[saves.Validated()])
    trainer = Acts(
        saves.make_config(training=training, callbacks=[saves.Validated()], **saves.NOTHING), "training_step", 4, fail
    )
    with pytest.raises(KeyError):
        saves.fit(trainer)
    (manifest,) = trainer.checkpoints()
    progress = read_shared(manifest.path)["progress"]
    counters = {"global_step": 4, "current_epoch": 1, "epoch_steps": 1, "batch_idx": 2, "samples_seen": 16}
    assert {name: progress[name] for name in counters} == counters
    resumed = saves.run(training=training, callbacks=[saves.Validated()], **saves.NOTHING)
    saves.assert_as(expected, resumed)
    assert resumed.seen == expected.seen[8:]


def test_after_a_nonfinite_gradient_nothing_is_saved() -> None:
    class Explodes(saves.Saves):
        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            x, y, numbers = batch
            return super().training_step((x, y * (NAN if self.global_step == 3 else 1.0), numbers), batch_idx)

    trainer = Explodes(saves.make_config(save_every_n_steps=2))
    with pytest.raises(NonFiniteError):
        saves.fit(trainer)
    assert saves.steps_of(trainer) == [2]
    assert_same_weights(weights(saves.run().model), weights(saves.run(experiment="straight").model))
