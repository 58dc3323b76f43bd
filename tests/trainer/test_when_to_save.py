"""When a run is saved, by the clock, by its metrics, by request and after an exception; and which checkpoints stay."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
from typing import Any

import pytest

import dream_trainer as dt
from dream_trainer.trainer.mixins import checkpointing as mixin
from tests.api import NonFiniteError, read_shared
from tests.trainer import resumable
from tests.trainer.saves import (
    NOTHING,
    STEPS,
    VALIDATING,
    Config,
    Saves,
    Validated,
    assert_as,
    fit,
    fit_scripted,
    make_config,
    replaced,
    run,
    steps_of,
)
from tests.trainer.small import Batch, assert_same_weights, weights
from tests.worlds import run_world

# -- the clock


class Clock:
    """Stands in for the `time` module."""

    def __init__(self) -> None:
        self.minutes = 0.0

    def monotonic(self) -> float:
        return 60 * self.minutes


class Timed(Saves):
    """Each step takes a minute by the clocks of some ranks, and no time by the others'."""

    clock: Clock
    slow_ranks: tuple[int, ...] = (0,)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.clock.minutes += self.world.rank in self.slow_ranks
        return super().training_step(batch, batch_idx)


def fit_timed(config: Config, slow_ranks: tuple[int, ...] = (0,), length: int = 2 * STEPS) -> Saves:
    clock = Clock()
    with replaced(mixin, "time", clock):
        trainer = Timed(config, length=length)
        trainer.clock, trainer.slow_ranks = clock, slow_ranks
        return fit(trainer)


@pytest.mark.parametrize(
    ("minutes", "steps"),
    [(0.5, [1, 2, 3, 4, 5, 6]), (1.0, [1, 2, 3, 4, 5, 6]), (2.0, [2, 4, 6]), (2.5, [3, 6]), (7.0, [])],
)
def test_minutes_between_saves_are_counted_by_the_clock(minutes: float, steps: list[int]) -> None:
    assert fit_timed(make_config(save_every_n_minutes=minutes, **NOTHING)).saved == steps


def test_any_other_save_starts_the_minutes_anew() -> None:
    trainer = fit_timed(make_config(save_every_n_minutes=2.0, save_every_n_steps=3, **NOTHING))
    assert trainer.saved == [2, 3, 5, 6]


def clocks_at_two() -> list[list[int]]:
    """Steps saved where the time passes on rank 0 only, and on rank 1 only."""
    return [
        fit_timed(
            make_config(experiment=str(rank), save_every_n_minutes=2.0, **NOTHING), slow_ranks=(rank,), length=4 * STEPS
        ).saved
        for rank in (0, 1)
    ]


def test_rank_0s_clock_counts_for_all() -> None:
    assert run_world(clocks_at_two, 2) == [[[2, 4, 6], []]] * 2


# -- metrics


NAN, INF = math.nan, math.inf


@pytest.mark.pitfall(7)
@pytest.mark.pitfall(36)
@pytest.mark.parametrize(
    ("script", "mode", "steps"),
    [
        ((5.0, 1.0, 4.0, NAN, 3.0, 0.0, -1.0), "min", [1, 2, 6, 7]),
        ((5.0, 1.0, 4.0, NAN, 3.0, 0.0, 6.0), "max", [1, 7]),
        ((NAN, None, -2.0, -2.0, -1.0, 0.0, INF), "max", [3, 5, 6, 7]),
        ((INF, NAN, 7.0, -INF, 0.0), "min", [1, 3, 4]),
        ((0.0, 0.0, 1.0, -0.0), "min", [1]),
    ],
    ids=str,
)
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_better_metric_than_all_before_is_saved(
    script: tuple[float | None, ...], mode: str, steps: list[int], in_parts: bool
) -> None:
    parameters: dict[str, Any] = {"save_on_best": True, "best_mode": mode, "save_at_end": in_parts}
    if in_parts:  # each part saves its end too
        assert fit_scripted(script, stop_after=3, **parameters).saved == sorted({*steps, 3} & {1, 2, 3})
    saved = fit_scripted(script, **parameters).saved
    first = 4 if in_parts else 1
    assert saved == sorted({step for step in steps if step >= first} | ({len(script)} if in_parts else set()))


