"""Runs that begin from another one's checkpoint: each word against the loop as one writes it by hand, in float64."""

import itertools
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import dream_trainer as dt
from tests.api import BranchParameters, CheckpointError, ConfigError, DistributedDataLoader, rate_factor, read_record
from tests.trainer import saves, small
from tests.trainer.small import Batch, Samples, assert_same_weights, fill, fit, network, train_on, weights
from tests.worlds import run_world

SCHEDULE = dt.ScheduleParameters(name="cosine", warmup_steps=2, min_lr_ratio=0.1)
STEPS, LONGER = 6, 14  # the parent's limit, and its branches'
AT = 4  # where they begin
BATCH = 4  # samples of a step, over all ranks
LENGTH = 40
OLD, NEW = 0.05, 0.01

WORDS: dict[str, dict[str, Any]] = {
    "all kept": {},
    "moments": {"optimizer": "moments"},
    "new optimizer": {"optimizer": "new"},
    "extended": {"schedule": "extend"},
    "extended, moments": {"schedule": "extend", "optimizer": "moments"},
    "new schedule": {"schedule": "new"},
    "new schedule, moments": {"schedule": "new", "optimizer": "moments"},
    "new counters": {"counters": "new"},
    "new data": {"data": "new"},
    "new counters and data": {"counters": "new", "data": "new"},
    "weights alone": {"optimizer": "new", "schedule": "new", "counters": "new", "data": "new"},
}


class Branches(saves.Saves):
    """AdamW under a schedule; notes the samples of each step, on all ranks, and its rate."""

    def __init__(self, config: saves.Config) -> None:
        small.Spread.__init__(self, config, DistributedDataLoader(Samples(LENGTH), BATCH // ranks()))
        self.saved, self.loaded, self.rates = [], [], []

    def configure_optimizers(self) -> None:
        self.optimizer = adamw(self.model, self.config.learning_rate)

    def configure_schedulers(self) -> None:
        self.scheduler = dt.build_schedule(SCHEDULE, self.optimizer, total_steps=self.total_steps)

    def post_fit(self) -> None:
        self.end = weights(self.model)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.seen.append(batch[2].tolist())
        loss = mse_loss(self.model(batch[0]), batch[1])
        self.backward(loss)
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.step(self.model, self.optimizer, self.scheduler)
        return {"loss": loss}


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def adamw(model: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1 if rate == OLD else 0.2)


def make_config(experiment: str, rate: float, limit: int, unit: str = "max_steps", **checkpoint: Any) -> saves.Config:
    return saves.make_config(
        experiment=experiment,
        learning_rate=rate,
        training={unit: limit},
        **{"save_every_n_steps": 2, "save_every_n_epochs": None} | checkpoint,
    )


def parent() -> str:
    """The path of the checkpoint that runs begin from."""
    return str(fit(Branches(make_config("parent", OLD, STEPS))).checkpoint_dir / f"step_{AT:08d}")


def branch(experiment: str, path: str, *, rate: float = NEW, steps: int = LONGER, **words: Any) -> Branches:
    return fit(Branches(make_config(experiment, rate, steps, resume=path, branch=BranchParameters(**words))))


def by_hand(word: dict[str, Any]) -> tuple[torch.nn.Module, list[float]]:
    """What a branch should have come to, and the rate of each of its steps."""
    data, model = Samples(LENGTH), network()
    fill(model)
    before, after = (rate_factor(SCHEDULE, total_steps=steps) for steps in (STEPS, LONGER))
    optimizer = adamw(model, OLD)
    place = 0

    def step(rate: float) -> None:
        nonlocal place
        optimizer.param_groups[0]["lr"] = rate
        numbers = [index % LENGTH for index in range(place, place + BATCH)]
        train_on(optimizer, [mse_loss(model(data.x[numbers]), data.y[numbers])])
        place += BATCH

    for number in range(AT):
        step(OLD * before(number))
    of_config = word.get("optimizer", "keep") != "keep"
    if word.get("optimizer") == "new":
        optimizer = adamw(model, NEW)
    elif of_config:
        optimizer.param_groups[0]["weight_decay"] = 0.2
    if word.get("data") == "new":
        place = 0
    base = NEW if of_config else OLD
    rates = []
    for number in range(LONGER if word.get("counters") == "new" else LONGER - AT):
        position = number if word.get("schedule") == "new" else AT + number
        factor = after(position)
        if word.get("schedule") == "extend":
            factor = min(factor, before(AT))
        elif word.get("schedule", "keep") == "keep" and not of_config and number == 0:
            factor = before(AT)  # what the last step of the parent has set
        rates.append(base * factor)
        step(rates[-1])
    return model, rates


def check(name: str, trainer: Branches, model: dict[str, torch.Tensor]) -> None:
    expected, rates = by_hand(WORDS[name])
    assert trainer.rates == pytest.approx(rates, rel=1e-12), name
    assert_same_weights(model, expected)


def each_word(names: list[str]) -> dict[str, Any]:
    """Every word in this world, and a restart in the middle of the branch."""
    path, found = parent(), {}
    for name in names:
        trainer = branch(name, path, **WORDS[name])
        check(name, trainer, trainer.end)
        began = 0 if WORDS[name].get("counters") == "new" else AT
        found[name] = (trainer.global_step - began, len(trainer.rates), trainer.checkpoints()[-1].parent)
        # Killed after some steps, and the same command again: it goes on from the branch's own, not from the parent.
        for checkpoint in trainer.checkpoints():
            if checkpoint.step > 8 and trainer.world.is_main:
                checkpoint.path.rename(checkpoint.path.with_name(f"gone_{checkpoint.step}"))
        again = branch(name, path, **WORDS[name])
        assert again.loaded == ["step_00000008"]
        assert_same_weights(again.end, trainer.end)
    return found


def test_each_word_is_the_loop_by_hand_and_outlives_a_restart(tmp_path: Path) -> None:
    found = each_word(list(WORDS))
    for name, (steps, trained, born) in found.items():
        assert steps == trained == LONGER - (0 if WORDS[name].get("counters") == "new" else AT)
        words = {"optimizer": "keep", "schedule": "keep", "counters": "keep", "data": "keep"} | WORDS[name]
        checkpoint = str(tmp_path / f"runs/tests/checkpoint/parent/checkpoints/step_{AT:08d}")
        assert born == {"checkpoint": checkpoint, "step": AT, "words": words}
        record = read_record(tmp_path / "runs/tests/checkpoint" / name)
        assert record is not None
        assert record.parent == born
        assert record.starts == 2


@pytest.mark.slow
def test_each_word_is_the_loop_by_hand_on_two_ranks() -> None:
    names = ["moments", "extended", "new schedule", "new counters", "new data", "weights alone"]
    for found in run_world(each_word, 2, names):
        assert list(found) == names


def test_an_extended_cosine_never_climbs_and_ends_where_the_longer_one_does() -> None:
    path = str(Path(parent()).with_name(f"step_{STEPS:08d}"))
    assert max(branch("climbs", path).rates[1:]) > 3 * OLD * 0.1
    assert branch("held", path, schedule="extend").rates == pytest.approx([OLD * 0.1] * (LONGER - STEPS))
    rates = branch("early", str(Path(path).with_name("step_00000002")), schedule="extend").rates
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates))


