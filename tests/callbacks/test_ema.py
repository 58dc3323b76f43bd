"""EMA against averages kept by hand in float64; validation with them, and training that does not notice them."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from tests.api import SWA, CheckpointError, ConfigError, DistributedDataLoader, HookError, StepError, tensor_metadata
from tests.callbacks.averages import (
    SAVED_WINDOWS,
    Poisoned,
    Saved,
    Validated,
    averaged,
    by_hand_averaged,
    in_windows,
    loss_with,
    saved_config,
)
from tests.operations import Operations
from tests.trainer import small
from tests.trainer.arithmetic import same_bits
from tests.worlds import run_world

pytestmark = pytest.mark.pitfall(35)


# -- the arithmetic


@pytest.mark.parametrize("accumulation", [1, 2], ids=["1 micro-batch", "2 micro-batches"])
@pytest.mark.parametrize(
    "options",
    [
        {"decay": 0.999},
        {"decay": 0.5},
        {"decay": 0.9, "warm_up": False},
        {"decay": 0.9, "every_n_steps": 2},
        {"decay": 0.9, "every_n_steps": 2, "device": "cpu"},
    ],
    ids=str,
)
def test_the_average_is_the_one_kept_by_hand(options: dict[str, Any], accumulation: int) -> None:
    ema, data = dt.EMA(**options), small.batches(14)
    config = small.make_config(n_epochs=1, callbacks=[ema], gradient_accumulation_steps=accumulation)
    trainer = small.fit(small.Alone(config, data))
    windows = in_windows(data, accumulation)
    truth = {name: value for name, value in options.items() if name not in ("every_n_steps", "device")}
    small.assert_same_weights(averaged(ema), by_hand_averaged(windows, every=options.get("every_n_steps", 1), **truth))
    small.assert_same_weights(small.weights(trainer.model), small.by_hand(windows))


def test_it_starts_from_the_weights_that_training_starts_from() -> None:
    """Not from those that were there when it was set up, evaluated or checked."""

    class Loads(small.Validates, small.Alone, dt.EvalMixin):
        def setup(self) -> None:
            super().setup()
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.normal_()

        def pre_fit(self) -> None:
            small.fill(self.model)

    ema, data = dt.EMA(0.9, warm_up=False), small.batches(5)
    trainer = Loads(small.make_config(n_epochs=1, num_sanity_val_steps=1, callbacks=[ema]), data, small.batches(2))
    with trainer:
        trainer.evaluate()
        assert same_bits(averaged(ema), small.weights(trainer.model))
        trainer.fit()
    small.assert_same_weights(averaged(ema), by_hand_averaged(in_windows(data), decay=0.9, warm_up=False))


class SeveralOptimizers(small.Alone):
    """Weights and biases have an optimizer each, stepped together or one after the other."""

    together = True

    def setup(self) -> None:
        super().setup()
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD([p for p in parameters if p.dim() > 1], lr=0.1, momentum=0.9)
        self.second = torch.optim.SGD([p for p in parameters if p.dim() <= 1], lr=0.1, momentum=0.9)

    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        self.backward(mse_loss(self.model(batch[0]), batch[1]))
        if not self.is_accumulating_gradients:
            if self.together:
                self.step(self.model, [self.optimizer, self.second])
            else:
                self.step(self.model, self.optimizer)
                self.step(self.model, self.second)
        return {}


class Looks(dt.Callback):
    """Reads the averages between two steps of a window."""

    def post_optimizer_step(self, trainer: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        trainer.get_callback(dt.EMA).averaged("model")


@pytest.mark.parametrize("callbacks", [[], [Looks()]], ids=["", "looked at inside"])
@pytest.mark.parametrize("together", [True, False], ids=["one step call", "two step calls"])
def test_two_optimizers_of_one_model_move_the_average_once(together: bool, callbacks: list[dt.Callback]) -> None:
    ema, data = dt.EMA(0.9), small.batches(8)
    config = small.make_config(n_epochs=1, callbacks=[ema, *callbacks], gradient_accumulation_steps=2)
    trainer = SeveralOptimizers(config, data)
    trainer.together = together
    small.fit(trainer)
    small.assert_same_weights(averaged(ema), by_hand_averaged(in_windows(data, 2), decay=0.9))


@pytest.mark.usefixtures("late_norms")
@pytest.mark.parametrize(
    "make_optimizer", [small.sgd, small.fused_adamw], ids=["skipped by the host", "skipped on the device"]
)
@pytest.mark.parametrize("what", ["poison", "empty"])
def test_a_skipped_step_does_not_move_the_average(make_optimizer: Any, what: str) -> None:
    ema, on_host, data = dt.EMA(0.9), dt.EMA(0.9, validate=False, device="cpu"), small.batches(8)
    config = small.make_config(n_epochs=1, callbacks=[ema, on_host], on_nonfinite="skip")
    trainer = Poisoned(config, data, make_optimizer=make_optimizer)
    setattr(trainer, what, (1, 4, 5))
    small.fit(trainer)
    assert trainer.skipped_steps == 3
    truth = by_hand_averaged(in_windows(data), decay=0.9, skipped=(1, 4, 5), make_optimizer=make_optimizer)
    small.assert_same_weights(averaged(ema), truth)
    assert same_bits(averaged(on_host), averaged(ema))
    assert ema.state_dict()["updates"] == on_host.state_dict()["updates"] == {"model": 5}


def test_a_window_that_is_run_again_moves_the_average_once() -> None:
    class Retried(Poisoned):
        def step(self, *args: Any) -> Tensor:
            self.poison = ()  # bad at the first try alone
            return super().step(*args)

    ema, data = dt.EMA(0.9), small.batches(4)
    trainer = Retried(small.make_config(n_epochs=1, callbacks=[ema], on_nonfinite="retry"), data)
    trainer.poison = (1,)
    small.fit(trainer)
    small.assert_same_weights(averaged(ema), by_hand_averaged(in_windows(data), decay=0.9))


class RecordsMoves(dt.EMA):
    """Records the operations of each update."""

    moves: list[list[str]]

    def post_train_step(self, trainer: Any) -> None:
        with Operations() as operations:
            super().post_train_step(trainer)
        self.moves = [*vars(self).get("moves", []), operations.names]


def test_an_update_that_the_device_may_leave_out_waits_for_nothing() -> None:
    ema = RecordsMoves(0.9)
    config = small.make_config(n_epochs=1, callbacks=[ema], on_nonfinite="skip")
    small.fit(small.Alone(config, small.batches(3), make_optimizer=small.fused_adamw))
    for operations in ema.moves:
        assert "_foreach_lerp_" in operations
        assert not {"_local_scalar_dense", "is_nonzero", "equal", "nonzero"} & set(operations)


# -- what is averaged


class Mixed(nn.Module):
    """A frozen layer, tied weights, batch norm with buffers, a parameter in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 3).double().requires_grad_(False)
        self.norm = nn.BatchNorm1d(3).double()
        self.first = nn.Linear(3, 3, bias=False).double()
        self.tied = nn.Linear(3, 3, bias=False).double()
        self.tied.weight = self.first.weight
        self.narrow = nn.Parameter(torch.full((4,), 1.0, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.first(self.norm(self.frozen(x)))).sum(1, keepdim=True) + self.narrow.double().sum()


class TrainsMixed(small.Alone):
    def setup(self) -> None:
        self.model = Mixed()
        self.teacher = small.network().requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)