@pytest.mark.pitfall(36)
def test_odd_metrics_are_kept_as_they_are_and_break_nothing() -> None:
    script = (-1.5, NAN, None, INF, 0.0, -INF)
    parameters: dict[str, Any] = {"save_every_n_steps": 1, "keep_best": 1, "keep_last": 6, "best_mode": "min"}
    found = [manifest.metrics for manifest in fit_scripted(script, save_on_best=True, **parameters).checkpoints()]
    expected = [{} if value is None else {"val/loss": value} for value in script]
    assert repr(found) == repr(expected)
    again = fit_scripted((*script, 2.0), **parameters)
    assert (again.loaded, again.saved) == (["step_00000006"], [7])


def test_a_checkpoint_without_a_validation_at_its_step_has_no_metrics() -> None:
    script = (9.0, 8.0, 7.0, 6.0, 5.0, 4.0)
    fit_scripted(script, val_every=2, save_every_n_steps=1, stop_after=4)
    found = fit_scripted(script, val_every=2, save_every_n_steps=1)  # step 5 comes right after a resume
    metrics = {manifest.step: manifest.metrics for manifest in found.checkpoints()}
    assert metrics == {1: {}, 2: {"val/loss": 8.0}, 3: {}, 4: {"val/loss": 6.0}, 5: {}, 6: {"val/loss": 4.0}}


# -- retention

RETAINED: dict[str, Any] = {"save_every_n_steps": 1, "keep_last": 2, "keep_best": 1}


@pytest.mark.pitfall(30)
@pytest.mark.parametrize(
    "stops",
    [(), *((k,) for k in range(1, 6)), *itertools.combinations(range(1, 6), 2), (1, 2, 3, 4, 5)],
    ids=str,
)
def test_the_best_and_the_last_two_stay_wherever_the_run_was_interrupted(stops: tuple[int, ...]) -> None:
    script = (5.0, 1.0, 4.0, NAN, 3.0, 2.0)
    for stop in (*stops, None):
        trainer = fit_scripted(script, stop_after=stop, **RETAINED)
    assert steps_of(trainer) == [2, 5, 6]


def test_steps_kept_for_ever_stay_beside_the_newest() -> None:
    trainer = run(training={"n_epochs": 2}, save_every_n_steps=1, keep_every_n_steps=4, save_every_n_epochs=None)
    assert trainer.saved == list(range(1, 13))
    assert steps_of(trainer) == [4, 8, 12]
    assert not [path for path in trainer.checkpoint_dir.iterdir() if not path.name.startswith("step_")]


# -- requests