@pytest.mark.parametrize("tail", ["", f"checkpoints/step_{AT:08d}"], ids=["run", "checkpoint"])
def test_the_same_command_again_goes_on_however_the_path_is_spelt(tail: str) -> None:
    parent()
    first = branch("child", f"runs/tests/checkpoint/parent/{tail}", optimizer="moments")
    assert first.loaded == [f"step_{AT if tail else STEPS:08d}"]  # of a run its newest
    Path("link").symlink_to("runs")
    again = branch("child", f"link/tests/checkpoint/parent/{tail}", steps=LONGER + 2, optimizer="moments")
    assert again.loaded == [f"step_{LONGER:08d}"]


def test_a_run_with_checkpoints_of_its_own_never_begins_again_from_another_one() -> None:
    path = parent()
    mine = fit(Branches(make_config("mine", NEW, STEPS)))
    before = sorted(mine.checkpoint_dir.iterdir())
    with pytest.raises(ConfigError, match="up to step 6, and began at step 0.* Use another experiment name"):
        branch("mine", path)
    assert sorted(mine.checkpoint_dir.iterdir()) == before
    branch("child", path)
    for other in (Path(path).with_name("step_00000002"), mine.run_dir):
        with pytest.raises(ConfigError, match="and began from .*step_00000004.* Use another experiment name"):
            branch("child", str(other))


def test_a_branch_may_have_another_seed_batch_and_optimizer() -> None:
    class Sgd(Branches):
        def configure_optimizers(self) -> None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=NEW)

    path = parent()
    config = make_config("sgd", NEW, LONGER, resume=path, branch=BranchParameters(optimizer="new", data="new"))
    config.seed = 1
    assert fit(Sgd(config)).global_step == LONGER
    config = make_config("seed", NEW, LONGER, resume=path)
    config.seed = 1
    with pytest.raises(CheckpointError, match=r'seed=42, and this run has 1.*branch=BranchParameters\(data="new"\)'):
        fit(Branches(config))


def test_words_that_branch_nothing_are_an_error() -> None:
    words = BranchParameters(optimizer="moments")
    with pytest.raises(ConfigError, match=r"resume='auto' is not the path of one\. Set resume="):
        fit(Branches(make_config("run", NEW, 4, branch=words)))
    path = parent()
    with pytest.raises(ConfigError, match="is this run's own. Use another experiment name"):
        branch("parent", path, optimizer="moments")
    branch("child", path, optimizer="moments")
    with pytest.raises(ConfigError, match=r"this run began from .* with .*'moments'.*Use another experiment name"):
        branch("child", path, optimizer="new", steps=LONGER + 2)
    later = fit(Branches(make_config("child", NEW, LONGER + 2, branch=words)))  # with "auto" it goes on all the same
    assert later.loaded == [f"step_{LONGER:08d}"]
    with pytest.raises(ConfigError, match="optimizer='kept' is not known. Use 'keep', 'moments' or 'new'"):
        BranchParameters(optimizer="kept")  # type: ignore[arg-type]


