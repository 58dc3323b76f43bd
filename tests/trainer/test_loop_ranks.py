"""The loop on several ranks: data is split, counters, clocks and decisions agree, seeds differ where they should."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader

import dream_trainer as dt
from dream_trainer.trainer.mixins import checkpointing
from tests.api import DistributedDataLoader, PerRankLoader, StepError, World
from tests.trainer import small
from tests.worlds import run_world


def pairs(length: int) -> DistributedDataLoader:
    return DistributedDataLoader(small.Samples(length), 2)


def plain_loader(cls: type[small.Spread]) -> dict[str, Any]:
    """A plain DataLoader over 12 samples, two epochs."""
    with cls(small.make_config(n_epochs=2), DataLoader(small.Samples(12), 2)) as trainer:
        trainer.fit()
        counters = trainer.global_step, trainer.samples_seen, trainer.local_batches, trainer.total_steps
        return {"seen": trainer.seen, "weights": small.weights(trainer.model), "counters": counters}


class Drops(small.Spread):
    """Records the masks that dropout draws, and one draw of torch in each step."""

    def configure_models(self) -> None:
        super().configure_models()
        self.dropout = nn.Dropout(0.5)
        self.masks: list[list[bool]] = []

    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        self.masks.append((self.dropout(torch.ones(16)) > 0).tolist())
        return super().training_step(batch, batch_idx)


def dropout_masks() -> list[list[bool]]:
    return small.fit(Drops(small.make_config(n_epochs=1), pairs(12))).masks


class Stops(small.Spread):
    """One rank alone asks for the end, in its third window."""

    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        if self.world.rank == 1 and self.global_step == 2:
            self.request_stop("rank 1 has seen enough")
        return super().training_step(batch, batch_idx)


class Naps(small.Spread):
    """One rank is slow, and only its clock passes the limit in time."""

    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        time.sleep(0.05 if self.world.rank == 1 else 0.0)
        return super().training_step(batch, batch_idx)


class Watches(dt.Callback):
    """Runs on the main process alone."""

    main_process_only = True

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.refused: dict[str, str] = {}

    def post_train_step(self, trainer: Any) -> None:
        self.steps.append(trainer.global_step)
        for name, communicate in COMMUNICATE.items():
            try:
                communicate(trainer)
            except RuntimeError as error:
                self.refused[name] = str(error)
        trainer.log_histogram("of its own", torch.ones(3))


def a_shard(trainer: Any) -> Any:
    return next(trainer.model.parameters())


COMMUNICATE: dict[str, Callable[[Any], object]] = {
    "barrier": lambda trainer: trainer.world.barrier(),
    "evaluate": lambda trainer: trainer.evaluate(),
    "predict": lambda trainer: trainer.predict(DistributedDataLoader(small.Samples(4), 1)),
    "histogram": lambda trainer: trainer.log_histogram("weights", a_shard(trainer)),
    "images": lambda trainer: trainer.log_images("weights", [a_shard(trainer)]),
    "gathered": lambda trainer: trainer.gathered(trainer.model),
}


class Evaluated(small.Validates, small.Sharded, dt.EvalMixin, dt.LoggerMixin):
    def predict_step(self, batch: small.Batch, batch_idx: int) -> Any:
        return self.model(batch[0])


def main_process_only() -> tuple[list[int], dict[str, str]]:
    watch = Watches()
    data = pairs(12), pairs(4)
    small.fit(Evaluated(small.make_config(n_epochs=1, callbacks=[watch], fsdp=small.BY_BLOCKS), *data))
    return watch.steps, watch.refused


class WithPlainParts(small.Sharded):
    """One model is sharded; two more, in other dtypes, are on no wrapper, and one of these is never used."""

    def configure_models(self) -> None:
        super().configure_models()
        self.narrow, self.wide, self.unused = plain_parts()

    def init_weights(self) -> None:
        for model in self.named_models().values():
            small.fill(model)

    def apply_fully_shard(self, config: dict[str, Any]) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.model, **config)

    def configure_optimizers(self) -> None:
        self.optimizer = decaying(*self.named_models().values())

    def loss_of(self, batch: small.Batch) -> torch.Tensor:
        return summed_loss(self.model, self.narrow, self.wide, batch)


def plain_parts() -> tuple[nn.Module, nn.Module, nn.Module]:
    """One in float32, one in float64, one that nothing uses."""
    return nn.Linear(3, 1), nn.Linear(3, 1, bias=False).double(), nn.Linear(3, 1).double()


def decaying(*models: nn.Module) -> torch.optim.Optimizer:
    """Weight decay moves every parameter that has a gradient, be it zero."""
    return torch.optim.AdamW([p for model in models for p in model.parameters()], lr=0.01, weight_decay=0.5)


def summed_loss(model: nn.Module, narrow: nn.Module, wide: nn.Module, batch: small.Batch) -> torch.Tensor:
    x, y, _ = batch
    return nn.functional.mse_loss(model(x) + narrow(x.float()).double() + wide(x), y)


def plain_parts_of_a_sharded_trainer() -> dict[str, dict[str, torch.Tensor]]:
    with WithPlainParts(small.make_config(n_epochs=1), pairs(12)) as trainer:
        trainer.fit()
        assert all(p.grad is None for p in trainer.unused.parameters())
        return {name: small.weights(model) for name, model in trainer.named_models().items()}


class Misuses(small.Sharded):
    """Tries what would leave other ranks waiting, and goes on."""

    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        try:
            self.backward(None)
        except StepError as error:
            self.said = str(error)
        return super().training_step(batch, batch_idx)


class Ragged(small.Sharded):
    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        x, y, numbers = batch
        self.seen.append(numbers.tolist())
        loss = nn.functional.mse_loss(self.model(x), y)
        try:
            self.backward(loss)
        except StepError as error:
            self.said = str(error)
            self.backward(loss, weight=len(x))
        self.step(self.model, self.optimizer)
        return {}


def uneven_window() -> tuple[str, list[list[int]], dict[str, torch.Tensor]]:
    """11 samples at 2 ranks of 2: the last window holds three, two on one rank and one on the other."""
    with Ragged(small.make_config(n_epochs=1), DistributedDataLoader(small.Samples(11), 2, drop_last=False)) as trainer:
        trainer.fit()
        return trainer.said, trainer.seen, small.weights(trainer.model)


class NothingToLearn(small.Sharded):
    """Weighs a whole window with nothing, then one rank's part of another."""

    def weight_of(self, batch: small.Batch) -> torch.Tensor:
        is_nothing = self.global_step == 1 or (self.global_step == 2 and self.world.rank == 1)
        return torch.tensor(0 if is_nothing else 2)


