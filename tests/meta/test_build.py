"""A deferred build equals the plain constructor, in one process."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from tests.api import InitError, Tape, default_init, materialize, remember

from .building import KnownDraws, deferred, planned, tensors
from .families import FAMILIES, Late, NanoGPT, Views

MADE_AFTER = {"late": lambda model: model.init_weights()}


@pytest.mark.pitfall(20)
@pytest.mark.parametrize("family", FAMILIES)
def test_with_known_draws_every_bit_equals_the_plain_constructor(family: str) -> None:
    with KnownDraws():
        plain = FAMILIES[family]()
        MADE_AFTER.get(family, lambda model: None)(plain)
    tape = Tape(0)
    with tape.recording(), KnownDraws():
        built = FAMILIES[family]()
        default_init(built, tape)
    plan = remember({"model": built}, tape)
    materialize({"model": built}, plan, "cpu")
    expected, found = tensors(plain), tensors(built)
    assert list(expected) == list(found)
    for name, value in expected.items():
        other = found[name]
        assert torch.equal(value, other), name
        assert (value.stride(), value.dtype, type(value)) == (other.stride(), other.dtype, type(other)), name
        assert value.requires_grad == other.requires_grad, name
        assert other.device.type == "cpu"
        assert other.is_leaf


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_decides_every_bit(family: str) -> None:
    one, two, other = (tensors(deferred(FAMILIES[family], seed)) for seed in (0, 0, 1))
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    if family != "batch_norm":
        assert any(not torch.equal(value, other[name]) for name, value in one.items())


def test_draws_follow_the_distribution_that_was_asked_for() -> None:
    def make() -> nn.Module:
        model = nn.Linear(400, 500)
        nn.init.trunc_normal_(model.weight, std=2.0, a=-3, b=3)
        return model

    model = deferred(make)
    assert model.weight.abs().max() <= 3
    assert abs(float(model.weight.detach().std()) - 1.5) < 0.1
    bound = 400**-0.5
    assert model.bias.abs().max() <= bound
    assert abs(float(model.bias.detach().std()) - bound / 3**0.5) < 0.005
    init = deferred(FAMILIES["every_init"])
    torch.testing.assert_close(init.orthogonal.T @ init.orthogonal, torch.eye(8))
    assert ((init.sparse == 0).sum(0) == 3).all()


@pytest.mark.pitfall(57)
def test_padding_rows_and_init_applied_in_a_constructor_count() -> None:
    embedding = deferred(lambda: nn.Embedding(7, 5, padding_idx=3))
    assert (embedding.weight[3] == 0).all()
    assert (embedding.weight[2] != 0).all()
    model = deferred(NanoGPT)
    assert abs(float(model.blocks[0].up.weight.std()) - 0.02) < 0.004
    assert abs(float(model.blocks[0].proj.weight.std()) - 0.02 / 8**0.5) < 0.002
    assert (model.blocks[0].up.bias == 0).all()


@pytest.mark.pitfall(20)
def test_ties_identity_and_attributes_of_parameters_survive() -> None:
    held: list[nn.Parameter] = []

    def make() -> nn.Module:
        model = NanoGPT()
        held.append(model.wte.weight)
        return model

    model = deferred(make)
    assert model.head.weight is model.wte.weight is held[0]
    assert held[0].no_decay
    assert isinstance(held[0], nn.Parameter)
    assert model.mask[0, 1] == -torch.inf
    assert torch.equal(model.mask, model.clip_mask)
    assert model.scale == 1.5
    assert (model.tables[1] == 2).all()
    model(torch.zeros(2, 8, dtype=torch.long)).sum().backward()
    assert held[0].grad is not None


def test_the_tape_leaves_global_generators_as_they_were() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    deferred(Views)
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]


def test_a_parameter_that_nobody_initialised_is_named() -> None:
    class Forgot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.rows = nn.Parameter(torch.empty(4, 4))
            with torch.no_grad():
                self.inner.rows[:2] = 1

    with pytest.raises(InitError, match=r"model\.inner\.rows .*init_weights"):
        deferred(Forgot)


def test_pretrained_weights_keep_their_values() -> None:
    pretrained = nn.Linear(4, 4)
    state = {name: torch.ones_like(value) for name, value in tensors(Late()).items()}

    class Tuned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.given = pretrained
            self.loaded = Late()
            self.loaded.load_state_dict(state)
            self.head = Late()

    before = pretrained.weight.clone()
    model = deferred(Tuned)
    assert model.given.weight is pretrained.weight
    assert torch.equal(pretrained.weight, before)
    assert (model.loaded.weight == 1).all()
    assert (model.loaded.inner.weight == 1).all()
    assert (model.head.inner.weight == 0.5).all()


def test_models_built_on_meta_beforehand_are_reset() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Embedding(5, 4, padding_idx=1))
        attention = nn.MultiheadAttention(8, 2)
    tape = Tape(0)
    with tape.recording():
        model.append(attention)
    default_init(model, tape)
    materialize({"m": model}, remember({"m": model}, tape), "cpu")
    assert 0 < model[0].weight.abs().max() <= 1 / 8
    assert (model[1].running_var == 1).all()
    assert (model[2].weight[1] == 0).all()
    assert (attention.in_proj_bias == 0).all()


def test_gradients_during_the_build_are_refused() -> None:
    with pytest.raises(InitError, match="load_pretrained"), Tape(0).recording():
        nn.Linear(3, 3).weight.sum().backward()


def test_replay_costs_what_one_tensor_depends_on() -> None:
    model, plan = planned(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(200))))
    tape = plan.tape
    runs = [len(tape.calls_behind(tape.ref(p).storage)) for p in model.parameters()]
    assert max(runs) <= 2
    assert len(tape.ops) >= 400