def test_trained_parameters_are_averaged_and_nothing_else() -> None:
    ema = dt.EMA(0.9)
    trainer = small.fit(TrainsMixed(small.make_config(n_epochs=1, callbacks=[ema]), small.batches(4)))
    assert list(ema.averaged("model")) == ["narrow", "norm.weight", "norm.bias", "first.weight"]
    with pytest.raises(KeyError, match="teacher"):
        ema.averaged("teacher")
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    with ema.averaged_weights():
        changed = {name for name, tensor in trainer.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed <= {"narrow", "norm.weight", "norm.bias", "first.weight", "tied.weight"}
    assert "tied.weight" in changed
    assert same_bits(dict(trainer.model.state_dict()), before)


def test_a_narrow_parameter_is_averaged_in_float32_where_small_steps_count() -> None:
    class Jumps(TrainsMixed):
        def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
            result = super().training_step(batch, batch_idx)
            with torch.no_grad():
                self.model.narrow.fill_(2.0)
            return result

    ema = dt.EMA(0.999, warm_up=False)
    small.fit(Jumps(small.make_config(n_epochs=1, callbacks=[ema]), small.batches(8)))
    found = ema.averaged("model")["narrow"]
    assert found.dtype == torch.float32
    # In bfloat16 1 + 0.001 is 1, so the average would stay where it is.
    torch.testing.assert_close(found, torch.full((4,), 2.0 - 0.999**8), rtol=1e-5, atol=0)


class Adversaries(small.Alone):
    """Two models of which the second steps in every other window."""

    def setup(self) -> None:
        super().setup()
        self.other = small.network()
        small.fill(self.other)
        self.other_optimizer = small.sgd(self.other)

    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        for index, model, optimizer in ((1, self.model, self.optimizer), (2, self.other, self.other_optimizer)):
            if (batch_idx + 1) % index == 0:
                self.backward(mse_loss(model(batch[0]), batch[1]), model=model)
                self.step(model, optimizer)
        return {}


def test_each_model_moves_its_average_when_it_steps() -> None:
    both, one, data = dt.EMA(0.9), dt.EMA(0.5, models=["other"], validate=False), small.batches(6)
    small.fit(Adversaries(small.make_config(n_epochs=1, callbacks=[both, one]), data))
    small.assert_same_weights(averaged(both), by_hand_averaged(in_windows(data), decay=0.9))
    other = in_windows(data)[1::2]
    small.assert_same_weights(averaged(both, "other"), by_hand_averaged(other, decay=0.9))
    small.assert_same_weights(averaged(one, "other"), by_hand_averaged(other, decay=0.5))
    with pytest.raises(KeyError, match="averaged are \\['other'\\]"):
        one.averaged("model")


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([dt.EMA(models=["modle"])], "'modle'.*Trained are \\['model'\\]"),
        ([dt.EMA(0.9), SWA(1)], "two averages would validate \\['model'\\]"),
    ],
    ids=["no such model", "two that validate"],
)
def test_what_cannot_work_ends_the_setup_with_an_error(callbacks: list[dt.Callback], message: str) -> None:
    with (
        small.Alone(small.make_config(n_epochs=1, callbacks=callbacks), small.batches(1)) as trainer,
        pytest.raises(ConfigError) as info,
    ):
        trainer.fit()
    assert info.match(message)