def zero_weights() -> dict[str, Any]:
    found = {}
    for make_optimizer in (small.sgd, small.fused_adamw):
        data = pairs(16)
        with NothingToLearn(small.make_config(n_epochs=1), data, make_optimizer=make_optimizer) as trainer:
            trainer.fit()
            found[make_optimizer.__name__] = (trainer.global_step, trainer.skipped_steps, small.weights(trainer.model))
    return found


class OwnBackward(small.Spread):
    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        nn.functional.mse_loss(self.model(batch[0]), batch[1]).backward()
        self.step(self.model, self.optimizer)
        return {}

    def warn_once(self, key: str, message: str) -> None:
        self.told = message
        super().warn_once(key, message)


class Checked(small.Validates, small.Spread, dt.EvalMixin):
    validations = 0

    def pre_val_epoch(self) -> None:
        self.validations += 1


class StopsAfterValidation(Checked):
    """As early stopping does; one rank alone asks."""

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        if self.world.rank == 1 and self.current_epoch == 1:
            self.request_stop("it gets no better")


def stop_after_validation() -> tuple[int, int]:
    loader = pairs(12)
    trainer = small.fit(StopsAfterValidation(small.make_config(n_epochs=5), loader, DataLoader(small.Samples(4), 1)))
    return trainer.global_step, trainer.current_epoch


def dry_runs() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, training in {
        "overfit": {"overfit_batches": 2, "n_epochs": 2},
        "fast": {"fast_dev_run": True, "n_epochs": 2, "gradient_accumulation_steps": 2},
        "samples": {"max_samples": 9},
        "minutes": {"n_epochs": 1, "val_every_minutes": 1e-9, "val_every_n_epochs": None},
        "long epoch": {"n_epochs": 1, "train_steps_per_epoch": 5},
    }.items():
        data = pairs(12), DataLoader(small.Samples(4), 1)
        trainer = small.fit(Checked(small.make_config(**training), *data))
        found[name] = (trainer.seen, trainer.validations)
    return found


def again_and_again() -> dict[str, Any]:
    """fit twice, evaluate after it, and a second and third trainer in the same processes; two open at once."""
    loader = pairs(12)
    found: dict[str, Any] = {}
    trainer = Checked(small.make_config(n_epochs=1), loader, DataLoader(small.Samples(4), 2))
    trainer.fit()
    trainer.fit()
    found["steps"] = trainer.global_step
    found["evaluated"] = trainer.evaluate()
    with small.Sharded(small.make_config(n_epochs=1), pairs(12)) as inner:
        inner.fit()
        found["inner"] = small.weights(inner.model)
    found["after"] = trainer.evaluate()
    found["outer"] = small.weights(trainer.model)
    trainer.close()
    trainer.close()
    found["initialised"] = torch.distributed.is_initialized()
    with small.Sharded(small.make_config(n_epochs=1), pairs(12)) as third:
        third.fit()
        found["third"] = small.weights(third.model)
    return found


