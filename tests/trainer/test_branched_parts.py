"""What callbacks, schedules by tokens and the history keep of another run whose checkpoint a run begins from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import dream_trainer as dt
from tests.api import EMA, BranchParameters, EarlyStopping, TokenAxis, Trainer, rate_factor
from tests.trainer import saves
from tests.trainer.small import Batch, weights

ANEW = BranchParameters(counters="new", data="new")


class Told(saves.Saves):
    """Its validations, one after each epoch, find what they are told."""

    values: tuple[float, ...] = (1.0, 2.0, 2.0, 2.0, 2.0, 2.0)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.values[self.current_epoch]}


def fit(config: saves.Config, trainer_class: type[saves.Saves] = Told) -> saves.Saves:
    return saves.fit(trainer_class(config))


def make_config(experiment: str, *callbacks: dt.Callback, n_epochs: int = 6, **checkpoint: Any) -> saves.Config:
    return saves.make_config(experiment=experiment, callbacks=callbacks, training={"n_epochs": n_epochs}, **checkpoint)


class Worse(Told):
    values = (5.0, 4.0, 3.0, 3.0, 3.0, 3.0)


@pytest.mark.parametrize(
    ("kind", "words", "epochs", "best"),
    [(Told, BranchParameters(), 5, 1.0), (Told, BranchParameters(counters="new"), 3, 1.0), (Worse, ANEW, 5, 3.0)],
    ids=["all kept", "new counters", "new counters and data"],
)
def test_a_branch_of_a_run_that_early_stopping_ended_trains_with_all_its_patience(
    kind: type[Told], words: BranchParameters, epochs: int, best: float
) -> None:
    first = fit(make_config("run", EarlyStopping(patience=2)))
    assert first.current_epoch == 3
    stopping = EarlyStopping(patience=2)
    branch = fit(make_config("branch", stopping, resume=str(first.run_dir), branch=words), kind)
    assert (branch.current_epoch, stopping.best) == (epochs, best)


def test_a_plain_resume_of_a_run_that_stopped_early_ends_at_once_and_says_why(caplog: Any) -> None:
    fit(make_config("run", EarlyStopping(patience=2)))
    caplog.clear()
    assert fit(make_config("run", EarlyStopping(patience=2))).current_epoch == 3
    assert "was not better than 1 in 2 validations" in caplog.text
    assert fit(make_config("run", EarlyStopping(patience=3))).current_epoch == 4


class Counts(dt.Callback):
    """A user's: of two numbers one is the run's own."""

    def __init__(self) -> None:
        self.vocabulary = 0
        self.epochs = 0
        self.words: list[tuple[bool, bool]] = []

    def post_epoch(self, trainer: Any) -> None:
        self.vocabulary += 1
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"vocabulary": self.vocabulary, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.vocabulary, self.epochs = state["vocabulary"], state["epochs"]

    def begin_branch(self, *, new_counters: bool, new_data: bool) -> None:
        self.words.append((new_counters, new_data))
        if new_counters:
            self.epochs = 0


def test_a_user_s_callback_decides_what_it_forgets_once_when_a_branch_begins() -> None:
    first = fit(make_config("run", Counts(), n_epochs=2))
    second, third = Counts(), Counts()
    fit(make_config("run", second, n_epochs=3))
    assert (second.vocabulary, second.epochs, second.words) == (3, 3, [])
    fit(make_config("branch", third, n_epochs=2, resume=str(first.run_dir), branch=ANEW))
    assert (third.vocabulary, third.epochs, third.words) == (5, 2, [(True, True)])
    again = Counts()
    fit(make_config("branch", again, n_epochs=3, resume=str(first.run_dir), branch=ANEW))
    assert (again.vocabulary, again.epochs, again.words) == (6, 3, [])


class ByTokens(saves.Saves):
    """Two tokens a batch; notes the rate of each step."""

    schedule = dt.ScheduleParameters(name="cosine", unit="token", min_lr_ratio=0.1)

    def __init__(self, config: saves.Config) -> None:
        super().__init__(config, length=64)
        self.rates: list[float] = []

    def batch_tokens(self, batch: Any) -> int:
        return 2

    def configure_schedulers(self) -> None:
        tokens = TokenAxis(lambda: self.tokens_before_next_step, self.config.training_parameters.max_tokens)
        self.scheduler = dt.build_schedule(self.schedule, self.optimizer, total_steps=None, tokens=tokens)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        loss = mse_loss(self.model(batch[0]), batch[1])
        self.backward(loss)
        self.step(self.model, self.optimizer, self.scheduler)
        return {"loss": loss}


def by_tokens(experiment: str, max_tokens: int, **checkpoint: Any) -> list[float]:
    config = saves.make_config(
        experiment=experiment,
        training={"max_tokens": max_tokens, "val_every_n_epochs": None},
        **{"save_every_n_steps": 2, "save_every_n_epochs": None} | checkpoint,
    )
    return saves.fit(ByTokens(config)).rates  # type: ignore[return-value,attr-defined]


def rates_by_tokens(total: int, tokens: range) -> list[float]:
    factor = rate_factor(ByTokens.schedule, total_steps=total)
    return [0.1 * factor(seen) for seen in tokens]


@pytest.mark.parametrize(
    ("words", "before", "after"),
    [
        ({}, 20, range(8, 20, 2)),
        ({"schedule": "new"}, 20, range(0, 12, 2)),
        ({"schedule": "new", "counters": "new"}, 12, range(0, 12, 2)),
        ({"counters": "new"}, 12, range(8, 20, 2)),
    ],
    ids=str,
)
def test_a_schedule_by_tokens_has_its_word_and_counters(words: dict[str, Any], before: int, after: range) -> None:
    """It begins at token 8; of its `before` tokens the run takes those from there, or 12."""
    assert by_tokens("parent", 20) == pytest.approx(rates_by_tokens(20, range(0, 20, 2)))
    path = "runs/tests/checkpoint/parent/checkpoints/step_00000004"
    expected = rates_by_tokens(before, after)
    if words.get("schedule") != "new":
        expected[0] = rates_by_tokens(20, range(8, 9))[0]  # what the parent's last step has set
    options = {"resume": path, "branch": BranchParameters(**words)}
    assert by_tokens("child", before, **options) == pytest.approx(expected)
    # Killed and started again it goes on there.
    child = Path("runs/tests/checkpoint/child/checkpoints")
    for checkpoint in sorted(child.glob("step_*"))[1:]:
        checkpoint.rename(child / f"gone_{checkpoint.name}")
    again = by_tokens("child", before, **options)
    assert again == pytest.approx(expected[-len(again) :])
    assert len(again) == 4


def simple(name: str, epochs: int, **options: Any) -> Trainer:
    x = torch.linspace(-1, 1, 16).reshape(8, 2)
    torch.manual_seed(0)
    trainer = Trainer(
        torch.nn.Linear(2, 1),
        loss=mse_loss,
        optimizer="sgd",
        train=DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4),
        epochs=epochs,
        name=name,
        device="cpu",
        **options,
    )
    return saves.fit(trainer)


def test_the_history_of_a_branch_is_its_own_with_new_counters() -> None:
    simple("parent", 2)
    (path,) = Path("runs").glob("**/parent")

    def history(name: str, **words: Any) -> list[tuple[float, float]]:
        branch = dt.CheckpointParameters(resume=str(path), branch=BranchParameters(**words))
        return [(row["epoch"], row["step"]) for row in simple(name, 3, checkpoints=branch).history]

    assert history("anew", counters="new", data="new") == [(0, 2), (1, 4), (2, 6)]
    assert history("on") == [(0, 2), (1, 4), (2, 6)]


class Weights(dt.Callback):
    """Notes the weights that training begins from, and those after each step."""

    order = -1000

    def __init__(self) -> None:
        self.found: list[dict[str, torch.Tensor]] = []

    def pre_fit(self, trainer: Any) -> None:
        self.found.append(weights(trainer.model))

    def post_train_step(self, trainer: Any) -> None:
        self.found.append(weights(trainer.model))


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("options", [{}, {"val_every_n_steps": 1}], ids=["at the end", "validating"])
def test_with_new_counters_an_average_moves_after_each_n_steps_of_the_branch(device: Any, options: Any) -> None:
    """The last two of the parent's six steps are in the branch's first move, and in no other."""
    seen, found = [], {}
    anew = BranchParameters(optimizer="new", schedule="new", counters="new", data="new")
    for name, steps, branch in (("run", 6, {}), ("branch", 9, {"resume": "runs/tests/checkpoint/run", "branch": anew})):
        noted, ema = Weights(), EMA(0.9, every_n_steps=4, device=device)
        training = {"max_steps": steps} | options
        fit(saves.make_config(experiment=name, callbacks=[noted, ema], training=training, **branch), saves.Saves)
        seen.append(noted.found)
        found = ema.averaged("model")
    parent, branched = seen
    average = parent[0]
    for move, moved_to in enumerate([parent[4], branched[4], branched[8]]):
        keep = min(0.9, (1 + move) / (10 + move))
        average = {name: keep * average[name] + (1 - keep) * value for name, value in moved_to.items()}
    torch.testing.assert_close(found, average)
