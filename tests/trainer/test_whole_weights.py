"""Whole weights beside their shards: methods that save or count, `gathered`, code that reads or writes either. Models
and optimizers that were built too early are made equal over ranks or refused."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from tests.api import DistributedDataLoader, HookError, StepError, start
from tests.trainer.arithmetic import full, same_bits
from tests.trainer.small import BY_BLOCKS, Samples, Sharded, error_of, make_config, network, weights
from tests.worlds import run_each, run_world


def loader() -> Any:
    return torch.utils.data.DataLoader(Samples(16), batch_size=2)


class Model(nn.Module):
    """With methods that people's models have."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)))
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.blocks(x)

    def save_pretrained(self, path: str, state_dict: dict[str, Tensor]) -> None:
        torch.save(state_dict, path)

    def count_parameters(self, like: Tensor) -> int:
        return sum(p.numel() for p in self.parameters())

    def tell(self, state: dict[str, Tensor]) -> int:
        return len(state)


class Saves(Sharded):
    make_model = staticmethod(lambda: Model().double())


def saved_on_rank_0() -> dict[str, Any]:
    with Saves(make_config(max_steps=1, fsdp=BY_BLOCKS), loader()) as trainer:
        trainer.fit()
        model, found = trainer.model, {}
        with trainer.gathered(model):
            state = model.state_dict()
            found["plain"] = all(type(value) is Tensor for value in state.values())
            found["shapes"] = [tuple(value.shape) for value in state.values()]
            x = torch.ones(1, 3, dtype=torch.float64)
            found["after"] = model(x).item()
            found["state"] = {name: value.clone() for name, value in state.items()}
            with pytest.raises(StepError, match="gathered"):
                model.load_state_dict(state)
        if trainer.world.is_main:
            model.save_pretrained("weights.pt", state_dict=found["state"])
            found["count"] = model.count_parameters(x)
            found["tell"] = model.tell(found["state"])
        found["again"] = model(x).item()
        with trainer.gathered(model):
            found["encoded"] = model.encode(x).detach()
        return found


@pytest.mark.pitfall(83)
def test_saving_and_counting_run_on_one_rank_alone_and_gathered_weights_are_plain_and_whole(tmp_path: Path) -> None:
    results = run_world(saved_on_rank_0, 2)
    plain = Model().double()
    for found in results:
        assert found["plain"]
        assert found["shapes"] == [tuple(p.shape) for p in plain.parameters()]
        plain.load_state_dict(found["state"])
        x = torch.ones(1, 3, dtype=torch.float64)
        assert found["after"] == found["again"] == plain(x).item()
        assert torch.equal(found["encoded"], plain.encode(x))
    assert results[0]["count"] == sum(p.numel() for p in plain.parameters())
    assert results[0]["tell"] == 6
    assert same_bits(torch.load(tmp_path / "weights.pt", weights_only=True), results[1]["state"])