def test_there_are_no_averages_before_a_run() -> None:
    with pytest.raises(HookError, match="fit"):
        dt.EMA().averaged("model")


# -- validation


class Sees(dt.Callback):
    """Copies the weights at each event around validations."""

    def __init__(self, order: int = 0) -> None:
        self.order = order
        self.seen: dict[str, list[dict[str, Tensor]]] = {}

    def _note(self, event: str, trainer: Any) -> None:
        self.seen.setdefault(event, []).append(small.weights(trainer.model))

    def post_train_step(self, trainer: Any) -> None:
        self._note("train", trainer)

    def pre_val_epoch(self, trainer: Any) -> None:
        self._note("start", trainer)

    def pre_val_batch(self, trainer: Any, batch: Any, batch_idx: int) -> None:
        self._note("batch", trainer)

    def post_val_epoch(self, trainer: Any, metrics: dict[str, float]) -> None:
        self._note("end", trainer)


@pytest.mark.parametrize("order", [-1, 1], ids=["seen before", "seen after"])
@pytest.mark.parametrize("is_first", [True, False], ids=["listed first", "listed last"])
def test_a_validation_sees_the_averages_and_training_does_not_notice(order: int, is_first: bool) -> None:
    ema, sees, data = dt.EMA(0.9), Sees(order), small.batches(6)
    callbacks = [ema, sees] if is_first else [sees, ema]
    trainer = small.fit(
        Validated(small.make_config(n_epochs=1, val_every_n_steps=2, callbacks=callbacks), data, small.batches(3))
    )
    for number, step in enumerate((2, 4, 6)):
        truth = by_hand_averaged(in_windows(data[:step]), decay=0.9)
        small.assert_same_weights(sees.seen["start"][number], truth)
        small.assert_same_weights(sees.seen["batch"][3 * number + 2], truth)
        assert trainer.metrics[number]["val/loss"] == pytest.approx(loss_with(truth, 6), rel=1e-12)
        assert same_bits(sees.seen["end"][number], sees.seen["train"][step - 1])
    small.assert_same_weights(averaged(ema), by_hand_averaged(in_windows(data), decay=0.9))
    without = small.fit(Validated(small.make_config(n_epochs=1, val_every_n_steps=2), data, small.batches(3)))
    assert same_bits(small.weights(trainer.model), small.weights(without.model))


