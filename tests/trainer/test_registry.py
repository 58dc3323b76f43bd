"""Registries: models, optimizers, schedulers and metrics by the attributes that hold them."""

from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn as nn

import dream_trainer as dt
from dream_trainer.trainer import mixins
from tests.api import HookError, MixinHooks
from tests.trainer.small import Alone, Spread, batches, make_config
from tests.trainer.test_names import Everything, everything_config


def empty() -> Any:
    return Alone(make_config())


def test_models_come_by_name_in_order_of_assignment() -> None:
    trainer = empty()
    trainer.zebra = nn.Linear(1, 1)
    trainer.ant = nn.BatchNorm1d(2, affine=False)
    trainer.number, trainer.activation, trainer._activation = 3, nn.ReLU(), nn.Tanh()
    trainer.activations = [nn.ReLU(), nn.Tanh()]  # without state, they may be anywhere
    assert list(trainer.named_models()) == ["zebra", "ant"]
    del trainer.zebra
    assert list(trainer.named_models()) == ["ant"]


@pytest.mark.pitfall(64)
def test_an_alias_of_a_submodule_is_no_second_model() -> None:
    trainer = empty()
    whole = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    trainer.model = whole
    trainer.encoder = whole[0]
    trainer.again = whole
    assert list(trainer.named_models()) == ["model"]


def test_containers_of_modules_count_child_by_child() -> None:
    trainer = empty()
    trainer.members = nn.ModuleList([nn.Linear(1, 1), nn.Linear(2, 2)])
    trainer.parts = nn.ModuleDict({"actor": nn.Linear(1, 1), "critic": nn.Linear(1, 1)})
    assert list(trainer.named_models()) == ["members.0", "members.1", "parts.actor", "parts.critic"]
    assert trainer.get_module("members.1") is trainer.members[1]
    assert trainer.get_module("parts.actor") is trainer.parts["actor"]


@pytest.mark.pitfall(64)
@pytest.mark.parametrize("wrap", [list, lambda m: {"a": m[0]}], ids=["list", "dict"])
def test_a_plain_container_that_hides_a_module_is_an_error_that_names_the_right_one(wrap: Any) -> None:
    trainer = empty()
    trainer.members = wrap([nn.Linear(1, 1)])
    with pytest.raises(HookError, match=r"self\.members is a plain .*nn\.Module(List|Dict)"):
        trainer.named_models()


def test_get_module_finds_parts_and_says_which_models_there_are() -> None:
    trainer = empty()
    trainer.model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.ReLU())
    assert trainer.get_module("model") is trainer.model
    assert trainer.get_module("model.0.0") is trainer.model[0][0]
    with pytest.raises(AttributeError, match=r"'other'.*\['model'\]"):
        trainer.get_module("other")
    with pytest.raises(AttributeError):
        trainer.get_module("model.7")


def test_optimizers_and_schedulers_come_by_name_also_from_lists_and_dicts() -> None:
    trainer = empty()
    trainer.a, trainer.b = nn.Linear(1, 1), nn.Linear(1, 1)
    trainer.first = torch.optim.SGD(trainer.a.parameters(), lr=1.0)
    trainer.more = {"bias": torch.optim.SGD([trainer.b.bias], lr=1.0)}
    trainer.rest = [torch.optim.SGD([trainer.b.weight], lr=1.0)]
    trainer.again = trainer.first  # which counts once
    trainer.schedule = torch.optim.lr_scheduler.StepLR(trainer.first, 1)
    trainer.plateaus = [torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.rest[0])]
    assert list(trainer.named_optimizers()) == ["first", "more.bias", "rest.0"]
    assert list(trainer.named_schedulers()) == ["schedule", "plateaus.0"]
    assert trainer.get_optimizers_by_model(trainer.b) == [trainer.more["bias"], trainer.rest[0]]


def test_metrics_are_metrics_and_no_models() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    trainer = empty()
    trainer.model = nn.Linear(1, 1)
    trainer.mean = torchmetrics.MeanMetric()
    trainer.errors = torchmetrics.MetricCollection([torchmetrics.MeanSquaredError()])
    trainer.by_name = {"sum": torchmetrics.SumMetric()}
    trainer.modules = nn.ModuleDict({"max": torchmetrics.MaxMetric()})
    trainer.more = nn.ModuleList([torchmetrics.CatMetric(), torchmetrics.classification.BinaryAUROC(thresholds=5)])
    trainer.tracker = torchmetrics.MetricTracker(torchmetrics.MeanMetric(), maximize=True)  # its own list
    trainer.tracker.increment()
    assert list(trainer.named_metrics()) == ["mean", "errors", "by_name.sum", "modules.max", "more.0", "more.1"]
    assert list(trainer.named_models()) == ["model"]


def test_unwrap_takes_every_wrapper_off() -> None:
    trainer, model = empty(), nn.Linear(1, 1)
    from torch.optim.swa_utils import AveragedModel

    assert trainer.unwrap(model) is model
    averaged = AveragedModel(model)
    assert trainer.unwrap(averaged) is averaged.module
    assert trainer.unwrap(torch.compile(model)) is model
    assert trainer.unwrap(AveragedModel(nn.DataParallel(model))).weight.equal(model.weight)


@pytest.mark.pitfall(64)
def test_a_model_under_a_private_name_is_an_error_that_gives_it_another() -> None:
    class Private(Spread):
        def configure_models(self) -> None:
            super().configure_models()
            self._teacher = nn.Linear(1, 1)

    with pytest.raises(HookError, match=r"self\._teacher holds a module \(Linear\).*Call it self\.teacher"):
        Private(make_config(), batches(1)).fit()


MIXINS = {name for name in mixins.__all__ if name.endswith("Mixin") and not name.endswith("ConfigMixin")}


def test_a_trainer_is_its_mixins_and_four_more_classes_of_ours() -> None:
    ours = [cls.__name__ for cls in dt.DreamTrainer.__mro__ if cls.__module__.startswith("dream_trainer.")]
    assert len(set(ours) - MIXINS - {"DreamTrainer"}) <= 4
    assert set(ours) >= MIXINS - {"LocalSGDMixin"}  # which changes what is learned, and is asked for by name


def test_a_trainer_has_at_most_thirty_attributes_before_fit() -> None:
    with Everything(everything_config()) as trainer:
        names = sorted(vars(trainer))
    assert len(names) <= 30, names


def test_mixins_cooperate_through_few_hooks() -> None:
    hooks = [name for name, value in vars(MixinHooks).items() if isinstance(value, FunctionType) and name[0] == "_"]
    assert len(hooks) <= 21, hooks
