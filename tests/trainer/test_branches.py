"""Going back to an earlier checkpoint, on to other ranks, and loading and saving by hand."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.nn.functional import mse_loss

import dream_trainer as dt
from tests.api import DistributedDataLoader, StepError, read_shared
from tests.trainer import resumable, saves, small
from tests.trainer.small import Batch, Samples, assert_same_weights, filled_network, weights
from tests.worlds import run_world


class Saves(saves.Saves):
    """Ten batches a pass; the config's learning rate counts, also over a checkpoint's."""

    def __init__(self, config: saves.Config) -> None:
        super().__init__(config, length=20)

    def on_load(self, path: Path) -> None:
        super().on_load(path)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate


def make_config(
    *,
    experiment: str = "run",
    learning_rate: float = 0.1,
    resume: str | int | None = "auto",
    save_every: int = 5,
    **training: Any,
) -> saves.Config:
    """A run that saves every fifth step and at the end; further arguments are training parameters."""
    options = {"resume": resume, "save_every_n_steps": save_every, "save_every_n_epochs": None}
    return saves.make_config(experiment=experiment, learning_rate=learning_rate, training=training, **options)


def fit(config: saves.Config) -> Saves:
    return small.fit(Saves(config))


def by_hand(rates: list[float], seen: list[list[int]]) -> nn.Module:
    """One step of SGD at each rate."""
    model, data = filled_network(), Samples(20)
    optimizer = small.sgd(model)
    for rate, numbers in zip(rates, seen, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        small.train_on(optimizer, [mse_loss(model(data.x[numbers]), data.y[numbers])])
    return model


def test_a_run_taken_back_to_an_earlier_step_goes_on_from_its_own_later_ones_and_keeps_the_others_aside() -> None:
    first = fit(make_config(max_steps=10))
    assert_same_weights(weights(first.model), by_hand([0.1] * 10, first.seen))
    second = fit(make_config(max_steps=10, learning_rate=0.001, resume=5))
    expected = by_hand([0.1] * 5 + [0.001] * 5, first.seen)
    assert second.loaded == ["step_00000005"]
    assert_same_weights(weights(second.model), expected)
    aside, *whole = sorted(path.name for path in second.checkpoint_dir.iterdir())
    assert whole == ["step_00000005", "step_00000010"]
    assert aside.startswith(".aside-")
    third = fit(make_config(max_steps=10, learning_rate=0.001))
    assert third.loaded == ["step_00000010"]
    assert_same_weights(weights(third.model), expected)
    (third.checkpoint_dir / aside).rename(Path("step_00000010"))
    old = fit(make_config(experiment="other", max_steps=10, resume="step_00000010"))
    assert_same_weights(weights(old.model), first.model)


def test_a_checkpoint_can_be_loaded_before_the_first_fit() -> None:
    earlier = fit(make_config(experiment="earlier", max_steps=5))
    with Saves(make_config(max_steps=10)) as trainer:
        trainer.load_checkpoint(earlier.checkpoint_dir / "step_00000005")
        assert (trainer.global_step, trainer.samples_seen) == (5, 10)
        assert_same_weights(weights(trainer.model), earlier.model)
        trainer.fit()
    seen = earlier.seen + trainer.seen
    assert sorted(number for numbers in seen for number in numbers) == list(range(20))
    assert_same_weights(weights(trainer.model), by_hand([0.1] * 10, seen))


@pytest.mark.parametrize("what", ["save_checkpoint", "load_checkpoint"])
def test_saving_and_loading_inside_a_window_is_an_error_and_nothing_is_written(what: str) -> None:
    class Inside(Saves):
        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            result = super().training_step(batch, batch_idx)
            if what == "save_checkpoint":
                self.save_checkpoint()
            else:
                self.load_checkpoint(path)
            return result

    path = fit(make_config(experiment="other", max_steps=5)).checkpoint_dir / "step_00000005"
    trainer = Inside(make_config(max_steps=4, gradient_accumulation_steps=2))
    with trainer, pytest.raises(StepError, match=rf"{what}\(\) was called inside an accumulation window"):
        trainer.fit()
    assert not trainer.checkpoint_dir.exists()
    assert trainer.global_step == 0


def test_elapsed_time_is_that_in_fit_and_comes_back() -> None:
    earlier = fit(make_config(experiment="earlier", max_steps=5))
    path = earlier.checkpoint_dir / "step_00000005"
    saved = read_shared(path)["progress"]["elapsed_seconds"]
    assert 0 < saved <= earlier.progress.elapsed_seconds
    with Saves(make_config(resume=str(path), max_steps=6)) as trainer:
        trainer.evaluate()
        assert read_shared(trainer.save_checkpoint())["progress"]["elapsed_seconds"] == saved
        trainer.fit()
        elapsed = trainer.progress.elapsed_seconds
        assert elapsed > saved
        time.sleep(0.2)
        trainer.set_limits(max_steps=7)
        began = time.monotonic()
        trainer.fit()
        assert elapsed < trainer.progress.elapsed_seconds <= elapsed + time.monotonic() - began


def test_a_save_right_after_a_resume_keeps_where_a_stateful_loader_was() -> None:
    options: dict[str, Any] = {"n_epochs": 1, "own": {"loader": "stateful", "noise": 0.0}}
    straight = resumable.train(resumable.make_config("straight", **options))
    first = resumable.train(resumable.make_config("first", **options), stop_after=3)
    path = resumable.make_config("first").run_dir / "checkpoints" / "step_00000003"
    with resumable.Resumable(resumable.make_config("second", **options)) as between:
        between.load_checkpoint(path)
        between.save_checkpoint()
        assert between.record == []
    found = resumable.train(resumable.make_config("second", **options))
    assert [entry["step"] for entry in found["record"]] == [4, 5, 6]
    found |= {"record": first["record"] + found["record"], "log": first["log"] + found["log"]}
    assert resumable.differences(found, straight) == []


class Draws(small.Spread, dt.CheckpointMixin):
    def __init__(self, config: saves.Config) -> None:
        super().__init__(config, DistributedDataLoader(Samples(24), 2))
        self.drawn: list[list[float]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.drawn.append(torch.rand(2).tolist())
        return super().training_step(batch, batch_idx)


def drawn_first(experiment: str, steps: int, accumulation: int, resume: str | None = "auto") -> list[float]:
    torch.manual_seed(int.from_bytes(os.urandom(2)))  # as a new process finds the generator
    config = make_config(
        experiment=experiment, resume=resume, save_every=1, max_steps=steps, gradient_accumulation_steps=accumulation
    )
    with Draws(config) as trainer:
        trainer.fit()
        return trainer.drawn[0]


def go_on_twice(checkpoints: list[str]) -> list[list[float]]:
    return [drawn_first(f"on {number}", 3, 1, path) for number, path in enumerate(checkpoints)]


@pytest.mark.pitfall(33)
def test_random_layers_go_on_from_the_seed_the_step_and_the_rank_on_another_number_of_ranks(tmp_path: Path) -> None:
    drawn_first("one rank", 2, 2)
    first, second = (
        str(path) for path in sorted((tmp_path / "runs/tests/checkpoint/one rank").rglob("step_0000000[12]"))
    )
    ranks = run_world(go_on_twice, 2, [first, second, first])
    assert [rank[0] for rank in ranks] == [rank[2] for rank in ranks]
    assert len({tuple(drawn) for rank in ranks for drawn in rank[:2]}) == 4
