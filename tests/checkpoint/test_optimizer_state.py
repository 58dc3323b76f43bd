"""Optimizers come back by name: the next step is the one that would have been made."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests import api
from tests.checkpoint.states import save

Build = Callable[[list[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, Build] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), fused=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "muon": lambda p: torch.optim.Muon([value for value in p if value.ndim == 2], lr=0.1),
}


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def train(model: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def write(root: Path, model: nn.Module, optimizer: Optimizer) -> Path:
    models = {"net": model}
    tensors, values, _ = api.optimizer_state("main", optimizer, api.parameter_fqns(models), world=api.Ranks.alone())
    return save(root, 1, tensors={**api.model_tensors(models), **tensors}, shared={"optimizer": values})


def restore(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    models = {"net": model}
    values = api.read_shared(path)["optimizer"]
    tensors, finish = api.prepare_optimizer_state(
        "main", optimizer, api.parameter_fqns(models), values, api.tensor_metadata(path)
    )
    api.load_tensors(path, {**api.model_tensors(models), **tensors}, world=api.Ranks.alone())
    finish()


def assert_equal(left: Any, right: Any) -> None:
    """Equal in value, type, dtype and device, all the way down."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.device, left.shape) == (right.dtype, right.device, right.shape)
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    else:
        assert left == right


@pytest.mark.parametrize("steps", [3, 0])
@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_restored_optimizer_goes_on_bit_for_bit_also_from_no_step(tmp_path: Path, build: Build, steps: int) -> None:
    model, other = net(0), net(1)
    optimizer, fresh = build(list(model.parameters())), build(list(other.parameters()))
    train(model, optimizer, 0, steps)
    state_before = {id(key): dict(value) for key, value in optimizer.state.items()}
    path = write(tmp_path, model, optimizer)
    assert {id(key): dict(value) for key, value in optimizer.state.items()} == state_before
    restore(path, other, fresh)
    if steps:
        assert_equal(fresh.state_dict(), optimizer.state_dict())
    train(model, optimizer, steps, steps + 2)
    train(other, fresh, steps, steps + 2)
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))
    assert_equal(fresh.state_dict(), optimizer.state_dict())


def two_groups(model: nn.Module) -> Optimizer:
    matrices = [value for value in model.parameters() if value.ndim == 2]
    vectors = [value for value in model.parameters() if value.ndim == 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "lr": 0.01}], lr=0.1)


@pytest.mark.pitfall(39)
def test_groups_in_another_order_get_their_own_options_and_state(tmp_path: Path) -> None:
    model, other = net(0), net(1)
    optimizer = two_groups(model)
    train(model, optimizer, 0, 2)
    parameters = list(other.parameters())
    fresh = torch.optim.AdamW([{"params": [parameters[3], parameters[1]]}, {"params": [parameters[2], parameters[0]]}])
    restore(write(tmp_path, model, optimizer), other, fresh)
    train(model, optimizer, 2, 4)
    train(other, fresh, 2, 4)
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))


def test_a_tensor_learning_rate_stays_the_tensor_that_others_hold(tmp_path: Path) -> None:
    model, other = net(0), net(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25))
    rate = torch.tensor(1.0)
    fresh = torch.optim.AdamW(other.parameters(), lr=rate)
    restore(write(tmp_path, model, optimizer), other, fresh)
    assert fresh.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


@pytest.mark.pitfall(39)
def test_another_parameter_in_front_is_an_error_and_shifts_nothing(tmp_path: Path) -> None:
    model = net(0)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 0, 1)
    path = write(tmp_path, model, optimizer)
    wider = net(1)
    wider.insert(0, nn.Linear(3, 3))
    fresh = torch.optim.AdamW(wider.parameters(), lr=0.7)
    with pytest.raises(api.CheckpointError, match=r"only here: net\.1\.bias, net\.1\.weight, net\.3"):
        restore(path, wider, fresh)
    assert fresh.param_groups[0]["lr"] == 0.7
    assert not fresh.state


class Own(torch.optim.SGD):
    """Hands out what it keeps beside `state`."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9, **options)
        self.extra = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"extra": self.extra}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.extra = state_dict["extra"]


class Forgets(Own):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"extra": torch.zeros(2)})


@pytest.mark.pitfall(96)
def test_a_load_state_dict_that_forgets_something_is_an_error_that_says_what(tmp_path: Path) -> None:
    model, other = net(0), net(1)
    optimizer, fresh = Forgets(model.parameters()), Forgets(other.parameters())
    optimizer.extra += 1
    path = write(tmp_path, model, optimizer)
    with pytest.raises(api.CheckpointError, match=r"load_state_dict\(\) of Forgets .* did not bring back extra,"):
        restore(path, other, fresh)


@pytest.mark.pitfall(96)
def test_own_state_keeps_its_type_and_this_process_its_implementation(tmp_path: Path) -> None:
    """PyTorch's `load_state_dict` casts state to the type of its parameter."""
    model, other = net(0).bfloat16(), net(1).bfloat16()
    optimizer, fresh = Own(model.parameters(), foreach=True), Own(other.parameters(), foreach=False)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 1 / 3, dtype=torch.float32)
    optimizer.param_groups[0]["lr"] = 0.25
    restore(write(tmp_path, model, optimizer), other, fresh)
    assert_equal(fresh.state_dict()["state"], optimizer.state_dict()["state"])
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["foreach"]) == (0.25, False)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [torch.ones(1)], "a.0": torch.ones(1)}, r"two tensors of its state .*net\.0\.weight\.a\.0"),
        ({"sums": {"deep": [torch.eye(2).to_sparse()]}}, r"net\.0\.weight\.sums\.deep\.0 is no dense tensor"),
        ({"history": object()}, r"optimizers\.main\.state\.net\.0\.weight\.values\.history: <class 'object'>"),
    ],
    ids=["one name", "sparse", "another type"],
)
def test_state_that_cannot_be_kept_is_an_error_naming_it(state: dict[str, Any], message: str) -> None:
    model = net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].weight] |= state
    with pytest.raises(api.CheckpointError, match=message):
        api.optimizer_state("main", optimizer, api.parameter_fqns({"net": model}), world=api.Ranks.alone())


def test_stages_with_other_numbers_of_groups_are_an_error() -> None:
    first, last = {"groups": [{"parameters": ["a"]}]}, {"groups": [{"parameters": ["b"]}, {"parameters": ["head"]}]}
    with pytest.raises(api.CheckpointError, match="an empty one where a stage has no such parameters"):
        api.of_all_stages([first, last])