class Breaks(Validated):
    def validation_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 1:
            raise ValueError("broken on purpose")
        return super().validation_step(batch, batch_idx)


def test_an_exception_in_a_validation_leaves_the_weights() -> None:
    ema, data = dt.EMA(0.9), small.batches(4)
    trainer = Breaks(small.make_config(n_epochs=1, callbacks=[ema]), data, small.batches(2))
    with trainer, pytest.raises(ValueError, match="on purpose"):
        trainer.fit()
    small.assert_same_weights(small.weights(trainer.model), small.by_hand(in_windows(data)))
    small.assert_same_weights(averaged(ema), by_hand_averaged(in_windows(data), decay=0.9))


def test_evaluate_uses_the_averages_unless_others_were_chosen_by_hand() -> None:
    data = small.batches(6)
    fast, slow = dt.EMA(0.5, warm_up=False), dt.EMA(0.9, warm_up=False, validate=False)
    config = small.make_config(n_epochs=1, val_every_n_epochs=None, callbacks=[fast, slow])
    with Validated(config, data, small.batches(2)) as trainer:
        trainer.fit()
        before = small.weights(trainer.model)
        losses = {
            decay: loss_with(by_hand_averaged(in_windows(data), decay=decay, warm_up=False), 4) for decay in (0.5, 0.9)
        }
        assert trainer.evaluate()["val/loss"] == pytest.approx(losses[0.5], rel=1e-12)
        with slow.averaged_weights():
            assert trainer.evaluate()["val/loss"] == pytest.approx(losses[0.9], rel=1e-12)
            with slow.averaged_weights(), fast.averaged_weights():
                assert same_bits(small.weights(trainer.model), averaged(fast))
            assert same_bits(small.weights(trainer.model), averaged(slow))
        with pytest.raises(KeyError), slow.averaged_weights():
            raise KeyError
        assert same_bits(small.weights(trainer.model), before)


class Stops(small.Alone):
    """Stops after its first step, so that it may be trained on, and tries to average inside a window."""

    ema: dt.EMA

    def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
        self.request_stop()
        with pytest.raises(StepError, match="inside an accumulation window"), self.ema.averaged_weights():
            pass
        return super().training_step(batch, batch_idx)


def test_nothing_is_trained_while_the_averages_stand_in() -> None:
    ema = dt.EMA(0.9)
    trainer = Stops(small.make_config(n_epochs=1, callbacks=[ema]), small.batches(3))
    trainer.ema = ema
    with trainer:
        trainer.fit()
        with pytest.raises(StepError, match="Leave the `with`"), ema.averaged_weights():
            trainer.fit()


# -- checkpoints


