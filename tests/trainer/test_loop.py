"""The loop: when it ends, which batches it takes, what it counts; alone in one process."""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import dream_trainer as dt
from dream_trainer.events import sanity_checks
from tests.api import DataError, DistributedDataLoader, HookError, RankBatchSampler, StepError, WindowFeed
from tests.data.samples import KeepsNext
from tests.data.test_nested import Encoding, Graph
from tests.programs import run_programs
from tests.trainer import small
from tests.trainer.small import Alone, Samples, assert_same_weights, batches, by_hand, fit, make_config, weights


def train(data: Any, **training: Any) -> Alone:
    return fit(Alone(make_config(**training), data))


def firsts(trainer: Alone) -> list[int]:
    """Number of the first sample of each batch trained."""
    return [numbers[0] for numbers in trainer.seen]


class Learns(Alone):
    """What it learns, and from where its gradients come, differ."""

    how = ""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        assert self.local_batches < 1000, "endless"
        match self.how:
            case "never steps":
                return {}
            case "begins late":  # as a GAN may
                return super().training_step(batch, batch_idx) if batch_idx == 3 else {}
            case "loss.backward":
                mse_loss(self.model(batch[0]), batch[1]).backward()
            case "plain PyTorch":
                mse_loss(self.model(batch[0]), batch[1]).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                return {}
            case ".grad":
                self.model[1].bias.grad = torch.ones_like(self.model[1].bias)
        self.step(self.model, self.optimizer)
        return {}


def learn(how: str, **training: Any) -> Learns:
    trainer = Learns(make_config(**training), batches(5))
    trainer.how = how
    return fit(trainer)


@pytest.mark.pitfall(85)
def test_steps_that_nobody_counts_are_an_error_under_a_limit_in_steps() -> None:
    told = r"max_steps=3 never comes: of 1 trained.* instead of loss\.backward\(\), and self\.step\(model, optimizer\)"
    with pytest.raises(StepError, match=told):
        learn("plain PyTorch", max_steps=3)
    assert learn("plain PyTorch", max_steps=3, n_epochs=2).local_batches == 10


@pytest.mark.pitfall(85)
def test_a_run_that_never_steps_is_an_error_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanity_checks, "BATCHES_WITHOUT_STEP", 40)
    with pytest.raises(StepError, match="max_steps=3 never comes: of 40 trained"):
        learn("never steps", max_steps=3)
    assert learn("never steps", n_epochs=9).local_batches == 45


@pytest.mark.pitfall(85)
def test_an_order_that_yields_too_little_is_an_error() -> None:
    whole = RankBatchSampler.indices

    def short(self: RankBatchSampler, epoch: int, first: int, end: int) -> Iterator[list[int]]:
        return iter(list(whole(self, epoch, first, end))[:-1])

    taken = iter(range(100))  # an endless run takes more windows
    take = WindowFeed.take

    def counted(self: WindowFeed) -> Any:
        next(taken)
        return take(self)

    with (
        mock.patch.object(RankBatchSampler, "indices", short),
        mock.patch.object(WindowFeed, "take", counted),
        pytest.raises(DataError, match="ended in a window, with 0 of 1 batches"),
    ):
        train(DistributedDataLoader(Samples(8), 2), n_epochs=1)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("never steps", ["training_step"]),
        ("begins late", []),
        ("no gradient", ["gradient"]),
        ("loss.backward", []),
        (".grad", []),
    ],
)
def test_no_step_or_no_gradient_is_said_once(how: str, said: list[str], caplog: pytest.LogCaptureFixture) -> None:
    learn(how, n_epochs=3)
    warnings = [text for text in caplog.messages if "self.step" in text]
    assert len(warnings) == len(said)
    for word, text in zip(said, warnings, strict=True):
        assert word in text
        assert "self.backward(loss)" in text


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({"n_epochs": 2}, 10),
        ({"n_epochs": 0}, 0),
        ({"max_steps": 3}, 3),
        ({"max_steps": 0}, 0),
        ({"max_samples": 0}, 0),
        ({"max_samples": 7}, 4),
        ({"n_epochs": 2, "max_steps": 9, "max_samples": 5}, 3),
        ({}, 5),
        ({"n_epochs": 3, "train_steps_per_epoch": 0}, 0),
    ],
    ids=str,
)
@pytest.mark.pitfall(7)
def test_training_stops_at_the_first_limit_and_zero_is_a_limit(limits: dict[str, Any], steps: int) -> None:
    trainer = train(batches(5), **limits)
    assert trainer.global_step == len(trainer.norms) == steps
    assert trainer.samples_seen == 2 * steps
    assert_same_weights(weights(trainer.model), by_hand([[batch] for batch in (batches(5) * 3)[:steps]]))


