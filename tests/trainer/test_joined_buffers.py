"""Buffers that forwards change are joined as their policies say: validations and exports then speak of one model."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from tests.api import ConfigError, JoinedBuffers, World, export_checkpoint
from tests.trainer import small
from tests.trainer.small import WIDTH, Samples, fill, fit, make_config, weights
from tests.trainer.test_rank_differences import loader
from tests.worlds import run_world

N_TRAINED, N_VALIDATED = 12, 14
RUNNING = {"running": "mean"}
QUEUE = RUNNING | {r"model\.(signs|queue|place)$": "rank 0", "seen": "as is"}


class Running(nn.Module):
    """Divides by a running norm of its own, which it puts in place of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small.network()
        self.register_buffer("running", torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x / self.running.sqrt()
        if self.training:
            self.running = 0.5 * self.running + 0.5 * x.detach().square().mean(0)
        return self.body(scaled)


class Queue(Running):
    """Adds the mean of what it has seen last, with the signs of its last sample; counts what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("signs", torch.zeros(WIDTH, dtype=torch.bool))
        self.register_buffer("queue", torch.zeros(5, WIDTH, dtype=torch.float64))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("rows", torch.zeros(0), persistent=False)  # of the last batch, and nobody's state

    def forward(self, x: Tensor) -> Tensor:
        added = (self.queue.mean(0) * torch.where(self.signs, 1.0, -1.0)).clone()
        if self.training:
            for row in x.detach():
                self.queue[self.place % len(self.queue)] = row
                self.place += 1
            self.signs.copy_(x[-1] > 0)
            self.seen.copy_(x[0].detach())
            self.rows = x.detach()[:, 0].clone()
        return super().forward(x + added)


class Joins(small.Validates, dt.CheckpointMixin):
    """Trains `make()` under `policies`."""

    make: type[nn.Module] = Running
    policies: Any = RUNNING

    def configure_models(self) -> None:
        self.model = type(self).make()

    def init_weights(self) -> None:
        fill(self.model.body)

    def buffer_policies(self) -> Any:
        return self.policies

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        self.validated = metrics["val/loss"]


class Replicas(Joins, small.Spread):
    config: Any


def run(base: type, make: type[nn.Module], policies: Any) -> dict[str, Any]:
    name = f"{base.__name__} {make.__name__} {len(policies)}"
    checkpoint = dt.CheckpointParameters(save_every_n_epochs=None)
    config = make_config(experiment=name, n_epochs=2, checkpoint=checkpoint)
    trainer = type("Of", (base,), {"make": make, "policies": policies})(config, loader(N_TRAINED), loader(N_VALIDATED))
    with small.told() as lines, trainer:
        trainer.fit()
        found = {
            "seen": trainer.seen,
            "weights": weights(trainer.model),
            "validated": trainer.validated,
            "buffers": {name: buffer.clone() for name, buffer in trainer.model.named_buffers()},
        }
        (newest,) = trainer.checkpoints()
    if trainer.world.rank == 0:
        out = Path(f"{name}.safetensors")
        export_checkpoint(newest.path, out)
        found["state"] = load_file(out)
    return found | {"lines": [line for line in lines if "buffers differ" in line]}


CASES: list[tuple[type, type[nn.Module], Any]] = [
    (base, make, policies)
    for base in (Replicas, small.sharded(Replicas))
    for make, policies in ((Running, RUNNING), (Queue, QUEUE))
]


def run_all() -> list[dict[str, Any]]:
    return [run(*case) for case in (*CASES, (Replicas, Queue, {"seen": "as is"}))]


def by_hand(make: type[nn.Module], of_ranks: list[list[list[int]]]) -> nn.Module:
    """The loop over both ranks' samples: each rank's forward begins from the buffers that they share."""
    data = Samples(N_TRAINED)
    model = make()
    fill(model.body)
    optimizer = small.sgd(model)
    for batches in zip(*of_ranks, strict=True):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        after, losses = [], []
        for numbers in batches:
            for name, buffer in before.items():
                setattr(model, name, buffer.clone())
            losses.append(mse_loss(model(data.x[numbers]), data.y[numbers]))
            after.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        for name, first in after[0].items():
            setattr(model, name, torch.stack([one[name] for one in after]).mean(0) if name == "running" else first)
        small.train_on(optimizer, [sum(losses) / len(losses)])
    return model


def whole(of_ranks: list[list[list[int]]]) -> list[list[list[int]]]:
    """As one process has them."""
    return [[[number for numbers in batches for number in numbers] for batches in zip(*of_ranks, strict=True)]]


def exported_loss(make: type[nn.Module], state: dict[str, Tensor]) -> float:
    model = make()
    model.load_state_dict(state)
    data = Samples(N_VALIDATED)
    with torch.no_grad():
        return mse_loss(model.eval()(data.x), data.y).item()


def look_once() -> list[list[str]]:
    """Warnings of a run that only validates, of one that only saves, and of one without a class."""
    of_runs = []
    for saves in (False, True):
        checkpoint = dt.CheckpointParameters(save_every_n_epochs=None, save_at_end=saves)
        config = make_config(experiment=f"saves {saves}", n_epochs=2, checkpoint=checkpoint)
        cls = type("Of", (Replicas,), {"policies": {}})
        with small.told() as lines:
            fit(cls(config, loader(N_TRAINED), None if saves else loader(N_VALIDATED)))
        of_runs.append([line for line in lines if "buffers differ" in line])
    return of_runs


@pytest.mark.pitfall(90)
def test_buffers_that_differ_are_named_once_by_a_validation_and_by_a_save() -> None:
    first, second = run_world(look_once, 2)
    assert second == [[], []]
    for (line,) in first:
        assert "ranks: model.running. " in line
        assert 'in buffer_policies(), such as {"model.running": "mean"}' in line


@pytest.mark.pitfall(80)
@pytest.mark.pitfall(90)
def test_buffers_are_joined_as_their_policies_say_and_the_export_is_what_was_validated() -> None:
    first, second = run_world(run_all, 2)
    for (_, make, _), found, other in zip(CASES, first, second, strict=False):
        of_ranks = [found["seen"], other["seen"]]
        expected = [by_hand(make, of_ranks)]
        if make is Running:
            expected.append(by_hand(make, whole(of_ranks)))  # linear: as one process that sees all samples
        for model in expected:
            torch.testing.assert_close(found["weights"], weights(model), rtol=0, atol=1e-12)
            for name, value in model.named_buffers():
                if name not in ("seen", "rows"):
                    torch.testing.assert_close(found["buffers"][name], value, rtol=0, atol=1e-12)
                    assert torch.equal(found["buffers"][name], other["buffers"][name]), name
        assert found["lines"] == []
        assert found["validated"] == other["validated"]
        assert found["validated"] == pytest.approx(exported_loss(make, found["state"]), abs=1e-12)
    assert not torch.equal(first[1]["buffers"]["seen"], second[1]["buffers"]["seen"])

    unsaid = first[4]
    (line,) = unsaid["lines"]
    assert "model.queue, model.running, model.signs. " in line
    assert "buffer_policies()" in line
    assert second[4]["lines"] == []
    assert abs(unsaid["validated"] - exported_loss(Queue, unsaid["state"])) > 1e-3


def joined_by_hand() -> list[str]:
    """One rank's buffer grows, before ranks join for the first time, and after."""
    world = World(dt.DeviceParameters(device="cpu"), shard_by_default=False)
    errors = []
    for is_late in (False, True):
        model = Running()
        buffers = JoinedBuffers({"model": model}, {"running": "rank 0"})
        if is_late:
            buffers.join(world, world.averaging_group())
        if world.rank:
            model.running = torch.ones(WIDTH + 1)
        try:
            if world.rank or not is_late:
                buffers.join(world, world.averaging_group())
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    world.close()
    return errors


@pytest.mark.pitfall(90)
def test_a_buffer_that_grows_on_one_rank_is_named_and_nothing_hangs() -> None:
    (early,), (same, late) = run_world(joined_by_hand, 2)
    assert early == same
    assert "model.running (torch.float64 [3] on rank 0; torch.float32 [4] on rank 1)" in early
    assert late.startswith("StepError: buffer model.running has the shape [4] and had [3]")
    for message in (early, late):
        assert 'choose "as is"' in message


@pytest.mark.parametrize(
    ("policies", "words"),
    [
        ({"codebok": "mean"}, ["'codebok'", "matches no buffer", "model.running, model.signs"]),
        ({"running": "sum"}, ["['running']='sum'", "'mean', 'rank 0' or 'as is'"]),
        ({"place": "mean"}, ["model.place", "torch.int64", 'Use "rank 0"']),
        ({"(": "mean"}, ["not a regular expression"]),
    ],
)
def test_policies_that_cannot_be_are_refused_on_any_number_of_ranks(policies: dict[str, str], words: list[str]) -> None:
    trainer = type("Of", (Replicas,), {"make": Queue, "policies": policies})(make_config(n_epochs=1), loader(4))
    with pytest.raises(ConfigError) as error:
        trainer.fit()
    trainer.close()
    assert all(word in str(error.value) for word in words)
