"""`backward` and `step` in one process: exact arithmetic, and every misuse named. Over ranks: arithmetic.py."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.nn.functional import mse_loss

import dream_trainer as dt
from tests.api import StepError
from tests.trainer import small
from tests.trainer.small import Alone, Batch, assert_same_weights, batches, by_hand, make_config, sgd, weights

Step = Callable[[Any, Batch, int], None]


def train(step: Step, data: list[Batch], *, make_optimizer: Any = sgd, **training: Any) -> Alone:
    """Trains one epoch with `step` as the body of `training_step`."""

    class Stepping(Alone):
        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            step(self, batch, batch_idx)
            return {}

    return small.fit(Stepping(make_config(n_epochs=1, **training), data, make_optimizer=make_optimizer))


def loss_of(trainer: Alone, batch: Batch) -> torch.Tensor:
    return mse_loss(trainer.model(batch[0]), batch[1])


def finish(trainer: Alone) -> None:
    if not trainer.is_accumulating_gradients:
        trainer.norms.append(trainer.step(trainer.model, trainer.optimizer).item())


def weighing(weight: Callable[[int], Any] = lambda batch_idx: None) -> Step:
    """A step with one backward, weighted by the batch's number, which steps at a window's end."""

    def step(trainer: Alone, batch: Batch, batch_idx: int) -> None:
        trainer.backward(loss_of(trainer, batch), weight=weight(batch_idx))
        finish(trainer)

    return step


def windows_of(data: list[Batch], size: int) -> list[list[Batch]]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@pytest.mark.pitfall(1)
@pytest.mark.parametrize("accumulation", [1, 3, 9])
@pytest.mark.parametrize("make_optimizer", [sgd, small.fused_adamw])
def test_a_window_equals_one_large_batch_also_when_the_epoch_cuts_it_short(
    accumulation: int, make_optimizer: Any
) -> None:
    data = batches(7)
    trainer = train(weighing(), data, gradient_accumulation_steps=accumulation, make_optimizer=make_optimizer)
    large = [
        [(torch.cat([x for x, _, _ in window]), torch.cat([y for _, y, _ in window]))]
        for window in windows_of(data, accumulation)
    ]
    assert trainer.global_step == len(large)
    assert_same_weights(weights(trainer.model), by_hand(large, make_optimizer=make_optimizer))


@pytest.mark.pitfall(3)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_weights_make_each_sample_count_alike_however_unequal_the_batches_are(as_tensor: bool) -> None:
    x, y = torch.cat([b[0] for b in batches(8)]), torch.cat([b[1] for b in batches(8)])
    sizes = [1, 9, 2, 4]
    ragged = list(zip(x.split(sizes), y.split(sizes), torch.arange(16).split(sizes), strict=True))

    step = weighing(lambda n: torch.tensor(sizes[n]) if as_tensor else sizes[n])
    trainer = train(step, ragged, gradient_accumulation_steps=2)
    assert_same_weights(weights(trainer.model), by_hand([[(x[:10], y[:10])], [(x[10:], y[10:])]]))


def test_a_limit_just_above_the_norm_changes_no_gradient() -> None:
    model = small.filled_network()
    (norm,) = small.train_by_hand(model, sgd(model), windows_of(batches(1), 1), clip=1e9)
    trainer = train(steps, batches(1), gradient_clip_norm=1.0005 * float(norm))
    assert_same_weights(weights(trainer.model), by_hand(windows_of(batches(1), 1)))


def test_a_weight_counts_as_it_was_when_it_was_given() -> None:
    counter = torch.zeros(())  # one tensor that is filled again for each micro-batch
    filled_again = train(weighing(lambda n: counter.fill_(1 + n % 3)), batches(6), gradient_accumulation_steps=2)
    expected = train(weighing(lambda n: 1.0 + n % 3), batches(6), gradient_accumulation_steps=2)
    assert_same_weights(weights(filled_again.model), expected.model)


def test_two_backward_calls_in_one_batch_add_up_and_count_as_one_batch() -> None:
    def step(trainer: Alone, batch: Batch, batch_idx: int) -> None:
        x, y, _ = batch
        trainer.backward(mse_loss(trainer.model(x), y) * 0.25)
        trainer.backward(mse_loss(trainer.model(x), y) * 0.75)
        finish(trainer)

    data = batches(4)
    trainer = train(step, data, gradient_accumulation_steps=2)
    assert_same_weights(weights(trainer.model), by_hand(windows_of(data, 2)))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("size", "limit"), [(1, 0.05), (2, 0.05), (1, 1e3)])
def test_step_returns_the_norm_before_clipping_and_clips_by_norm(weighted: bool, size: int, limit: float) -> None:
    data, model = batches(4), small.filled_network()
    options = {"gradient_accumulation_steps": size, "gradient_clip_norm": limit}
    trainer = train(weighing(lambda n: 2 if weighted else None), data, **options)
    norms = small.train_by_hand(model, sgd(model), windows_of(data, size), clip=limit)
    assert trainer.norms == pytest.approx(norms, rel=1e-6)
    close = {"rtol": 1e-7, "atol": 1e-8} if limit < 1 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(weights(trainer.model), weights(model), **close)


def test_clipping_by_value_clips_the_normalised_gradient() -> None:
    def clipping(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = sgd(model)
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(model.parameters(), 0.02))
        return optimizer

    data = batches(4)
    trainer = train(weighing(lambda n: 3), data, gradient_accumulation_steps=2, gradient_clip_value=0.02)
    assert_same_weights(weights(trainer.model), by_hand(windows_of(data, 2), make_optimizer=clipping))


def test_pre_optimizer_step_sees_normalised_gradients_and_what_it_changes_counts() -> None:
    class Doubles(Alone):
        def pre_optimizer_step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            seen.append({name: p.grad.clone() for name, p in model.named_parameters()})
            for p in model.parameters():
                p.grad *= 2

    seen: list[dict[str, torch.Tensor]] = []
    data = batches(3)
    trainer = small.fit(Doubles(make_config(n_epochs=1, gradient_accumulation_steps=3), data))
    model = small.filled_network()
    sum(mse_loss(model(x), y) / 3 for x, y, _ in data).backward()
    assert_same_weights(seen[0], {name: p.grad for name, p in model.named_parameters()})
    doubled = torch.sqrt(sum(p.grad.mul(2).square().sum() for p in model.parameters()))
    assert trainer.norms == [pytest.approx(doubled.item(), rel=1e-12)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_listener_of_a_step_may_step_another_optimizer(precision: Any) -> None:
    class Both(Alone):
        def setup(self) -> None:
            super().setup()
            self.other = nn.Linear(1, 1)
            self.other_optimizer = sgd(self.other)

        def pre_optimizer_step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            if model is self.model:
                self.step(self.other, self.other_optimizer)

        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            self.backward(self.other(torch.ones(1, 1)).sum())
            result: dict[str, Any] = super().training_step(batch, batch_idx)
            assert torch.is_autocast_enabled("cpu") == (precision == "bf16")
            return result

    devices = dt.DeviceParameters(device="cpu", precision=precision)
    trainer = small.fit(Both(make_config(n_epochs=1, devices=devices), data := batches(3)))
    assert torch.is_grad_enabled()
    if precision == "fp32":
        assert_same_weights(weights(trainer.model), by_hand(windows_of(data, 1)))


@pytest.mark.pitfall(3)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_each_of_several_weighted_steps_of_a_model_in_one_window_has_its_own_total(as_tensor: bool) -> None:
    def step(trainer: Alone, batch: Batch, batch_idx: int) -> None:
        for count in (2, 5, 3):  # a critic's turns
            weight: Any = torch.tensor(count) if as_tensor else count
            trainer.backward(loss_of(trainer, batch), weight=weight)
            trainer.backward(loss_of(trainer, batch) * 2, weight=2 * weight)
            finish(trainer)

    data = batches(2)
    trainer = train(step, data)
    model = small.filled_network()
    # (count * 1 + 2 * count * 2) / (3 * count)
    small.train_on(sgd(model), (mse_loss(model(x), y) * 5 / 3 for x, y, _ in data for _ in range(3)))
    assert_same_weights(weights(trainer.model), model)
    assert (trainer.global_step, trainer.samples_seen) == (2, 4)


@pytest.mark.parametrize(("calls", "counted"), [("none", [0, 2]), ("none none", [0, 2]), ("none loss none", [0, 1, 2])])
def test_a_batch_counts_once_or_not_at_all_however_often_none_is_said_of_it(calls: str, counted: list[int]) -> None:
    def step(trainer: Alone, batch: Batch, batch_idx: int) -> None:
        for call in calls.split() if batch_idx == 1 else ["loss"]:
            trainer.backward(None if call == "none" else loss_of(trainer, batch))
        finish(trainer)

    data = batches(3)
    trainer = train(step, data, gradient_accumulation_steps=3)
    assert_same_weights(weights(trainer.model), by_hand([[data[number] for number in counted]]))


def test_a_window_of_none_alone_steps_nothing_and_does_not_count() -> None:
    def step(trainer: Alone, batch: Batch, batch_idx: int) -> None:
        trainer.backward(None if batch_idx in (2, 3) else loss_of(trainer, batch))
        finish(trainer)

    data = batches(6)
    trainer = train(step, data, gradient_accumulation_steps=2, make_optimizer=small.fused_adamw)
    assert trainer.global_step == 2
    assert_same_weights(weights(trainer.model), by_hand([data[0:2], data[4:6]], make_optimizer=small.fused_adamw))


@pytest.mark.usefixtures("late_norms")
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("make_optimizer", [sgd, small.fused_adamw])
def test_a_total_weight_of_zero_skips_the_step_and_leaves_its_state(as_tensor: bool, make_optimizer: Any) -> None:
    data, weigh = batches(6), torch.tensor if as_tensor else float
    step = weighing(lambda n: weigh(0.0 if n in (2, 3) else 2.0))
    trainer = train(step, data, gradient_accumulation_steps=2, make_optimizer=make_optimizer)
    assert trainer.global_step == 3
    assert trainer.skipped_steps == 1
    # Momentum and moments are as they were, else the last step would be another one.
    assert_same_weights(weights(trainer.model), by_hand([data[0:2], data[4:6]], make_optimizer=make_optimizer))


def steps(trainer: Alone, batch: Batch, batch_idx: int) -> None:
    trainer.backward(loss_of(trainer, batch))
    trainer.step(trainer.model, trainer.optimizer)


def steps_never(trainer: Alone, batch: Batch, batch_idx: int) -> None:
    trainer.backward(loss_of(trainer, batch))


def weighs_one_of_two(trainer: Alone, batch: Batch, batch_idx: int) -> None:
    trainer.other = nn.Linear(1, 1)
    trainer.other_optimizer = torch.optim.SGD(trainer.other.parameters(), lr=1.0)
    trainer.backward(loss_of(trainer, batch), weight=2)


def steps_the_wrong_way_round(trainer: Alone, batch: Batch, batch_idx: int) -> None:
    trainer.backward(loss_of(trainer, batch))
    trainer.step(trainer.optimizer, trainer.model)


def goes_on_after_its_step(trainer: Alone, batch: Batch, batch_idx: int) -> None:
    steps(trainer, batch, batch_idx)
    trainer.backward(loss_of(trainer, batch))


def zeroes_before_its_backward(trainer: Alone, batch: Batch, batch_idx: int) -> None:
    trainer.optimizer.zero_grad()
    steps(trainer, batch, batch_idx)


def zeroes_after_its_step(trainer: Alone, batch: Batch, batch_idx: int) -> None:
    steps(trainer, batch, batch_idx)
    trainer.optimizer.zero_grad()


def steps_twice(trainer: Alone, batch: Batch, batch_idx: int) -> None:
    steps(trainer, batch, batch_idx)
    steps(trainer, batch, batch_idx)


@pytest.mark.parametrize(
    ("step", "times"), [(zeroes_after_its_step, 1), (zeroes_before_its_backward, 1), (steps_twice, 2)]
)
def test_habits_of_a_plain_loop_are_harmless_in_windows_of_one(step: Step, times: int) -> None:
    stepped = [batch for batch in batches(4) for _ in range(times)]
    assert_same_weights(weights(train(step, batches(4)).model), by_hand(windows_of(stepped, 1)))


@pytest.mark.pitfall(17)
@pytest.mark.parametrize(
    ("step", "accumulation", "told"),
    [
        (steps_never, 3, r"no step\(\).*self\.step\(model, optimizer\)"),
        (weighing(lambda n: None if n else 2), 2, "Weight every micro-batch, or none"),
        (weighing(lambda n: 2 if n else None), 2, "Weight every micro-batch, or none"),
        (weighs_one_of_two, 1, r"\(model, other\).*model="),
        (steps_the_wrong_way_round, 1, r"self\.step\(model, optimizer\)"),
        (goes_on_after_its_step, 1, "step"),
        (zeroes_after_its_step, 2, r"zero_grad\(\) out"),
        (zeroes_before_its_backward, 2, r"zero_grad\(\) out"),
        (steps_twice, 2, "twice for an optimizer"),
    ],
)
def test_a_window_that_is_not_one_of_backward_and_step_is_an_error(step: Step, accumulation: int, told: str) -> None:
    with pytest.raises(StepError, match=told):
        train(step, batches(4), gradient_accumulation_steps=accumulation)


def test_weighted_and_unweighted_windows_may_follow_each_other() -> None:
    data = batches(4)
    trainer = train(weighing(lambda n: 2 if n < 2 else None), data, gradient_accumulation_steps=2)
    assert_same_weights(weights(trainer.model), by_hand(windows_of(data, 2)))


def test_backward_and_step_outside_of_training_are_errors() -> None:
    trainer = Alone(make_config(), batches(1))
    with pytest.raises(StepError, match="outside of training"):
        trainer.backward(torch.ones((), requires_grad=True))
    with pytest.raises(StepError, match="outside of training"):
        trainer.step(nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))


@pytest.mark.parametrize("event", ["post_train_step", "post_epoch", "post_val_epoch"])
def test_a_backward_between_two_windows_is_an_error_that_says_where_its_gradients_would_go(event: str) -> None:
    def listener(self: Any, *args: Any) -> None:
        self.backward(self.model(batches(1)[0][0]).mean())

    cls = type("Leaks", (small.Validates, Alone), {event: listener})
    with pytest.raises(StepError, match="between two windows"):
        cls(make_config(n_epochs=2), batches(2), batches(1)).fit()


def test_a_window_is_open_until_it_is_counted_and_has_the_losses_of_its_last_micro_batch() -> None:
    class Looks(dt.Callback):
        def pre_fit(self, trainer: dt.AbstractTrainer) -> None:
            trainer.accumulation_window.watch(lambda optimizer: None)
            seen.append(trainer.accumulation_window.is_open)

        def pre_train_batch(self, trainer: dt.AbstractTrainer, batch: Any, batch_idx: int) -> None:
            assert trainer.accumulation_window.batch is batch
            seen.append(trainer.accumulation_window.is_open)

        def post_optimizer_step(self, trainer: dt.AbstractTrainer, model: Any, optimizer: Any) -> None:
            seen.append([float(loss) for loss in trainer.accumulation_window.losses])
            assert (trainer.accumulation_window.loss_scale, torch.is_grad_enabled()) == (None, True)

        def post_train_step(self, trainer: dt.AbstractTrainer) -> None:
            seen.append(trainer.accumulation_window.is_open)

    seen: list[Any] = []
    trainer = small.fit(Alone(make_config(n_epochs=1, gradient_accumulation_steps=2, callbacks=[Looks()]), batches(4)))
    windows = [[True, True, [loss], False] for loss in trainer.losses[1::2]]
    assert seen == [False, *windows[0], *windows[1]]


def test_a_parameter_group_added_during_training_is_stepped() -> None:
    def step(trainer: Alone, batch: Batch, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.optimizer.add_param_group({"params": list(trainer.model[0].parameters())})
        trainer.backward(loss_of(trainer, batch))
        finish(trainer)

    def head_only(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model[1].parameters(), lr=0.1)

    trainer = train(step, batches(2), make_optimizer=head_only)
    model = small.filled_network()
    optimizer = head_only(model)
    losses = (mse_loss(model(x), y) for x, y, _ in batches(2))
    small.train_on(optimizer, [next(losses)])
    optimizer.add_param_group({"params": list(model[0].parameters())})  # which bring the gradients they have
    small.train_on(optimizer, losses)
    assert_same_weights(weights(trainer.model), model)


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_step_waits_for_the_windows_last_micro_batch_and_logs_nothing_before(accumulation: int) -> None:
    class Unguarded(dt.LoggerMixin, Alone):
        def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
            loss = loss_of(self, batch)
            self.backward(loss)
            self.losses.append(self.step(self.model, self.optimizer, self.scheduler))
            return {"norm": self.losses[-1]}

        def setup(self) -> None:
            super().setup()
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def halving(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = sgd(model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        return optimizer

    config = make_config(n_epochs=1, gradient_accumulation_steps=accumulation, log_every=1)
    trainer = small.fit(Unguarded(config, batches(6)))
    norms = trainer.losses[accumulation - 1 :: accumulation]
    assert [norm is None for norm in trainer.losses] == ([True] * (accumulation - 1) + [False]) * (6 // accumulation)
    logged = [norm for _, norm in trainer.history_of("train/norm")]
    assert logged == pytest.approx([float(norm) for norm in norms])
    assert_same_weights(weights(trainer.model), by_hand(windows_of(batches(6), accumulation), make_optimizer=halving))