@pytest.mark.parametrize("stop", [1, 3, 6])
@pytest.mark.parametrize("options", [{}, {"every_n_steps": 2}, {"warm_up": False}, {"device": "cpu"}], ids=str)
def test_stopped_and_resumed_is_the_straight_run_bit_for_bit(options: dict[str, Any], stop: int) -> None:
    for steps in (stop, 8):
        ema, second = dt.EMA(0.9, **options), dt.EMA(0.5, validate=False)
        trainer = small.fit(Saved(saved_config(steps, ema, second)))
    straight, other = dt.EMA(0.9, **options), dt.EMA(0.5, validate=False)
    without = small.fit(Saved(saved_config(8, straight, other, experiment="straight")))
    assert same_bits(averaged(ema), averaged(straight))
    assert same_bits(averaged(second), averaged(other))
    assert same_bits(small.weights(trainer.model), small.weights(without.model))
    assert ema.state_dict() == straight.state_dict()


@pytest.mark.usefixtures("late_norms")
def test_the_averages_of_a_run_that_skipped_on_the_device_resume_too() -> None:
    class Bad(Saved):
        def training_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
            batch = (batch[0] * (float("nan") if self.global_step in (1, 5) else 1.0), *batch[1:])
            return super().training_step(batch, batch_idx)

    for steps in (3, 8):
        ema = dt.EMA(0.9)
        small.fit(Bad(saved_config(steps, ema, on_nonfinite="skip"), make_optimizer=small.fused_adamw))
    truth = by_hand_averaged(SAVED_WINDOWS, decay=0.9, skipped=(2, 6), make_optimizer=small.fused_adamw)
    small.assert_same_weights(averaged(ema), truth)


@pytest.mark.parametrize(("steps", "every"), [(8, 1), (7, 2)], ids=["after an update", "between two updates"])
def test_going_back_to_a_checkpoint_takes_the_averages_back(steps: int, every: int) -> None:
    ema = dt.EMA(0.9, every_n_steps=every)
    with Saved(saved_config(steps, ema, checkpoint=dt.CheckpointParameters(save_every_n_steps=2))) as trainer:
        trainer.fit()
        trainer.load_checkpoint(trainer.checkpoints()[0].path)
        small.assert_same_weights(averaged(ema), by_hand_averaged(SAVED_WINDOWS[:2], decay=0.9, every=every))
        trainer.fit()
    small.assert_same_weights(averaged(ema), by_hand_averaged(SAVED_WINDOWS[:steps], decay=0.9, every=every))


@pytest.mark.parametrize("experiment", ["run", "other"])
def test_a_checkpoint_without_averages_starts_them_from_its_weights(experiment: str) -> None:
    """That of the run, which resumes, and another one's, which it goes to by hand."""
    path = small.fit(Saved(saved_config(3, experiment="run"))).checkpoints()[-1].path
    ema = dt.EMA(0.9, warm_up=False)
    with Saved(saved_config(5, ema, experiment=experiment)) as trainer:
        if experiment == "other":
            trainer.fit()
            trainer.load_checkpoint(path)
        trainer.evaluate()
        assert trainer.global_step == 3
        assert same_bits(averaged(ema), small.weights(trainer.model))
        trainer.fit()
    third, fourth, fifth = (small.weights(small.by_hand(SAVED_WINDOWS[:count])) for count in (3, 4, 5))
    expected = {name: 0.81 * third[name] + 0.09 * fourth[name] + 0.1 * fifth[name] for name in third}
    small.assert_same_weights(averaged(ema), expected)


def test_a_checkpoint_before_the_first_step_holds_the_weights_as_averages() -> None:
    ema = dt.EMA(0.9, validate=False)
    with Saved(saved_config(2, ema)) as trainer:
        trainer.evaluate()
        trainer.save_checkpoint()
        weights = {f"model.{name}": weight for name, weight in small.weights(trainer.model).items()}
        assert same_bits(ema.checkpoint_tensors(), weights)
    ema = dt.EMA(0.9)
    small.fit(Saved(saved_config(2, ema)))
    small.assert_same_weights(averaged(ema), by_hand_averaged(SAVED_WINDOWS[:2], decay=0.9))