class Whole(small.Validates, small.Built, dt.DreamTrainer):
    """Everything mixed in, with the config's defaults."""

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return DataLoader(small.Samples(64), 8), DataLoader(small.Samples(7), 2)


def defaults() -> int:
    """All mixins, and a config that says nothing but its names."""
    name = f"defaults of {os.environ['WORLD_SIZE']}"
    with Whole(dt.DreamTrainerConfig(project="p", group="g", experiment=name)) as trainer:
        trainer.fit()
        return trainer.global_step


def everything() -> dict[str, Any]:
    return {
        "plain": plain_loader(small.Spread),
        "plain sharded": plain_loader(small.Sharded),
        "masks": dropout_masks(),
        "stop": small.fit(Stops(small.make_config(n_epochs=5), pairs(40))).global_step,
        "clock": small.fit(Naps(small.make_config(max_time=timedelta(seconds=0.2)), pairs(40))).global_step,
        "main": main_process_only(),
        "plain parts": plain_parts_of_a_sharded_trainer(),
        "none": small.fit(Misuses(small.make_config(n_epochs=1), pairs(12))).said,
        "uneven": uneven_window(),
        "own": small.fit(OwnBackward(small.make_config(n_epochs=1), pairs(12))).told,
        "again": again_and_again(),
        "zero": zero_weights(),
        "dry": dry_runs(),
        "early": stop_after_validation(),
        "defaults": defaults(),
    }


def alone() -> dict[str, Any]:
    return {"masks": dropout_masks(), "defaults": defaults()}


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_world(everything, 2)


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return run_world(alone, 1)[0]


@pytest.mark.pitfall(12)
@pytest.mark.parametrize("case", ["plain", "plain sharded"])
def test_a_plain_loader_is_split_over_the_ranks(two: list[dict[str, Any]], case: str) -> None:
    ranks = [found[case] for found in two]
    assert ranks[0]["seen"] == [[0, 1], [4, 5], [8, 9]] * 2
    assert ranks[1]["seen"] == [[2, 3], [6, 7], [10, 11]] * 2
    expected = small.by_hand([[batch] for batch in small.batches(3, size=4) * 2])
    for found in ranks:
        assert found["counters"] == (6, 24, 6, 6)
        small.assert_same_weights(found["weights"], expected)


@pytest.mark.pitfall(11)
def test_dropout_draws_differ_between_ranks_and_steps_and_come_again_in_the_next_run(one: Any, two: Any) -> None:
    masks = [found["masks"] for found in two]
    assert len(masks[0]) == 3
    drawn = {tuple(mask) for found in masks for mask in found}
    assert len(drawn) == 6
    assert one["masks"][:3] == masks[0], "rank 0 draws as a single process does"


def test_a_stop_of_one_rank_or_its_clock_ends_all_at_the_same_step(two: list[dict[str, Any]]) -> None:
    assert [found["stop"] for found in two] == [3, 3]
    assert [found["early"] for found in two] == [(6, 2), (6, 2)]  # asked for after a validation: no further step
    first, second = (found["clock"] for found in two)
    assert first == second
    assert 1 <= first <= 7  # a busy machine does one step in that time, and no machine all of them


def test_a_main_process_only_callback_runs_on_rank_0_and_its_collectives_raise(two: list[dict[str, Any]]) -> None:
    assert two[0]["main"][0] == [1, 2, 3]
    assert two[0]["main"][1].keys() == COMMUNICATE.keys()
    assert all("Watches.post_train_step, which is main_process_only" in text for text in two[0]["main"][1].values())
    assert two[1]["main"] == ([], {})


def test_parameters_no_wrapper_reduces_train_in_any_dtype_and_stay_where_unused(two: list[dict[str, Any]]) -> None:
    used, unused = (small.network(), *plain_parts()[:2]), plain_parts()[2]
    for model in (*used, unused):
        small.fill(model)
    start = small.weights(unused)
    small.train_on(decaying(*used), (summed_loss(*used, batch) for batch in small.batches(3, size=4)))
    for found in two:
        models = found["plain parts"]
        assert all(torch.equal(value, start[name]) for name, value in models["unused"].items())
        for name, model in zip(("model", "narrow", "wide"), used, strict=True):
            torch.testing.assert_close(models[name], small.weights(model), rtol=1e-5, atol=1e-6)  # one is in float32