class BuiltEarly(Sharded):
    """The habit of Lightning."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model = network()

    def configure_models(self) -> None: ...

    def init_weights(self) -> None: ...

    def pre_fit(self) -> None:
        self.initial = weights(self.model)


def built_in_the_constructor() -> tuple[dict[str, Tensor], str, str]:
    torch.manual_seed(100 + int(os.environ.get("RANK", "0")))  # as unseeded processes are
    said: list[str] = []
    with BuiltEarly(make_config(max_steps=1), loader()) as trainer:
        own = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        say = trainer.warn_once
        vars(trainer)["warn_once"] = lambda key, message: (said.append(message), say(key, message))
        trainer.fit()
    return own, trainer.initial, "\n".join(said)


@pytest.mark.pitfall(73)
def test_models_built_in_the_constructor_start_equal_on_all_ranks_and_are_named() -> None:
    first, second = run_world(built_in_the_constructor, 2)
    assert not torch.equal(first[0]["1.weight"], second[0]["1.weight"])  # they were built unequal
    assert same_bits(first[1], first[0])
    assert same_bits(second[1], first[0])
    assert "built before configure_models. Rank 0's values are taken on all ranks: model.0.0.0.weight" in first[2]


class CollectsEarly(Sharded):
    def configure_models(self) -> None:
        super().configure_models()
        self.collected = list(self.model.parameters())

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.collected, lr=0.1)


class Stranger(Sharded):
    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        self.temperature = nn.Parameter(torch.zeros(2))
        self.second = torch.optim.SGD([self.temperature], lr=0.1)


def refused(kind: type[Sharded]) -> str:
    with kind(make_config(max_steps=1), loader()) as trainer, pytest.raises(HookError) as told:
        start(trainer._runtime)
    return str(told.value)


@pytest.mark.pitfall(74)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (CollectsEarly, ["self.optimizer", "no model of the trainer", "configure_optimizers"]),
        (Stranger, ["self.second", "shape (2,)", "no model of the trainer"]),
    ],
)
def test_an_optimizer_of_parameters_that_no_model_has_is_refused_on_all_ranks(
    kind: type[Sharded], words: list[str]
) -> None:
    for said in run_world(refused, 2, kind):
        assert all(word in said for word in words), said


LENGTH, GLOBAL = 24, 4


class OwnLists(torch.optim.SGD):
    """Works on parameters that it holds beside its groups, with averages of them from its constructor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        mine = [p for group in self.param_groups for p in group["params"]]
        self.halves = {"first": mine[:2], "rest": tuple(mine[2:])}
        self.averages = [p.detach().clone() for p in mine]
        self.inner = torch.optim.SGD([{"params": mine[:2]}, {"params": mine[2:]}], lr=lr)

    def halve_gradients(self) -> None:
        for p in (*self.halves["first"], *self.halves["rest"]):
            assert p.grad is not None
            p.grad.mul_(0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for p, average in zip([*self.halves["first"], *self.halves["rest"]], self.averages, strict=True):
            average.lerp_(p, 0.1)
            p.lerp_(average, 0.5)


class Hides(torch.optim.SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.hidden = SimpleNamespace(params=[p for group in self.param_groups for p in group["params"]])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.hidden.params:
            p.mul_(0.9)


OWN: dict[str, Any] = {
    "state of the constructor": torch.optim.Adagrad,
    "an optimizer's lists": OwnLists,
    "an optimizer's objects": Hides,
}


class Trained(Sharded, dt.CheckpointMixin):
    kind = ""

    def configure_optimizers(self) -> None:
        self.kept = list(self.model[0].parameters())
        make = OWN.get(self.kind, torch.optim.Adam)
        self.optimizer = make(self.model.parameters(), lr=0.05)
        self.found: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.backward(mse_loss(self.model(batch[0]), batch[1]))
        if self.kind == "an optimizer's lists":
            self.reduce_gradients(self.optimizer)
            self.optimizer.halve_gradients()
        if self.kind == "kept list":
            self.reduce_gradients(self.optimizer)
            nn.utils.clip_grad_norm_(self.kept, 0.01)
        self.step(self.model, self.optimizer)
        if self.kind in ("average of clamped", "kept list"):
            for parameter in self.kept:
                parameter.data.clamp_(-0.2, 0.2)
        return {}

    def post_epoch(self) -> None:
        if self.kind == "averages in an event":
            self.look_at_averages()
        if self.kind == "saved in an event":
            self.save_checkpoint()
            self.load_checkpoint(self.checkpoints()[-1].path)
        if self.kind == "weights in an event":
            with self.changing_weights():
                for parameter in self.model.parameters():
                    parameter.data.mul_(0.9)

    def look_at_averages(self) -> None:
        with self.get_callback(dt.EMA).averaged_weights():
            self.found.append(float(self.model(Samples(LENGTH).x).sum()))


KINDS = [
    *("average of clamped", "averages in an event", "saved in an event", "weights in an event"),
    *("kept list", "state of the constructor", "an optimizer's lists"),
]


def train(kind: str, directory: Path) -> dict[str, Any]:
    os.chdir(directory)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    config = make_config(experiment=kind.replace(" ", "-"), n_epochs=3, callbacks=[dt.EMA(0.5)])
    trainer = Trained(config, DistributedDataLoader(Samples(LENGTH), GLOBAL // ranks))
    trainer.kind = kind
    with trainer:
        trainer.fit()
        averages = {name: full(value) for name, value in trainer.get_callback(dt.EMA).averaged("model").items()}
        return {"weights": weights(trainer.model), "averages": averages, "found": trainer.found}


@pytest.mark.pitfall(104)
def test_shards_and_whole_parameters_are_never_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    alone = run_each(train, 1, KINDS, tmp_path / "one")
    for (kind, ranks), (_, (expected,)) in zip(run_each(train, 2, KINDS, tmp_path / "two"), alone, strict=True):
        for found in ranks:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, msg=f"{kind}: {{}}".format)


def refused_beside_shards() -> str:
    trainer = Trained(make_config(n_epochs=1), DistributedDataLoader(Samples(LENGTH), 2))
    trainer.kind = "an optimizer's objects"
    return error_of(trainer)


def test_an_optimizer_that_would_write_beside_the_shards_is_refused_on_all_ranks() -> None:
    for said in run_world(refused_beside_shards, 2):
        assert "0.0.0.weight" in said
        assert "param_groups" in said