def test_max_time_stops_after_the_step_in_which_it_passes() -> None:
    ends: list[float] = []

    class Slow(Alone):
        def post_train_step(self) -> None:
            time.sleep(0.4)
            ends.append(time.monotonic())

    began = time.monotonic()
    trainer = fit(Slow(make_config(max_time=timedelta(seconds=1.8)), batches(20)))
    assert ends[-1] - began >= 1.8
    # However long a loaded machine takes for each: five naps pass the limit.
    assert trainer.global_step == len(ends) <= 5


@pytest.mark.pitfall(41)
def test_a_run_whose_time_is_over_trains_no_further_step_when_it_is_started_again() -> None:
    with Alone(make_config(max_time=timedelta(seconds=0.01)), batches(5)) as trainer:
        trainer.fit()
        steps = trainer.global_step
        trainer.fit()
    assert trainer.global_step == steps


@pytest.mark.parametrize("wrap", [list, lambda data: DataLoader(Samples(10), batch_size=2)], ids=["iterable", "loader"])
@pytest.mark.pitfall(8)
def test_an_epoch_shorter_than_the_data_goes_on_where_the_last_one_ended(wrap: Any) -> None:
    trainer = train(wrap(batches(5)), n_epochs=4, train_steps_per_epoch=2)
    assert firsts(trainer) == [0, 2, 4, 6, 8, 0, 2, 4]
    assert trainer.current_epoch == 4


@pytest.mark.pitfall(8)
def test_a_steps_per_epoch_beyond_the_data_never_mixes_two_passes_in_one_window() -> None:
    trainer = train(batches(5), n_epochs=1, train_steps_per_epoch=4, gradient_accumulation_steps=2)
    data = batches(5)
    windows = [data[0:2], data[2:4], data[4:5], data[0:2]]
    assert firsts(trainer) == [batch[2][0].item() for window in windows for batch in window]
    assert_same_weights(weights(trainer.model), by_hand(windows))


class Counting:
    def __init__(self, count: int) -> None:
        self.data, self.pulled, self.passes = batches(count), 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for batch in self.data:
            self.pulled += 1
            yield batch


@pytest.mark.pitfall(8)
def test_no_batch_is_pulled_beyond_the_end_of_an_epoch() -> None:
    loader = Counting(4)
    trainer = train(loader, n_epochs=3)
    assert loader.passes == 3
    assert loader.pulled == len(trainer.seen) == 12


@pytest.mark.pitfall(8)
def test_no_sample_is_loaded_beyond_the_last_step() -> None:
    loaded: list[int] = []

    class Watched(Samples):
        def __getitem__(self, index: int) -> Any:
            loaded.append(index)
            return super().__getitem__(index)

    train(DataLoader(Watched(20), batch_size=2), max_steps=3, gradient_accumulation_steps=2)
    assert loaded == list(range(12))