class Asks(Saves):
    """Asks for a save once, at step 3, from `place`, by `how`."""

    place = how = ""
    has_asked = False

    def _ask(self, place: str) -> None:
        if place == self.place and self.global_step in (3, 2 if place == "training_step" else 3) and not self.has_asked:
            self.has_asked = True
            if self.how == "signal":
                os.kill(os.getpid(), signal.SIGUSR1)
            else:
                self.request_save()

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self._ask("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self._ask("validation_step")
        return super().validation_step(batch, batch_idx)

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        self._ask("post_val_epoch")

    def post_train_step(self) -> None:
        self._ask("post_train_step")


@pytest.fixture
def straight() -> Saves:
    """Two epochs of a run that nothing disturbs, validated at steps 3, 6, 9 and 12."""
    trainer = run(experiment="straight", training=VALIDATING, callbacks=[Validated()])
    assert [step for step, _ in trainer.get_callback(Validated)._found] == [3, 6, 9, 12]
    return trainer


@pytest.mark.parametrize("how", ["signal", "request"])
@pytest.mark.parametrize("place", ["training_step", "post_train_step", "validation_step", "post_val_epoch"])
def test_a_save_asked_for_anywhere_is_made_at_that_step_and_the_run_goes_on(
    place: str, how: str, straight: Saves
) -> None:
    trainer = Asks(make_config(training=VALIDATING, callbacks=[Validated()], **NOTHING))
    trainer.place, trainer.how = place, how
    fit(trainer)
    assert set(trainer.saved) == set(steps_of(trainer)) == {3}
    assert_as(straight, trainer)
    resumed = run(training=VALIDATING, callbacks=[Validated()])
    assert resumed.loaded == ["step_00000003"]
    assert_as(straight, resumed)


# -- exceptions


class Breaks(Saves):
    """Raises in `place`, when `at` steps are trained; in events as the last listener."""

    def __init__(self, config: Config, place: str, at: int) -> None:
        config.callbacks = dt.CallbackCollection([*config.callbacks, Breaker()])
        super().__init__(config)
        self.place, self.at = place, at

    def break_at(self, place: str) -> None:
        if (place, self.global_step) == (self.place, self.at):
            raise KeyError(f"broken in {place}")

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if not self.is_accumulating_gradients:  # in the midst of a window, if it has several batches
            self.break_at("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 1:
            self.break_at("validation_step")
        return super().validation_step(batch, batch_idx)


class Breaker(dt.Callback):
    order = 1000

    def pre_train_batch(self, trainer: Any, batch: Any, batch_idx: int) -> None:
        trainer.break_at("pre_train_batch")

    def post_train_step(self, trainer: Any) -> None:
        trainer.break_at("post_train_step")

    def post_val_epoch(self, trainer: Any, metrics: dict[str, float]) -> None:
        trainer.break_at("post_val_epoch")

    def post_epoch(self, trainer: Any) -> None:
        trainer.break_at("post_epoch")


@pytest.mark.parametrize(
    ("place", "at"),
    [
        *((place, at) for place in ("pre_train_batch", "training_step", "post_train_step") for at in (3, 4, 6)),
        *((place, at) for place in ("validation_step", "post_val_epoch") for at in (3, 6, 9, 12)),
        *(("post_epoch", at) for at in (6, 12)),
    ],
)
def test_an_exception_anywhere_ends_a_run_of_one_rank_with_its_last_step_saved(
    place: str, at: int, straight: Saves
) -> None:
    trainer = Breaks(make_config(training=VALIDATING, callbacks=[Validated()], **NOTHING), place, at)
    with pytest.raises(KeyError, match=f"broken in {place}"):
        fit(trainer)
    assert trainer.saved == steps_of(trainer) == [at]
    resumed = run(training=VALIDATING, callbacks=[Validated()], **NOTHING)
    assert resumed.loaded == [f"step_{at:08d}"]
    assert_as(straight, resumed)


@pytest.mark.pitfall(2)
@pytest.mark.pitfall(6)
def test_an_exception_in_the_midst_of_a_window_leaves_nothing_of_it() -> None:
    training = VALIDATING | {"gradient_accumulation_steps": 2}
    expected = run(experiment="straight", training=training, callbacks=[Validated()])
    trainer = Breaks(make_config(training=training, callbacks=[Validated()], **NOTHING), "training_step", 4)
    with pytest.raises(KeyError):
        fit(trainer)
    (manifest,) = trainer.checkpoints()
    progress = read_shared(manifest.path)["progress"]
    counters = {"global_step": 4, "current_epoch": 1, "epoch_steps": 1, "batch_idx": 2, "samples_seen": 16}
    assert {name: progress[name] for name in counters} == counters
    resumed = run(training=training, callbacks=[Validated()], **NOTHING)
    assert_as(expected, resumed)
    assert resumed.seen == expected.seen[8:]


class BreaksOnce(resumable.Resumable):
    """Raises in the second micro-batch of the window after step 2, unless it was resumed."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        if self.global_step == 2 and not self.is_accumulating_gradients and not self.loaded:
            raise KeyError("broken")
        return super().training_step(batch, batch_idx)


@pytest.mark.pitfall(44)
def test_what_a_window_logged_before_an_exception_in_it_is_not_counted_twice() -> None:
    lines = []
    for experiment, kind in (("straight", resumable.Resumable), ("run", BreaksOnce), ("run", BreaksOnce)):
        own = {"workers": 0, "random_layers": False, "noise": 0.0}
        config = resumable.make_config(experiment, log_every=4, own=own, max_steps=4, n_epochs=None)
        with contextlib.suppress(KeyError), kind(config) as trainer:
            trainer.fit()
        if kind is resumable.Resumable or trainer.global_step == 4:  # what broke off wrote nothing yet
            lines.append([line for line in resumable.log_lines(config.run_dir) if "train/loss" in line])
    straight, resumed = lines
    assert [line["step"] for line in straight] == [4]
    assert resumed[-1]["train/loss"] == straight[0]["train/loss"]
    assert resumed[-1]["step"] == 4


class SavesNow(dt.Callback):
    """Calls `save_checkpoint` in `place` after step `at`, as the last listener."""

    order = 1000

    def __init__(self, place: str, at: int) -> None:
        self._where = place, at

    def save(self, trainer: Any, place: str) -> None:
        if (place, trainer.global_step) == self._where:
            trainer.save_checkpoint()

    def post_train_step(self, trainer: Any) -> None:
        self.save(trainer, "post_train_step")

    def post_val_epoch(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.save(trainer, "post_val_epoch")

    def post_epoch(self, trainer: Any) -> None:
        self.save(trainer, "post_epoch")


@pytest.mark.pitfall(6)
@pytest.mark.parametrize(
    ("place", "at"),
    [("post_train_step", 3), ("post_train_step", 6), ("post_val_epoch", 3), ("post_val_epoch", 6), ("post_epoch", 6)],
)
def test_a_checkpoint_made_in_an_event_knows_what_comes_after_it(place: str, at: int, straight: Saves) -> None:
    """A validation, or the end of the epoch."""
    callbacks = [Validated(), SavesNow(place, at)]
    trainer = run(training=VALIDATING, callbacks=callbacks, **NOTHING)
    assert trainer.saved == steps_of(trainer) == [at]
    assert_as(straight, trainer)
    resumed = run(training=VALIDATING, callbacks=[Validated()], **NOTHING)
    assert resumed.loaded == [f"step_{at:08d}"]
    assert_as(straight, resumed)


def test_a_save_that_is_due_replaces_the_one_of_an_event_at_its_step(straight: Saves) -> None:
    trainer = run(training=VALIDATING, callbacks=[SavesNow("post_train_step", 6)])
    assert trainer.saved == [6, 6, 12]
    progress = read_shared(trainer.checkpoint_dir / "step_00000006")["progress"]
    assert (progress["current_epoch"], progress["owed"]) == (1, None)
    assert trainer.checkpoints()[0].metrics == straight.checkpoints()[0].metrics != {}


def test_weights_that_are_no_longer_those_of_a_step_are_not_saved() -> None:
    class HalfWay(Saves):
        def post_optimizer_step(self, model: Any, optimizer: Any) -> None:
            if self.global_step == 3:
                raise KeyError("half-way")

    trainer = HalfWay(make_config(save_every_n_steps=2))
    with pytest.raises(KeyError, match="half-way"):
        fit(trainer)
    assert steps_of(trainer) == [2]


@pytest.mark.parametrize("async_save", [True, False])
def test_after_a_nonfinite_gradient_nothing_is_saved(async_save: bool) -> None:
    class Explodes(Saves):
        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            x, y, numbers = batch
            return super().training_step((x, y * (NAN if self.global_step == 3 else 1.0), numbers), batch_idx)

    trainer = Explodes(make_config(save_every_n_steps=2, async_save=async_save))
    with pytest.raises(NonFiniteError):
        fit(trainer)
    assert steps_of(trainer) == [2]
    assert_same_weights(weights(run().model), weights(run(experiment="straight").model))