def test_a_checkpoint_holds_the_weights_as_the_model_and_the_averages_beside_it() -> None:
    ema = dt.EMA(0.9)
    trainer = small.fit(Saved(saved_config(3, ema)))
    names = set(tensor_metadata(trainer.checkpoints()[-1].path))
    assert {f"callbacks.EMA.0.model.{name}" for name in ema.averaged("model")} <= names
    plain = small.fit(Saved(saved_config(3)))  # resumes, and knows no averages
    assert same_bits(small.weights(plain.model), small.weights(trainer.model))
    small.assert_same_weights(small.weights(plain.model), small.by_hand(SAVED_WINDOWS[:3]))


def test_a_signal_in_a_validation_saves_the_weights_as_the_model() -> None:
    class Signalled(Saved):
        def validation_step(self, batch: small.Batch, batch_idx: int) -> dict[str, Any]:
            if batch_idx == 1 and self.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().validation_step(batch, batch_idx)

    trainer = Signalled(saved_config(8, dt.EMA(0.9), val_every_n_steps=2))
    with pytest.raises(SystemExit):
        trainer.fit()
    assert trainer.global_step == 2
    ema = dt.EMA(0.9)
    resumed = small.fit(Saved(saved_config(2, ema)))
    small.assert_same_weights(small.weights(resumed.model), small.by_hand(SAVED_WINDOWS[:2]))
    small.assert_same_weights(averaged(ema), by_hand_averaged(SAVED_WINDOWS[:2], decay=0.9))


def test_a_save_as_soon_as_the_window_is_complete_has_its_step_in_the_averages() -> None:
    """The trainer's own event comes before callbacks'."""

    class Eager(Saved):
        def post_train_step(self) -> None:
            if self.global_step == 4:
                self.save_checkpoint()
                self.request_stop()

    at_hand = dt.CheckpointParameters(save_every_n_epochs=None, save_at_end=False)
    trainer = small.fit(Eager(saved_config(8, dt.EMA(0.9), checkpoint=at_hand)))
    assert [manifest.step for manifest in trainer.checkpoints()] == [4]
    ema = dt.EMA(0.9)
    small.fit(Saved(saved_config(4, ema)))
    small.assert_same_weights(averaged(ema), by_hand_averaged(SAVED_WINDOWS[:4], decay=0.9))


def test_nothing_is_saved_or_loaded_while_the_averages_stand_in() -> None:
    ema = dt.EMA(0.9)
    with Saved(saved_config(2, ema)) as trainer:
        trainer.fit()
        path = trainer.checkpoints()[-1].path
        with ema.averaged_weights(), pytest.raises(CheckpointError, match="averages as the model's weights"):
            trainer.load_checkpoint(path)
        with pytest.raises(CheckpointError, match="averages"), ema.averaged_weights():
            ema.checkpoint_tensors()


# -- several ranks


@torch.no_grad()
def outputs(trainer: Any, ema: dt.EMA) -> list[Tensor]:
    """What the model computes before, inside and after `averaged_weights`."""
    x = small.Samples(8).x
    found = [trainer.model(x)]  # leaves the root's parameters gathered
    with ema.averaged_weights():
        found.append(trainer.model(x))
    return [*found, trainer.model(x)]