def test_a_loss_of_none_is_refused_over_ranks_and_weight_0_named(two: list[dict[str, Any]]) -> None:
    assert all("weight=0" in found["none"] for found in two)


def test_a_backward_of_the_users_own_is_told_to_count_all_ranks_alike(two: list[dict[str, Any]]) -> None:
    assert all("2 ranks that all count alike" in found["own"] for found in two)


def test_an_unweighted_backward_over_unequal_batches_is_refused(two: list[dict[str, Any]]) -> None:
    assert all("weight=number of samples" in found["uneven"][0] for found in two)
    seen = [found["uneven"][1] for found in two]
    assert sorted(len(ranks[2]) for ranks in seen) == [1, 2]
    data = small.Samples(11)
    windows = [slice(0, 4), slice(4, 8), slice(8, 11)]
    expected = small.by_hand([[(data.x[rows], data.y[rows])] for rows in windows])
    for found in two:
        small.assert_same_weights(found["uneven"][2], expected)


def test_a_total_weight_of_zero_over_all_ranks_skips_the_step_everywhere(two: list[dict[str, Any]]) -> None:
    data = small.batches(4, size=4)
    half = tuple(part[:2] for part in data[2])
    for make_optimizer in (small.sgd, small.fused_adamw):
        expected = small.by_hand([[data[0]], [half], [data[3]]], make_optimizer=make_optimizer)
        for found in two:
            steps, skipped, trained = found["zero"][make_optimizer.__name__]
            assert (steps, skipped) == (4, 1)
            small.assert_same_weights(trained, expected)


@pytest.mark.pitfall(8)
def test_dry_runs_and_limits_hold_on_every_rank(two: list[dict[str, Any]]) -> None:
    for number, found in enumerate(two):
        own = [[0, 1], [4, 5], [8, 9]] if number == 0 else [[2, 3], [6, 7], [10, 11]]
        assert found["dry"]["overfit"] == (own[:2] * 2, 2)
        assert found["dry"]["fast"] == (own[:2], 1)  # a window
        assert found["dry"]["samples"][0] == own
        assert found["dry"]["minutes"] == (own, 3)
        assert found["dry"]["long epoch"] == ([*own, *own[:2]], 1)


@pytest.mark.pitfall(59)
@pytest.mark.pitfall(18)
def test_fit_twice_evaluate_after_it_and_further_trainers_work_in_the_same_processes(two: list[dict[str, Any]]) -> None:
    expected = small.by_hand([[batch] for batch in small.batches(3, size=4)])
    for found in two:
        again = found["again"]
        assert again["steps"] == 3
        assert again["evaluated"] == again["after"]
        assert not again["initialised"]
        for name in ("inner", "outer", "third"):
            small.assert_same_weights(again[name], expected)


@pytest.mark.pitfall(26)
def test_a_config_of_defaults_runs_on_a_machine_without_accelerator(one: Any, two: Any) -> None:
    assert one["defaults"] == 8
    assert [found["defaults"] for found in two] == [4, 4]


