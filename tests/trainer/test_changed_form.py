"""What training changes beside values of weights comes back on a resume: a model's form, and what `pre_epoch` wipes."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import dream_trainer as dt
from tests.api import DistributedDataLoader
from tests.trainer import small
from tests.trainer.arithmetic import same_bits
from tests.trainer.saves import make_config
from tests.trainer.small import WIDTH, Batch, Samples, fill, train_on, weights
from tests.worlds import run_world

GLOBAL_BATCH, PER_EPOCH, STOP, LAST = 4, 2, 5, 8
State = dict[str, Tensor]


class Doubles(nn.Module):
    """Computes something else in training, as batch norm does, though the same on any mesh."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


class Queue(nn.Module):
    """Keeps a row of each forward in training; some ranks keep two."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(0, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        count = 1 + int(os.environ.get("RANK", "0"))
        self.rows = torch.cat([self.rows, x.detach().mean(0, keepdim=True).expand(count, -1)])
        return x + self.rows.mean(0)


class Net(nn.Module):
    """A backbone that is frozen at first, and a head."""

    def __init__(self, *, has_queue: bool = False) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), nn.Tanh()) for _ in range(2)]
        self.backbone = nn.Sequential(*blocks, Doubles())
        self.queue = Queue() if has_queue else nn.Identity()
        self.head = nn.Linear(WIDTH, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(self.queue(x)))


def freeze(model: Net, learns: bool) -> None:
    model.backbone.requires_grad_(learns).train(learns)


class Thaws:
    """Mix in: the backbone learns from the second epoch on."""

    has_queue = False

    def configure_models(self) -> None:
        self.model = Net(has_queue=self.has_queue)
        freeze(self.model, learns=False)

    def pre_epoch(self) -> None:
        if self.current_epoch == 1:
            freeze(self.model, learns=True)


class Sharded(Thaws, small.Sharded, dt.CheckpointMixin):
    pass


class Queues(Thaws):
    has_queue = True

    def pre_epoch(self) -> None:
        pass


class ShardedQueue(Queues, small.Sharded, dt.CheckpointMixin):
    pass


class ReplicatedQueue(Queues, small.Spread, dt.CheckpointMixin):
    pass


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def train(kind: type[Any], experiment: str, steps: int, **checkpoint: Any) -> State:
    config = make_config(
        experiment=experiment, training={"max_steps": steps}, **{"save_every_n_epochs": None} | checkpoint
    )
    batch = GLOBAL_BATCH // int(os.environ.get("WORLD_SIZE", "1"))
    loader = DistributedDataLoader(Samples(GLOBAL_BATCH * PER_EPOCH), batch)
    with kind(config, loader, make_optimizer=adamw) as trainer:
        trainer.fit()
        modes = {f"{name} trains": torch.tensor(m.training) for name, m in trainer.model.named_modules()}
        learning = {f"{name} learns": torch.tensor(p.requires_grad) for name, p in trainer.model.named_parameters()}
        buffers = {name: buffer.clone() for name, buffer in trainer.model.named_buffers()}
        return weights(trainer.model) | buffers | modes | learning


def straight_and_resumed(kind: type[Any]) -> tuple[State, State]:
    straight = train(kind, f"{kind.__name__} straight", LAST)
    train(kind, kind.__name__, STOP)
    return straight, train(kind, kind.__name__, LAST, resume="latest")


def by_hand(has_queue: bool) -> State:
    model, samples = Net(has_queue=has_queue), Samples(GLOBAL_BATCH * PER_EPOCH)
    fill(model)
    freeze(model, learns=False)
    optimizer = adamw(model)
    for step in range(LAST):
        if not has_queue and step == PER_EPOCH:
            freeze(model, learns=True)
        rows = slice(GLOBAL_BATCH * (step % PER_EPOCH), GLOBAL_BATCH * (step % PER_EPOCH + 1))
        train_on(optimizer, [mse_loss(model(samples.x[rows]), samples.y[rows])])
    return weights(model) | {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_close(found: State, wanted: State) -> None:
    torch.testing.assert_close({name: found[name] for name in wanted}, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.pitfall(97)
@pytest.mark.parametrize("kind", [Sharded, ShardedQueue])
def test_one_process_goes_on_with_the_models_form(kind: type[Any]) -> None:
    straight, resumed = straight_and_resumed(kind)
    assert_close(straight, by_hand(kind.has_queue))
    assert same_bits(resumed, straight)


KINDS: list[type[Any]] = [Sharded, ReplicatedQueue]
Pairs = dict[str, tuple[State, State]]
"""By the trainer's name: the run that was not stopped, and the one that was."""


def train_on_two(directory: str) -> Pairs:
    os.chdir(directory)
    pairs = {kind.__name__: straight_and_resumed(kind) for kind in KINDS}
    train(Sharded, "to one", STOP)
    return pairs


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def two_ranks(directory: Path) -> list[Pairs]:
    return run_world(train_on_two, 2, str(directory))


@pytest.mark.pitfall(97)
@pytest.mark.parametrize("kind", [kind.__name__ for kind in KINDS])
def test_two_ranks_go_on_with_the_models_form(two_ranks: list[Pairs], kind: str) -> None:
    for rank, found in enumerate(two_ranks):
        straight, resumed = found[kind]
        assert same_bits(resumed, straight)
        if "Queue" in kind:
            assert straight["queue.rows"].shape == (LAST * (1 + rank), WIDTH)
        else:
            assert_close(straight, by_hand(has_queue=False))


