"""Schedules against their closed forms, at every step, through a resume, and beyond the end."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from dream_trainer.checkpoint import typed_json
from tests.api import ConfigError, ScheduleParameters, build_schedule, rate_factor

TOTAL, WARMUP = 40, 5
RATES = (0.5, 0.125)


def optimizer() -> SGD:
    """Two groups at rates 0.5 and 0.125."""
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    return SGD([{"params": [first], "lr": RATES[0]}, {"params": [second], "lr": RATES[1]}])


def rates(schedule: LambdaLR, steps: int) -> list[list[float]]:
    """The groups' rates before each of `steps` steps, and after the last."""
    found = [[group["lr"] for group in schedule.optimizer.param_groups]]
    for _ in range(steps):
        schedule.optimizer.step()
        schedule.step()
        found.append([group["lr"] for group in schedule.optimizer.param_groups])
    return found


def after_warmup(form: Callable[[float], float], start: int = WARMUP) -> Callable[[int], float]:
    """The warm-up to WARMUP, 1 until `start`, then `form` of the part of the way from there to TOTAL."""

    def factor(step: int) -> float:
        if step < WARMUP:
            return (step + 1) / (WARMUP + 1)
        return form(min(1.0, max(0.0, (step - start) / (TOTAL - start))))

    return factor


FORMS: list[tuple[dict[str, Any], Callable[[int], float]]] = [
    ({"name": "constant"}, after_warmup(lambda x: 1.0)),
    ({"name": "cosine"}, after_warmup(lambda x: 0.5 * (1 + math.cos(math.pi * x)))),
    ({"name": "cosine", "min_lr_ratio": 0.1}, after_warmup(lambda x: 0.1 + 0.45 * (1 + math.cos(math.pi * x)))),
    ({"name": "linear", "min_lr_ratio": 0.25}, after_warmup(lambda x: 1 - 0.75 * x)),
    ({"name": "wsd"}, after_warmup(lambda x: 1 - x, 36)),
    ({"name": "wsd", "decay_steps": 10}, after_warmup(lambda x: 1 - x, 30)),
    (
        {"name": "wsd", "decay_steps": 0.5, "decay_shape": "cosine", "min_lr_ratio": 0.2},
        after_warmup(lambda x: 0.2 + 0.4 * (1 + math.cos(math.pi * x)), 20),
    ),
    (
        {"name": "wsd", "decay_steps": 10, "decay_shape": "sqrt", "min_lr_ratio": 0.1},
        after_warmup(lambda x: 1 - 0.9 * x**0.5, 30),
    ),
    (
        {"name": "wsd", "decay_steps": 10, "decay_shape": "exponential", "min_lr_ratio": 0.01},
        after_warmup(lambda x: 0.01**x, 30),
    ),
    ({"name": "inverse_sqrt"}, lambda step: min((step + 1) / 6, (6 / (step + 1)) ** 0.5)),
    (
        {"name": "inverse_sqrt", "min_lr_ratio": 0.5},
        lambda step: (step + 1) / 6 if step < 5 else max(0.5, (6 / (step + 1)) ** 0.5),
    ),
]


@pytest.mark.parametrize(("values", "form"), FORMS, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_steps_have_the_closed_forms_rate_in_each_group(values: dict[str, Any], form: Callable[[int], float]) -> None:
    schedule = build_schedule(ScheduleParameters(warmup_steps=WARMUP, **values), optimizer(), total_steps=TOTAL)
    assert isinstance(schedule, LambdaLR)
    for step, found in enumerate(rates(schedule, TOTAL + 5)):
        assert found == pytest.approx([rate * form(step) for rate in RATES], rel=1e-12, abs=1e-15), step


def test_epochs_are_counted_in_epochs() -> None:
    by_epoch = ScheduleParameters(name="cosine", unit="epoch", warmup_steps=2)
    by_step = ScheduleParameters(name="cosine", warmup_steps=2)
    one = rate_factor(by_epoch, total_steps=95, steps_per_epoch=10)  # nine epochs and a half
    other = rate_factor(by_step, total_steps=10)
    assert [one(epoch) for epoch in range(12)] == [other(step) for step in range(12)]


def test_a_warmup_the_run_does_not_outlast_is_cut_off_by_its_end() -> None:
    for name in ("constant", "cosine", "inverse_sqrt"):
        for warmup, largest in ((9, 1.0), (10, 10 / 11)):
            factor = rate_factor(ScheduleParameters(name=name, warmup_steps=warmup), total_steps=10)
            assert max(factor(step) for step in range(10)) == largest


def test_a_longer_run_stretches_what_is_left_of_the_schedule() -> None:
    parameters = ScheduleParameters(name="wsd", decay_steps=10)
    before = build_schedule(parameters, optimizer(), total_steps=TOTAL)
    rates(before, 30)
    longer = build_schedule(parameters, optimizer(), total_steps=2 * TOTAL)
    longer.load_state_dict(typed_json.loads(typed_json.dumps(before.state_dict())))
    assert [group[0] for group in rates(longer, 50)][:41] == [0.5] * 41
    assert longer.get_last_lr()[0] == 0.0


def test_plateau_is_pytorchs_own_with_a_smallest_rate_per_group() -> None:
    parameters = ScheduleParameters(name="plateau", mode="max", factor=0.5, patience=1, cooldown=2, min_lr_ratio=0.4)
    schedule = build_schedule(parameters, optimizer(), total_steps=None)
    by_hand = ReduceLROnPlateau(
        optimizer(), mode="max", factor=0.5, patience=1, cooldown=2, min_lr=[0.4 * rate for rate in RATES]
    )
    assert isinstance(schedule, ReduceLROnPlateau)
    for value in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1):
        schedule.step(value)
        by_hand.step(value)
        assert schedule.get_last_lr() == by_hand.get_last_lr()
    assert schedule.get_last_lr() == pytest.approx([0.2, 0.05])


def test_a_total_that_nobody_knows_is_refused_where_it_matters() -> None:
    with pytest.raises(ConfigError, match="total_steps=None, and 'cosine' needs the run's length"):
        build_schedule(ScheduleParameters(name="cosine"), optimizer(), total_steps=None)
    with pytest.raises(ConfigError, match=r"total_steps=None, and warmup_steps=0.1 needs"):
        build_schedule(ScheduleParameters(warmup_steps=0.1), optimizer(), total_steps=None)
    with pytest.raises(ConfigError, match='steps_per_epoch=None, and unit="epoch" needs it'):
        build_schedule(ScheduleParameters(name="linear", unit="epoch"), optimizer(), total_steps=10)
    for name in ("constant", "inverse_sqrt"):
        assert rate_factor(ScheduleParameters(name=name, warmup_steps=3, unit="epoch"), total_steps=None)(3) == 1.0
    with pytest.raises(ConfigError, match="no form in steps"):
        rate_factor(ScheduleParameters(name="plateau"), total_steps=None)
