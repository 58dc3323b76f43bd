"""Methods that save or count are not forwards, `gathered` gives plain and whole weights, and what a trainer is given
that was built too early is made equal over ranks or refused."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from tests.api import HookError, StepError, start
from tests.trainer.arithmetic import same_bits
from tests.trainer.small import BY_BLOCKS, Samples, Sharded, make_config, network, weights
from tests.worlds import run_world


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