def test_a_chosen_batch_size_that_the_loader_does_not_have_is_said(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(Samples(4), batch_size=2)
    for chosen in ({}, {"train_batch_size": 2}):
        train(loader, n_epochs=1, **chosen)
        assert "train_batch_size" not in caplog.text
    train(loader, n_epochs=1, train_batch_size=4)
    assert caplog.messages.count("the training loader's batch size 2 counts, not train_batch_size=4.") == 1


@pytest.mark.pitfall(10)
@pytest.mark.parametrize(
    ("data", "told"),
    [
        *(
            (data, r"0 (batches|samples)|1 samples")
            for data in ([], DataLoader(Samples(0), batch_size=2), DataLoader(Samples(1), 2, drop_last=True))
        ),
        (Counting(0), "yielded no batch"),
        (None, "NoneType is no iterable of batches"),
    ],
)
def test_training_data_without_a_batch_is_an_error_that_says_what_to_look_at(data: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        train(data, max_steps=1)


@pytest.mark.pitfall(10)
@pytest.mark.pitfall(1)
@pytest.mark.parametrize(("count", "accumulation"), [(1, 1), (3, 8)])
def test_one_batch_or_less_than_a_window_makes_one_step_per_epoch(count: int, accumulation: int) -> None:
    trainer = train(batches(count), n_epochs=3, gradient_accumulation_steps=accumulation)
    assert trainer.global_step == 3
    assert_same_weights(weights(trainer.model), by_hand([batches(count)] * 3))


def order_of_two_epochs(seed: int) -> list[int]:
    torch.seed()  # the global generator changes nothing
    trainer = fit(Alone(make_config(seed=seed, n_epochs=2), DataLoader(Samples(12), batch_size=2, shuffle=True)))
    return [number for numbers in trainer.seen for number in numbers]


@pytest.mark.pitfall(11)
def test_each_epoch_has_an_order_of_its_own_that_the_seed_decides() -> None:
    order = order_of_two_epochs(seed=1)
    assert sorted(order[:12]) == sorted(order[12:]) == list(range(12))
    assert order[:12] != order[12:]
    assert order == order_of_two_epochs(seed=1)
    assert order != order_of_two_epochs(seed=2)


def noting(event: str) -> Any:
    """A listener that writes down the counters at its event."""

    def method(self: Any, trainer: Any, *args: Any) -> None:
        counters = trainer.global_step, trainer.batch_idx, trainer.current_epoch, trainer.samples_seen
        self.lines.append((event, *counters))

    return method


NOTED = ("pre_epoch", "pre_train_batch", "post_optimizer_step", "post_train_batch", "post_train_step")
NOTED += ("post_val_epoch", "post_epoch")


class Checked(small.Validates, Alone):
    pass


@pytest.mark.pitfall(6)
def test_counters_show_completed_work_at_every_event() -> None:
    diary = type("Diary", (dt.Callback,), {event: noting(event) for event in NOTED} | {"lines": []})()
    config = make_config(n_epochs=2, gradient_accumulation_steps=2, callbacks=[diary])
    trainer = fit(Checked(config, batches(3), batches(1)))
    expected: list[tuple[str, int, int, int, int]] = []
    for epoch in range(2):
        step, samples = 2 * epoch, 6 * epoch
        expected += [
            ("pre_epoch", step, 0, epoch, samples),
            ("pre_train_batch", step, 0, epoch, samples),
            ("post_train_batch", step, 1, epoch, samples),
            ("pre_train_batch", step, 1, epoch, samples),
            ("post_optimizer_step", step, 1, epoch, samples),
            ("post_train_batch", step + 1, 2, epoch, samples + 4),
            ("post_train_step", step + 1, 2, epoch, samples + 4),
            ("pre_train_batch", step + 1, 2, epoch, samples + 4),
            ("post_optimizer_step", step + 1, 2, epoch, samples + 4),
            ("post_train_batch", step + 2, 3, epoch, samples + 6),
            ("post_train_step", step + 2, 3, epoch, samples + 6),
            ("post_val_epoch", step + 2, 3, epoch, samples + 6),
            ("post_epoch", step + 2, 0, epoch + 1, samples + 6),
        ]
    assert diary.lines == expected
    assert trainer.local_batches == 6


def test_planned_steps_are_known_before_training() -> None:
    plans = [
        ({"n_epochs": 3, "gradient_accumulation_steps": 2}, batches(5), 9, 3),
        ({"n_epochs": 3, "max_steps": 4}, batches(5), 4, 5),
        ({"max_samples": 9}, DataLoader(Samples(10), batch_size=2), 5, 5),
        ({"n_epochs": 2, "train_steps_per_epoch": 3}, Counting(5), 6, 3),
        ({"max_time": timedelta(0)}, batches(5), None, 5),
        ({"n_epochs": 2}, Counting(5), None, None),
        ({"fast_dev_run": True}, batches(5), 1, 1),
    ]
    for training, data, steps, per_epoch in plans:
        trainer = train(data, **training)
        assert (trainer.total_steps, trainer.steps_per_epoch) == (steps, per_epoch), training


@pytest.mark.pitfall(18)
@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_samples": 4}, "nothing to train at step 2: 4 of 4 samples are done. Raise max_samples to continue"),
        (
            {"n_epochs": 2, "max_steps": 8},
            "nothing to train at step 8: 2 of 2 epochs and 8 of 8 steps are done. Raise n_epochs and max_steps",
        ),
        ({"fast_dev_run": True}, "Use fast_dev_run=False to continue"),
    ],
    ids=str,
)
def test_fit_of_a_finished_run_returns_at_once_and_says_once_which_limit_is_reached(
    limits: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Alone(make_config(**limits), batches(4)) as trainer:
        trainer.fit()
        assert "nothing to train" not in caplog.text
        step, before = trainer.global_step, weights(trainer.model)
        trainer.fit()
        trainer.fit()
        assert trainer.global_step == step
        assert_same_weights(before, trainer.model)
    (text,) = [text for text in caplog.messages if "nothing to train" in text]
    assert said in text
    assert text.endswith("or use another experiment name.")


def test_a_stop_request_ends_training_after_the_window_and_fit_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class StopsOnce(Alone):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            if self.global_step == 2:
                self.request_stop("enough for now")
            return super().training_step(batch, batch_idx)

    with caplog.at_level(logging.INFO, "dream_trainer"), StopsOnce(make_config(n_epochs=2), batches(5)) as trainer:
        trainer.fit()
        assert trainer.global_step == 3
        trainer.fit()
    assert "stopping at step 3: enough for now" in caplog.messages
    assert trainer.global_step == 10
    assert_same_weights(weights(trainer.model), by_hand([[batch] for batch in batches(5) * 2]))


def test_a_closed_trainer_says_so() -> None:
    trainer = train(batches(2), n_epochs=1)
    with pytest.raises(StepError, match="closed"):
        trainer.fit()


def test_windows_without_a_step_validate_and_save_no_second_time_at_the_same_step() -> None:
    class Idles(Checked, dt.CheckpointMixin):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            if batch_idx in (0, 1, 4, 5, 8):
                return {}
            return super().training_step(batch, batch_idx)

        def pre_val_epoch(self) -> None:
            done.append(("validates", self.global_step, self.batch_idx))

        def on_save(self, path: Path) -> None:
            done.append(("saves", self.global_step, self.batch_idx))

    done: list[tuple[str, int, int]] = []
    checkpoint = dt.CheckpointParameters(save_every_n_steps=2, save_every_n_epochs=None, async_save=False)
    config = make_config(max_steps=5, val_every_n_steps=2, val_every_n_epochs=None, checkpoint=checkpoint)
    trainer = fit(Idles(config, batches(12), batches(1)))
    assert trainer.samples_seen == 20
    assert done == [*(("validates", 2, 4), ("saves", 2, 4)), *(("validates", 4, 8), ("saves", 4, 8)), ("saves", 5, 10)]


class Leaves(Alone):
    def teardown(self) -> None:
        print("teardown")


def test_a_trainer_that_nobody_closed_is_torn_down_when_the_interpreter_ends(tmp_path: Path) -> None:
    code = (
        "from tests.trainer.test_loop import Leaves, batches, make_config\n"
        "Leaves(make_config(max_steps=1), batches(2)).fit()\n"
        "print('trained')\n"
    )
    (ended,) = run_programs(code, 1, tmp_path, dict(os.environ), 60)
    assert ended.output.split() == ["trained", "teardown"]


def test_overfit_batches_trains_the_same_first_batches_in_every_epoch() -> None:
    trainer = train(DataLoader(Samples(20), 2, shuffle=True), n_epochs=3, overfit_batches=2)
    assert len(trainer.seen) == 6
    assert trainer.seen[:2] == trainer.seen[2:4] == trainer.seen[4:]
    assert trainer.seen[0] != trainer.seen[1]


@pytest.mark.parametrize("breaks", [False, True])
def test_deterministic_holds_during_fit_and_not_after(breaks: bool) -> None:
    class Watch(Alone):
        def post_train_step(self) -> None:
            assert torch.are_deterministic_algorithms_enabled()
            if breaks:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) if breaks else contextlib.nullcontext():
        fit(Watch(make_config(max_steps=2, deterministic=True), batches(2)))
    assert not torch.are_deterministic_algorithms_enabled()