class Swings(Branches):
    """Its form swings between 1 and 0, in a longer run twice as fast."""

    def configure_schedulers(self) -> None:
        period = 12 if self.total_steps == STEPS else 6
        self.scheduler = LambdaLR(self.optimizer, lambda step: (1 + math.cos(2 * math.pi * step / period)) / 2)


def test_the_cap_of_an_extended_schedule_stays_where_it_goes_on_below_it() -> None:
    first = fit(Swings(make_config("parent", OLD, STEPS, save_every_n_steps=5)))
    path = str(first.checkpoint_dir / "step_00000005")
    cap = OLD * (1 - math.cos(math.pi / 6)) / 2
    extend = BranchParameters(schedule="extend")

    def swing(name: str, steps: int) -> Swings:
        return Swings(make_config(name, OLD, steps, resume=path, branch=extend))

    straight = fit(swing("straight", 20)).rates
    assert max(straight) == pytest.approx(cap)
    cut = fit(swing("cut", 9)).rates + fit(swing("cut", 20)).rates  # the form is at 0 where it is cut
    assert cut == pytest.approx(straight, rel=1e-12, abs=1e-12)
    with swing("limits", 9) as trainer:
        trainer.fit()
        trainer.set_limits(max_steps=13)
        trainer.fit()
        trainer.set_limits(max_steps=20)
        trainer.fit()
        assert trainer.rates == pytest.approx(straight, rel=1e-12, abs=1e-12)
    assert max(fit(swing("limits", 26)).rates) == pytest.approx(cap)


ANEW = BranchParameters(counters="new", data="new")


class Told(saves.Saves):
    """Its validations, one after each epoch, find what they are told."""

    values: tuple[float, ...] = (1.0, 2.0, 2.0, 2.0, 2.0, 2.0)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.values[self.current_epoch]}


def fit_told(config: saves.Config, trainer_class: type[saves.Saves] = Told) -> saves.Saves:
    return saves.fit(trainer_class(config))


def told_config(experiment: str, *callbacks: dt.Callback, n_epochs: int = 6, **checkpoint: Any) -> saves.Config:
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
    first = fit_told(told_config("run", dt.EarlyStopping(patience=2)))
    assert first.current_epoch == 3
    stopping = dt.EarlyStopping(patience=2)
    branch = fit_told(told_config("branch", stopping, resume=str(first.run_dir), branch=words), kind)
    assert (branch.current_epoch, stopping.best) == (epochs, best)


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
    first = fit_told(told_config("run", Counts(), n_epochs=2))
    second, third = Counts(), Counts()
    fit_told(told_config("run", second, n_epochs=3))
    assert (second.vocabulary, second.epochs, second.words) == (3, 3, [])
    fit_told(told_config("branch", third, n_epochs=2, resume=str(first.run_dir), branch=ANEW))
    assert (third.vocabulary, third.epochs, third.words) == (5, 2, [(True, True)])
    again = Counts()
    fit_told(told_config("branch", again, n_epochs=3, resume=str(first.run_dir), branch=ANEW))
    assert (again.vocabulary, again.epochs, again.words) == (6, 3, [])


class ByTokens(Branches):
    """Two tokens a batch."""

    schedule = dt.ScheduleParameters(name="cosine", unit="token", min_lr_ratio=0.1)

    def batch_tokens(self, batch: Any) -> int:
        return 2

    def configure_schedulers(self) -> None:
        tokens = dt.TokenAxis(lambda: self.tokens_before_next_step, self.config.training_parameters.max_tokens)
        self.scheduler = dt.build_schedule(self.schedule, self.optimizer, total_steps=None, tokens=tokens)


def by_tokens(experiment: str, max_tokens: int, **checkpoint: Any) -> list[float]:
    return fit(ByTokens(make_config(experiment, OLD, max_tokens, "max_tokens", **checkpoint))).rates


def rates_by_tokens(total: int, tokens: range) -> list[float]:
    factor = rate_factor(ByTokens.schedule, total_steps=total)
    return [OLD * factor(seen) for seen in tokens]


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


def simple(name: str, epochs: int, **options: Any) -> dt.Trainer:
    x = torch.linspace(-1, 1, 16).reshape(8, 2)
    torch.manual_seed(0)
    trainer = dt.Trainer(
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
        noted, ema = Weights(), dt.EMA(0.9, every_n_steps=4, device=device)
        training = {"max_steps": steps} | options
        fit_told(saves.make_config(experiment=name, callbacks=[noted, ema], training=training, **branch), saves.Saves)
        seen.append(noted.found)
        found = ema.averaged("model")
    parent, branched = seen
    average = parent[0]
    for move, moved_to in enumerate([parent[4], branched[4], branched[8]]):
        keep = min(0.9, (1 + move) / (10 + move))
        average = {name: keep * average[name] + (1 - keep) * value for name, value in moved_to.items()}
    torch.testing.assert_close(found, average)