@pytest.mark.pitfall(97)
@pytest.mark.usefixtures("two_ranks")
def test_one_process_goes_on_with_the_form_that_two_ranks_had(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    assert_close(train(Sharded, "to one", LAST, resume="latest"), by_hand(has_queue=False))


class Edited(Sharded):
    """The code was edited: its setup freezes only one block."""

    def configure_models(self) -> None:
        super().configure_models()
        self.model.backbone[1].requires_grad_(True)

    def pre_epoch(self) -> None:
        pass


class NeverThaws(Sharded):
    def pre_epoch(self) -> None:
        pass


def test_what_the_edited_setup_does_holds_where_training_changed_nothing(caplog: pytest.LogCaptureFixture) -> None:
    train(NeverThaws, "edited", STOP)
    found = train(Edited, "edited", STOP + 1)
    assert [name for name in ("0.0.weight", "1.0.weight") if found[f"backbone.{name} learns"]] == ["1.0.weight"]
    (told,) = [line for line in caplog.messages if "is as this run's setup has it" in line]
    assert "requires_grad of model.backbone.1.0.weight, model.backbone.1.0.bias is as" in told


def test_a_checkpoint_from_before_the_thaw_is_frozen_again() -> None:
    config = make_config(training={"max_steps": LAST}, save_every_n_steps=1)
    loader = DistributedDataLoader(Samples(GLOBAL_BATCH * PER_EPOCH), GLOBAL_BATCH)
    with Sharded(config, loader, make_optimizer=adamw) as trainer:
        trainer.fit()
        assert trainer.model.backbone[0][0].weight.requires_grad
        trainer.load_checkpoint(trainer.checkpoint_dir / "step_00000001")
        assert not any(p.requires_grad for p in trainer.model.backbone.parameters())
        assert not trainer.model.backbone.training
        trainer.fit()
        assert_close(weights(trainer.model), by_hand(has_queue=False))


STOPS = (2, 5, 8)  # within the first epoch of four steps and the second, and at the end of one


class Sums(dt.Callback):
    """Begins sums anew in each epoch: a number, and a tensor that a checkpoint has as one."""

    def __init__(self) -> None:
        self.steps = 0

    def post_setup(self, trainer: Any) -> None:
        self.total = torch.zeros_like(trainer.model[1].weight)

    def pre_epoch(self, trainer: Any) -> None:
        self.steps = 0
        self.total.zero_()

    def post_train_step(self, trainer: Any) -> None:
        self.steps += 1
        self.total += trainer.model[1].weight.detach()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        return {"total": self.total}


class Wipes(small.Sharded, dt.CheckpointMixin):
    """Begins everything anew in each epoch, in place too, and draws random numbers there."""

    def __init__(self, config: Any, train: Any, stop_after: int | None) -> None:
        super().__init__(config, train)
        self.stop_after = stop_after
        self.shared: dict[str, list[int]] = {"steps": []}
        self.own: list[float] = []
        self.told: list[Any] = []

    def configure_models(self) -> None:
        super().configure_models()
        self.model.register_buffer("rows", torch.zeros(0, dtype=torch.float64))

    def pre_epoch(self) -> None:
        self.shared["steps"].clear()
        self.own.clear()
        self.model.rows = self.model.rows.new_zeros(0)
        self.begun = random.random()  # which no checkpoint has
        torch.rand(3)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        assert self.begun
        self.shared["steps"].append(self.global_step)
        self.own.append(float(torch.rand(())))
        self.model.rows = torch.cat([self.model.rows, batch[0].sum().view(1)])
        return super().training_step((batch[0] * (1 + self.own[0]), *batch[1:]), batch_idx)

    def post_train_step(self) -> None:
        self.told.append((self.global_step, list(self.shared["steps"]), list(self.own), self.model.rows.tolist()))
        if self.global_step == self.stop_after:
            self.request_stop("the test says so")

    def state_dict(self) -> dict[str, Any]:
        return {"shared": self.shared}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shared = state["shared"]

    def rank_state_dict(self) -> dict[str, Any]:
        return {"own": self.own}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        self.own = state["own"]


def train_wiping(experiment: str, stop_after: int | None) -> tuple[list[Any], list[Any], dict[str, Tensor]]:
    config = make_config(experiment=experiment, training={"max_steps": 10}, callbacks=[Sums()])
    loader = DistributedDataLoader(Samples(16), GLOBAL_BATCH // int(os.environ.get("WORLD_SIZE", "1")))
    with Wipes(config, loader, stop_after) as trainer:
        trainer.fit()
        sums = trainer.get_callback(Sums)
        total = {"total": small.full(sums.total).clone()}
        return trainer.told, [sums.steps, trainer.world.rank], weights(trainer.model) | total


def wipe_all() -> list[Any]:
    found = [train_wiping("straight", None)]
    parts = [train_wiping("stopped", stop) for stop in (*STOPS, None)]
    return [*found, ([line for told, _, _ in parts for line in told], *parts[-1][1:])]


def assert_same(straight: Any, stopped: Any) -> None:
    assert stopped[:2] == straight[:2]
    assert same_bits(stopped[2], straight[2])


@pytest.mark.pitfall(98)
def test_what_pre_epoch_begins_anew_goes_on_in_the_middle_of_an_epoch() -> None:
    straight, stopped = wipe_all()
    assert [len(rows) for *_, rows in straight[0]] == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert_same(straight, stopped)


@pytest.mark.pitfall(98)
def test_on_two_ranks_each_goes_on_with_its_own() -> None:
    ranks = run_world(wipe_all, 2)
    assert ranks[0][0][0][0][2] != ranks[1][0][0][0][2]
    for straight, stopped in ranks:
        assert_same(straight, stopped)