KINDS = {
    "nested": (lambda x, y: {"in": [{"x": x}], "out": (y, "text", None)}, lambda b: (b["in"][0]["x"], b["out"][0])),
    "BatchEncoding": (lambda x, y: Encoding({"x": x, "y": y}), lambda b: (b["x"], b["y"])),
    "object": (lambda x, y: Graph(torch.cat((x, y), 1)), lambda b: b.nodes.split((small.WIDTH, 1), 1)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.pitfall(19)
def test_a_batch_of_any_structure_reaches_the_step_as_what_it_was(kind: str) -> None:
    wrap, unwrap = KINDS[kind]

    class Takes(Alone):
        def batch_size(self, batch: Any) -> int:
            return 2

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            assert type(batch) is type(wrap(*data[0][:2]))
            x, y = unwrap(batch)
            assert x.device == self.world.device
            self.backward(mse_loss(self.model(x), y))
            self.step(self.model, self.optimizer)
            return {}

    data = batches(3)
    trainer = fit(Takes(make_config(n_epochs=1), [wrap(x, y) for x, y, _ in data]))
    assert_same_weights(weights(trainer.model), by_hand([[batch] for batch in data]))


def test_move_batch_and_batch_size_are_the_users_to_change() -> None:
    class Own(Alone):
        def move_batch(self, batch: Any, device: torch.device) -> Any:
            x, y, numbers = batch
            return x * 2, y, numbers

        def batch_size(self, batch: Any) -> int:
            return 100

    trainer = fit(Own(make_config(n_epochs=1), batches(3)))
    assert trainer.samples_seen == 300
    assert_same_weights(weights(trainer.model), by_hand([[(x * 2, y)] for x, y, _ in batches(3)]))


@pytest.mark.parametrize(
    ("hook", "told"),
    [("configure_dataloaders", r"pair \(train, val\)"), ("training_step", "training_step returned float")],
)
def test_a_hook_that_returns_something_else_is_an_error_that_says_so(hook: str, told: str) -> None:
    cls = type("Returns", (Alone,), {hook: lambda self, *args: 1.0})
    with pytest.raises(HookError, match=told):
        cls(make_config(), batches(2)).fit()


class WithState(KeepsNext):
    def __iter__(self) -> Iterator[Any]:
        while self.next < 6:
            self.next += 1
            yield batches(6)[self.next - 1]
        self.next = 0


class FailsInStepThree(Alone):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 2:
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)


@pytest.mark.pitfall(75)
def test_after_an_exception_only_a_kept_state_lets_a_trainer_go_on() -> None:
    trainer = type("Keeps", (FailsInStepThree, dt.CheckpointMixin), {})(make_config(n_epochs=1), WithState())
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            trainer.fit()
    assert trainer.seen == [[0, 1], [2, 3]]
    trainer = FailsInStepThree(make_config(n_epochs=1), WithState())
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    with pytest.raises(DataError, match="add CheckpointMixin"):
        trainer.fit()
    assert trainer.seen == [[0, 1], [2, 3]]
