"""A deferred build equals the plain constructor, in one process."""

from __future__ import annotations

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


def test_recurrent_modules_use_the_values_they_were_given() -> None:
    model = deferred(lambda: nn.LSTM(3, 4))
    twin = nn.LSTM(3, 4)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(5, 2, 3)
    assert torch.equal(model(x)[0], twin(x)[0])
    assert all(kept is own for kept, own in zip(model._flat_weights, model.parameters(), strict=True))


def test_the_tape_leaves_global_generators_as_they_were() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    deferred(Views)
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]


def test_real_draws_do_not_depend_on_the_caller_either() -> None:
    def make() -> nn.Module:
        model = nn.Module()
        model.register_buffer("draws", torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))]))
        return model

    torch.manual_seed(5), random.seed(5)
    one = deferred(make).draws
    torch.manual_seed(6), random.seed(6)
    assert torch.equal(one, deferred(make).draws)


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


def test_an_integer_parameter_that_nobody_initialised_is_named() -> None:
    def make() -> nn.Module:
        model = nn.Module()
        model.codes = nn.Parameter(torch.empty(4, dtype=torch.int32), requires_grad=False)
        return model

    with pytest.raises(InitError, match=r"model\.codes"):
        deferred(make)


def test_scratch_buffers_and_nan_on_purpose_are_fine() -> None:
    def make() -> nn.Module:
        model = nn.Module()
        model.register_buffer("scratch", torch.empty(3))
        model.register_buffer("nan", torch.empty(3).fill_(float("nan")))
        return model

    assert deferred(make).nan.isnan().all()


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


def test_tables_lost_before_the_recording_are_named() -> None:
    with torch.device("meta"):
        model = nn.Module()
        model.register_buffer("rope", torch.arange(4.0))
    tape = Tape(0)
    with pytest.raises(InitError, match=r"m\.rope"):
        materialize({"m": model}, remember({"m": model}, tape), "cpu")


def test_a_meta_device_inside_the_recording_changes_nothing() -> None:
    def make() -> nn.Module:
        with torch.device("meta"):
            return NanoGPT()

    with KnownDraws():
        plain = tensors(NanoGPT())
    tape = Tape(0)
    with tape.recording(), KnownDraws():
        model = make()
    materialize({"m": model}, remember({"m": model}, tape), "cpu")
    for name, value in tensors(model).items():
        assert torch.equal(value, plain[name]), name


def test_init_recorded_later_overrides_the_constructor() -> None:
    tape = Tape(0)
    with tape.recording():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with torch.no_grad(), tape.recording():
        model[1].weight.copy_(model[0].weight)
        model[0].weight.fill_(4)
    materialize({"m": model}, remember({"m": model}, tape), "cpu")
    assert (model[0].weight == 4).all()
    assert model[1].weight.std() > 0.1


def test_a_generator_is_honoured_exactly() -> None:
    def make() -> nn.Module:
        generator = torch.Generator().manual_seed(3)
        model = nn.Linear(5, 5)
        nn.init.normal_(model.weight, generator=generator)
        nn.init.trunc_normal_(model.bias, generator=generator)
        model.register_buffer("after", torch.rand(3, generator=generator))
        return model

    plain, model = make(), deferred(make)
    assert all(torch.equal(value, tensors(plain)[name]) for name, value in tensors(model).items())


def test_tensors_that_share_memory_share_it_afterwards() -> None:
    def make() -> nn.Module:
        model = nn.Module()
        model.weight = nn.Parameter(torch.empty(4, 3).normal_())
        model.same = nn.Parameter(model.weight.data)
        model.first_row = model.weight.detach()[0]
        return model

    model = deferred(make)
    with torch.no_grad():
        model.weight.fill_(9)
    assert (model.same == 9).all()
    assert (model.first_row == 9).all()


def test_gradients_during_the_build_are_refused() -> None:
    with pytest.raises(InitError, match="load_pretrained"), Tape(0).recording():
        nn.Linear(3, 3).weight.sum().backward()


def test_shape_mistakes_raise_what_they_always_raise() -> None:
    with pytest.raises(RuntimeError, match="size"), Tape(0).recording(), torch.no_grad():
        nn.Linear(3, 3).weight.copy_(torch.ones(2, 2))


def test_a_forward_in_the_constructor_updates_real_statistics() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        with torch.no_grad():
            model(torch.arange(12.0).reshape(3, 4))
        return model

    assert deferred(make)[1].num_batches_tracked == 1
    assert not torch.equal(deferred(make)[1].running_mean, torch.zeros(4))


def test_lazy_modules_work_after_a_dummy_forward() -> None:
    def make() -> nn.Module:
        model = nn.LazyLinear(4)
        model(torch.zeros(1, 7))
        return model

    model = deferred(make)
    assert type(model) is nn.Linear
    assert model.weight.shape == (4, 7)
    assert not model.weight.isnan().any()


def test_replay_costs_what_one_tensor_depends_on() -> None:
    model, plan = planned(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(200))))
    history = plan.tape.history
    runs = [len(history.calls_behind(history.ref(p).storage)) for p in model.parameters()]
    assert max(runs) <= 2
    assert len(history.ops) >= 400


def test_dtypes_are_those_of_the_time_of_construction() -> None:
    def make() -> nn.Module:
        torch.set_default_dtype(torch.float64)
        try:
            return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float32)).requires_grad_(False)
        finally:
            torch.set_default_dtype(torch.float32)

    model = deferred(make)
    assert (model[0].weight.dtype, model[1].weight.dtype) == (torch.float64, torch.float32)
    assert not any(p.requires_grad for p in model.parameters())


def test_moving_to_the_cpu_stays_an_alias_and_arrays_are_read_only() -> None:
    with Tape(0).recording(), torch.no_grad():
        weight = torch.empty(3).fill_(1)
        weight.cpu().mul_(2)
        weight.to("cpu").mul_(2)
        assert weight.tolist() == [4, 4, 4]
        assert weight.device.type == "cpu"
        assert not weight.is_meta
        assert weight.to(torch.int32).dtype is torch.int32
        with pytest.raises(ValueError, match="read-only"):
            weight.numpy()[0] = 1


def test_reads_do_not_disturb_what_is_written_later() -> None:
    tape = Tape(0)
    with tape.recording(), torch.no_grad():
        weight = torch.empty(1000).normal_()
        before = float(weight[0])
        doubled = weight * 2
        weight.fill_(5)
        assert float(doubled[0]) == 2 * before
        assert bool((weight == 5).all())
    assert (tape.replay(weight) == 5).all()
    assert tape.replay(doubled)[0] == 2 * before