class Unsized:
    """Yields one sample per batch and does not know how many."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return (torch.full((1, small.WIDTH), float(i), dtype=torch.float64) for i in range(self.n))


class Uneven(small.Spread):
    window: tuple[float, ...] = ()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> dict[str, Any]:
        self.backward(self.model(batch).mean())
        self.window += (batch[0, 0].item(),)
        if not self.is_accumulating_gradients:
            self.step(self.model, self.optimizer)
            self.seen.append([*self.window])
            self.window = ()
        return {}


def train_uneven(lengths: tuple[int, ...], accumulation: int) -> dict[str, Any]:
    data = PerRankLoader(Unsized(lengths[int(os.environ["RANK"])]))
    trainer = small.fit(Uneven(small.make_config(n_epochs=2, gradient_accumulation_steps=accumulation), data))
    return {"windows": trainer.seen, "steps": trainer.global_step, "samples": trainer.samples_seen}


def train_each(cases: list[tuple[tuple[int, ...], int]]) -> list[dict[str, Any]]:
    return [train_uneven(*case) for case in cases]


@pytest.mark.pitfall(13)
@pytest.mark.parametrize("world_size", [2, 4])
def test_uneven_loaders_train_what_every_rank_has_and_end_together(world_size: int) -> None:
    lengths = {2: [(7, 10), (1, 5), (3, 3), (4, 9)], 4: [(7, 10, 11, 16), (1, 5, 5, 5)]}[world_size]
    cases = [(item, accumulation) for item in lengths for accumulation in (1, 3)]
    results = run_world(train_each, world_size, cases)
    for number, (item, accumulation) in enumerate(cases):
        common = min(item)
        one_pass = [
            [float(i) for i in range(start, min(start + accumulation, common))]
            for start in range(0, common, accumulation)
        ]
        for rank in results:
            assert rank[number]["windows"] == one_pass * 2, item
            assert rank[number]["steps"] == 2 * len(one_pass)
            assert rank[number]["samples"] == 2 * common * world_size


START, STEP = 1000.0, 100.0
DEVICES = dt.DeviceParameters(device="cpu", start_timeout_seconds=START, step_timeout_seconds=STEP)


class Timed(small.Validates, small.Spread, dt.CheckpointMixin):
    """Each step takes a minute by the clock of one rank, and no time by the others'."""

    def __init__(self, config: Any, slow_rank: int) -> None:
        super().__init__(config, *(DistributedDataLoader(small.Samples(length), 2) for length in (24, 4)))
        self.slow_rank, self.minutes = slow_rank, 0.0
        self.validated_at: list[int] = []
        self.saved_at: list[int] = []
        self.patience: list[float] = []
        self.timeouts: list[set[timedelta]] = []
        schedule = self._runtime.schedule
        schedule._clock = schedule.validations._clock = self.monotonic

    def monotonic(self) -> float:
        return 60 * self.minutes

    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        self.minutes += self.world.rank == self.slow_rank
        self.patience.append(self._runtime.session.watchdog.limit_seconds())
        if self.world.world_size > 1:
            self.timeouts.append(timeouts(self.world))
        return super().training_step(batch, batch_idx)

    def pre_val_epoch(self) -> None:
        self.validated_at.append(self.global_step)

    def on_save(self, path: Path) -> None:
        self.saved_at.append(int(path.name.removeprefix("step_")))


def timeouts(world: World) -> set[timedelta]:
    """How long collectives may take, of every group that the step path uses."""
    groups = [dist.group.WORLD, world.cpu_group, world.data_group, *world.mesh.get_all_groups()]
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups if group is not None}


def train_timed(slow_rank: int, minutes: float) -> Timed:
    saves = dt.CheckpointParameters(save_every_n_minutes=minutes, save_every_n_epochs=None, save_at_end=False)
    validations = {"val_every_minutes": minutes, "val_every_n_epochs": None}
    config = small.make_config(experiment=f"{slow_rank}", n_epochs=1, devices=DEVICES, checkpoint=saves, **validations)
    trainer = Timed(config, slow_rank)
    with mock.patch.object(checkpointing, "time", trainer):
        return small.fit(trainer)


@pytest.mark.parametrize(
    ("minutes", "validated", "saved"),
    [(1.0, [2, 4, 6, 8, 10, 12], list(range(1, 13))), (5.0, [6, 12], [5, 10]), (5.5, [7], [6, 12]), (13.0, [], [])],
)
def test_minutes_between_validations_and_saves_are_minutes(
    minutes: float, validated: list[int], saved: list[int]
) -> None:
    """For a validation the clock is read before a step that takes a minute, and the validation is after it."""
    trainer = train_timed(0, minutes)
    assert (trainer.validated_at, trainer.saved_at) == (validated, saved)


def on_two_ranks() -> list[Any]:
    by_rank_0, by_rank_1 = (train_timed(rank, 2.0) for rank in (0, 1))
    clocks = [(trainer.validated_at, trainer.saved_at) for trainer in (by_rank_0, by_rank_1)]
    return [*clocks, by_rank_0.timeouts, by_rank_0.patience]


def test_rank_0s_clock_decides_and_time_outs_are_long_until_the_first_step_is_done() -> None:
    for by_rank_0, by_rank_1, time_outs, patience in run_world(on_two_ranks, 2):
        assert by_rank_0 == ([3, 6], [2, 4, 6])
        assert by_rank_1 == ([], [])
        assert time_outs == [{timedelta(seconds=START)}] + [{timedelta(seconds=STEP)}] * 5
        assert patience == pytest.approx([0.9 * START] + [0.9 * STEP] * 5)


def laid() -> list[set[timedelta]]:
    world = World(replace(DEVICES, tensor_parallel=2), shard_by_default=False)
    found = [timeouts(world)]
    world.first_step_is_done()
    found.append(timeouts(world))
    world.close()
    return found


def test_groups_of_a_mesh_with_ranks_that_share_data_have_the_same_time_outs() -> None:
    assert run_world(laid, 2) == [[{timedelta(seconds=START)}, {timedelta(seconds=STEP)}]] * 2
