"""Callbacks that act on all ranks alike or keep tensors, on two ranks: one world for all of them."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from tests.api import SWA, CheckpointError, DistributedDataLoader, Every, WeightTransfer, export_checkpoint
from tests.callbacks.averages import SAVED_WINDOWS, Saved, averaged, by_hand_averaged, in_windows, saved_config
from tests.callbacks.test_swa import mean_by_hand
from tests.trainer import small
from tests.worlds import run_world


class Pair(small.Spread, dt.EvalMixin):
    """A target beside the model."""

    def configure_models(self) -> None:
        super().configure_models()
        self.target = small.network().requires_grad_(False)

    def init_weights(self) -> None:
        super().init_weights()
        for parameter in self.target.parameters():
            nn.init.constant_(parameter, 7.0)

    def validation_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        with torch.no_grad():
            loss = mse_loss(self.target(batch[0]), batch[1])  # leaves the root of the target gathered
        return {"loss": loss}


def followed(trainer_class: Any) -> dict[str, Tensor]:
    """The target after six steps with a validation in between."""
    callbacks = [WeightTransfer("model", "target", decay=0.5, every_n_steps=2)]
    config = small.make_config(
        max_steps=6, global_batch_size=4, val_every_n_steps=3, val_every_n_epochs=1, callbacks=callbacks
    )
    loaders = DistributedDataLoader(small.Samples(16), 2), DistributedDataLoader(small.Samples(4), 2)
    with trainer_class(config, *loaders) as trainer:
        trainer.fit()
        return small.weights(trainer.target)


def steps_of_clock() -> list[int]:
    """Steps at which a callback by the clock was called; on rank 1 the clock stands still."""
    calls: list[int] = []
    stands_still = os.environ["RANK"] == "1"
    every = Every(
        0.05, "seconds", lambda t: calls.append(t.global_step), clock=lambda: 0.0 if stands_still else time.monotonic()
    )
    slow = Every(1, "steps", lambda _: time.sleep(0.02))
    only_main = Every(1, "steps", lambda t: calls.append(-t.global_step), main_process_only=True)
    config = small.make_config(max_steps=12, global_batch_size=4, callbacks=[slow, every, only_main])
    small.fit(small.Sharded(config, DistributedDataLoader(small.Samples(16), 2)))
    return calls


def epochs_until_stopped() -> int:
    stopping = dt.EarlyStopping(patience=1, min_delta=1e6)
    config = small.make_config(n_epochs=9, global_batch_size=4, callbacks=[stopping])
    loaders = DistributedDataLoader(small.Samples(8), 2), DistributedDataLoader(small.Samples(4), 2)
    with small.sharded(Pair)(config, *loaders) as trainer:
        trainer.fit()
        return trainer.current_epoch


def on_two_ranks(directory: str) -> dict[str, Any]:
    os.chdir(directory)
    found: dict[str, Any] = {}
    with Saved(saved_config(6, SWA(3, every=2, unit="steps"))) as trainer:
        trainer.fit()
        found["averaged"] = averaged(trainer.get_callback(SWA))
        trainer.export("live", weights="swa")
    found["sharded"], found["replicated"] = followed(small.sharded(Pair)), followed(Pair)
    found["clock"], found["epochs"] = steps_of_clock(), epochs_until_stopped()
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("two")
    return directory, run_world(on_two_ranks, 2, str(directory))


def test_swa_averages_shards_and_goes_on_at_another_world_size(
    two: tuple[Path, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    directory, ranks = two
    monkeypatch.chdir(directory)
    for rank in ranks:
        small.assert_same_weights(rank["averaged"], mean_by_hand(SAVED_WINDOWS[:6], (3, 5)))
    small.assert_same_weights(load_file("live/model.safetensors"), mean_by_hand(SAVED_WINDOWS[:6], (3, 5)))
    swa = SWA(3, every=2, unit="steps")
    trainer = small.fit(Saved(saved_config(8, swa)))
    small.assert_same_weights(averaged(swa), mean_by_hand(SAVED_WINDOWS, (3, 5, 7)))
    export_checkpoint(trainer.checkpoints()[-1].path, directory / "stored", weights="swa")
    small.assert_same_weights(load_file("stored/model.safetensors"), mean_by_hand(SAVED_WINDOWS, (3, 5, 7)))
    with pytest.raises(CheckpointError, match="saved without an EMA callback"):
        export_checkpoint(trainer.checkpoints()[-1].path, directory / "other", weights="ema")


@pytest.mark.parametrize("kind", ["sharded", "replicated"])
def test_a_target_follows_shard_by_shard(two: tuple[Path, list[dict[str, Any]]], kind: str) -> None:
    windows = in_windows(small.batches(4, 4) * 2)[:6]
    for rank in two[1]:
        small.assert_same_weights(rank[kind], by_hand_averaged(windows, decay=0.5, warm_up=False, every=2))


def test_a_callback_by_the_clock_goes_by_the_main_rank_s(two: tuple[Path, list[dict[str, Any]]]) -> None:
    main, other = (rank["clock"] for rank in two[1])
    assert [step for step in main if step > 0] == other
    assert 2 <= len(other) <= 6
    assert [step for step in main if step < 0] == list(range(-1, -13, -1))


def test_early_stopping_ends_all_ranks_at_the_same_step(two: tuple[Path, list[dict[str, Any]]]) -> None:
    assert [rank["epochs"] for rank in two[1]] == [2, 2]