def two_ranks(directory: str) -> dict[str, Any]:
    """Sharded with a checkpoint, sharded with accumulation, replicated."""
    os.chdir(directory)
    found: dict[str, Any] = {}
    ema, on_host, sees = RecordsMoves(0.9), dt.EMA(0.9, validate=False, device="cpu"), Sees()
    with Saved(saved_config(4, ema, on_host, sees, val_every_n_steps=2)) as trainer:
        trainer.fit()
        averages = ema.averaged("model")
        found["sharded alike"] = all(
            averages[name].placements == p.placements and averages[name].to_local().shape == p.to_local().shape
            for name, p in trainer.model.named_parameters()
        )
        found["moves"] = ema.moves
        found["saved"], found["on the host"] = averaged(ema), averaged(on_host)
        found["seen"] = {event: sees.seen[event] for event in ("train", "start", "batch", "end")}
        found["evaluated"] = trainer.evaluate()["val/loss"]
        found["weights"] = small.weights(trainer.model)
        found["outputs"] = outputs(trainer, ema)
    ema = dt.EMA(0.9)
    config = small.make_config(n_epochs=2, gradient_accumulation_steps=2, callbacks=[ema])
    with small.Sharded(config, DistributedDataLoader(small.Samples(24), 2)) as trainer:
        trainer.fit()
        found["accumulated"] = averaged(ema)
    ema = dt.EMA(0.9)
    config = small.make_config(max_steps=4, global_batch_size=4, callbacks=[ema])
    with small.Spread(config, DistributedDataLoader(small.Samples(32), 2)) as trainer:
        trainer.fit()
        found["replicated"] = averaged(ema)
    return found


@pytest.fixture(scope="module")
def at_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("two")
    return directory, run_world(two_ranks, 2, str(directory))


def test_two_ranks_average_their_own_shards(at_two: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in at_two[1]:
        assert rank["sharded alike"]
        assert rank["moves"] == [["_foreach_lerp_"]] * 4  # and no collective
        truth = by_hand_averaged(SAVED_WINDOWS[:4], decay=0.9)
        small.assert_same_weights(rank["saved"], truth)
        assert same_bits(rank["on the host"], rank["saved"])
        small.assert_same_weights(rank["replicated"], truth)
        windows = in_windows(small.batches(3, 8) * 2)
        small.assert_same_weights(rank["accumulated"], by_hand_averaged(windows, decay=0.9))


def test_two_ranks_validate_with_averages_and_train_on_with_weights(at_two: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in at_two[1]:
        seen = rank["seen"]
        for number, step in enumerate((2, 4)):
            truth = by_hand_averaged(SAVED_WINDOWS[:step], decay=0.9)
            small.assert_same_weights(seen["start"][number], truth)
            assert same_bits(seen["end"][number], seen["train"][step - 1])
        assert rank["evaluated"] == pytest.approx(loss_with(truth, 8), rel=1e-12)
        small.assert_same_weights(rank["weights"], small.by_hand(SAVED_WINDOWS[:4]))


def output_with(values: dict[str, Tensor]) -> Tensor:
    model = small.network()
    model.load_state_dict(values)
    with torch.no_grad():
        return model(small.Samples(8).x)


def test_no_parameter_gathered_before_is_used_after_averages_swap(at_two: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in at_two[1]:
        own, averages = output_with(rank["weights"]), output_with(rank["saved"])
        assert not torch.allclose(own, averages, rtol=1e-6)
        torch.testing.assert_close(rank["outputs"], [own, averages, own], rtol=1e-12, atol=1e-12)


def test_one_rank_resumes_from_two(at_two: tuple[Path, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch) -> None:
    directory, ranks = at_two
    monkeypatch.chdir(directory)
    ema, from_host = RecordsMoves(0.9), dt.EMA(0.9, validate=False)
    small.fit(Saved(saved_config(4, ema, from_host)))
    assert same_bits(averaged(ema), ranks[0]["saved"])
    assert same_bits(averaged(from_host), ranks[0]["saved"])
    assert same_bits(averaged(ema), ranks[1]["saved"])
    ema = RecordsMoves(0.9)
    small.fit(Saved(saved_config(8, ema)))
    small.assert_same_weights(averaged(ema), by_hand_averaged(SAVED_WINDOWS, decay=0.9))


def test_averages_inside_gathered_are_refused() -> None:
    ema = dt.EMA(0.5)
    with small.Spread(small.make_config(max_steps=1, callbacks=[ema]), small.batches(1)) as trainer:
        trainer.fit()
        with trainer.gathered(trainer.model), pytest.raises(StepError, match="inside gathered"), ema.averaged_weights():
            pass
        with ema.averaged_weights(), trainer.gathered(trainer.model):
            pass
