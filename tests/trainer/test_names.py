"""What a user's class may define and hold: names of the framework's are refused when assigned or built, definitions are
heard wherever the class stands or refused, and models, optimizers, schedulers and metrics are known by attribute."""

from dataclasses import replace
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn as nn

import dream_trainer as dt
from dream_trainer.trainer import mixins
from tests.api import ConfigError, HookError, MixinHooks
from tests.trainer.small import Alone, Config, Spread, batches, fit, make_config, run_config


class Everything(dt.DreamTrainer):
    def configure_models(self) -> None:
        self.model = nn.Linear(3, 1)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def configure_dataloaders(self) -> tuple[Any, None]:
        return batches(2), None

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {}


@pytest.mark.pitfall(88)
@pytest.mark.parametrize("name", ["batch_size", "progress", "step", "config", "_runtime"])
@pytest.mark.parametrize("when", ["constructor", "configure"])
def test_an_attribute_with_a_name_of_ours_is_refused_where_it_is_assigned(name: str, when: str) -> None:

    class Mine(Everything):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            if when == "constructor":
                setattr(self, name, 32)

        def configure_models(self) -> None:
            super().configure_models()
            setattr(self, name, 32)

    with pytest.raises(HookError, match=rf"self\.{name} of Mine has a name .*{name} of "):
        Mine(run_config()).launch_and_resume()


@pytest.mark.pitfall(88)
def test_every_attribute_and_method_of_a_trainer_is_guarded() -> None:
    with Everything(run_config(training_parameters=dt.TrainingParameters(max_steps=0))) as trainer:
        trainer.fit()
        ours = {
            name for part in type(trainer).__mro__ if part.__module__.startswith("dream_trainer") for name in vars(part)
        }
        taken = {*ours, *vars(trainer)} - {"model", "optimizer", "train_dataloader"}
        for name in sorted(name for name in taken if "__" not in name):
            before = vars(trainer).get(name)
            with pytest.raises(HookError, match=name):
                setattr(trainer, name, object())
            assert vars(trainer).get(name) is before


@pytest.mark.pitfall(88)
def test_what_the_user_assigned_first_is_not_taken_away() -> None:
    class Mine(Alone):
        def __init__(self, config: Config) -> None:
            self.progress = 1  # type: ignore[assignment]
            super().__init__(config)

    with pytest.raises(HookError, match=r"self\.progress of Mine has a name that the framework uses"):
        Mine(make_config())


@pytest.mark.pitfall(88)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, lambda self: None) for name in ("_load", "train_dataloader")),
        *((name, lambda self, *args, **kwargs: None) for name in ("warn_once", "request_stop")),
        *((name, 32) for name in ("batch_size", "training", "post_epoch")),
        ("step", lambda self, x: x),
        ("world", property(lambda self: 1)),
    ],
)
def test_a_definition_with_a_name_of_ours_is_refused_when_the_trainer_is_built(name: str, value: Any) -> None:
    mine = type("Mine", (Everything,), {name: value})
    with pytest.raises(HookError, match=rf"Mine\.{name}.*({name}|def step|configure_dataloaders)"):
        mine(run_config())


def test_what_is_made_to_be_overridden_may_be() -> None:
    class Mine(Everything):
        extra = 3

        def log(self, name: str, value: Any, **options: Any) -> None:
            super().log(f"mine/{name}", value, **options)

        def backward(self, loss: Any, **options: Any) -> None:
            super().backward(loss, **options)

        def _helper(self) -> None: ...

    trainer = Mine(run_config())
    trainer.training_step = torch.no_grad()(trainer.training_step)  # type: ignore[method-assign]
    trainer._own, trainer.rate = 1, 2
    assert (trainer._own, trainer.rate, trainer.extra) == (1, 2, 3)


def test_a_forgotten_call_of_the_base_constructor_is_named() -> None:
    class Mine(Everything):
        def __init__(self, config: Any) -> None:
            self.width = 3

    for use in (lambda t: t.fit(), lambda t: t.config, lambda t: t.describe(), lambda t: t.close()):
        with pytest.raises(HookError, match=r"Mine\.__init__ does not call super\(\).__init__\(config\)"):
            use(Mine(run_config()))


@pytest.mark.pitfall(81)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("training_parameters", dt.TrainingParameters(max_steps=7)),
        ("experiment", "../../x"),
        ("seed", 3),
        ("callbacks", dt.CallbackCollection()),
    ],
)
def test_a_config_that_a_trainer_was_built_with_cannot_be_changed(field: str, value: Any) -> None:
    config = make_config(max_steps=2)
    trainer = Alone(config, batches(2))
    with pytest.raises(ConfigError, match=rf"{field}.*replace\(config, {field}=\.\.\.\)"):
        setattr(trainer.config, field, value)
    changed = replace(config, seed=5)
    changed.seed = 6
    assert config.seed == 42
    trainer.close()
    setattr(config, field, getattr(make_config(), field))  # for the next trainer


@pytest.mark.pitfall(81)
def test_another_config_for_a_trainer_is_refused() -> None:
    trainer = Alone(make_config(), batches(2))
    with pytest.raises(HookError, match="Build a new trainer"):
        trainer.config = make_config()


heard: list[str] = []


def saying(word: str, *bases: type, hands_on: bool = False) -> type:
    """A class of these bases whose own event says `word`, and calls that of the next class if it is to."""

    def says(self: Any, model: Any, optimizer: Any) -> None:
        heard.append(word)

    def says_and_hands_on(self: Any, model: Any, optimizer: Any) -> None:
        heard.append(word)
        super(cls, self).pre_optimizer_step(model, optimizer)

    cls = type(word.title(), bases, {"pre_optimizer_step": says_and_hands_on if hands_on else says})
    return cls


Noise, Clipping, Polite = saying("noise"), saying("clipping"), saying("polite", hands_on=True)
Own, PoliteOwn = saying("own", Alone), saying("own", Alone, hands_on=True)
Twice = saying("derived", Own)
PoliteTwice = saying("derived", saying("own", Alone, Noise), hands_on=True)


def trained(*bases: type) -> list[str]:
    heard.clear()
    fit(type("Mine", bases, {})(make_config(n_epochs=1), batches(1)))
    return list(heard)


@pytest.mark.pitfall(79)
@pytest.mark.parametrize(
    ("bases", "expected"),
    [
        ((Noise, Alone, Clipping), ["noise", "clipping"]),
        ((Alone, Noise, Clipping), ["noise", "clipping"]),
        ((Polite, Alone, Noise), ["polite", "noise"]),
        ((Own, Noise), ["own", "noise"]),
        ((PoliteOwn, Noise), ["own", "noise"]),
        ((Twice, Noise), ["derived", "noise"]),
        ((PoliteTwice,), ["derived", "own", "noise"]),
    ],
)
def test_every_definition_of_an_event_is_heard_once_wherever_its_class_stands(
    bases: tuple[type, ...], expected: list[str]
) -> None:
    assert trained(*bases) == expected


@pytest.mark.pitfall(79)
def test_an_event_behind_the_base_that_cannot_take_its_arguments_is_refused() -> None:
    class Short:
        def pre_optimizer_step(self) -> None: ...

    with pytest.raises(HookError, match=r"Short\.pre_optimizer_step\(self\).* cannot be called"):
        type("Mine", (Own, Short), {})(make_config(), batches(1))


class MovesMixin:
    def move_batch(self, batch: Any, device: torch.device) -> Any:
        return batch


class LogsMixin:
    def configure_loggers(self) -> list[Any]:
        return []


class Bare(dt.BaseTrainer):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {}


class Logs(Alone, dt.LoggerMixin): ...


@pytest.mark.pitfall(79)
@pytest.mark.parametrize(
    ("base", "mixin", "hook"), [(Bare, MovesMixin, "move_batch"), (Logs, LogsMixin, "configure_loggers")]
)
def test_a_hook_of_a_mixin_behind_the_trainer_is_refused_with_the_order_that_calls_it(
    base: type, mixin: type, hook: str
) -> None:
    with pytest.raises(HookError, match=rf"(?s){mixin.__name__}\.{hook} is never called") as caught:
        type("Mine", (base, mixin), {})(make_config())
    assert f"class Mine({mixin.__name__}, {base.__name__})" in str(caught.value)


class CountsMixin:
    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}


class NamesMixin:
    def state_dict(self) -> dict[str, Any]:
        return {"name": "x"}


@pytest.mark.pitfall(79)
def test_of_two_states_of_which_one_would_not_be_saved_both_classes_are_named() -> None:
    with pytest.raises(HookError) as caught:
        type("Mine", (CountsMixin, NamesMixin, Alone), {})(make_config(), batches(1))
    assert "CountsMixin.state_dict" in str(caught.value)
    assert "NamesMixin.state_dict" in str(caught.value)
    assert "super().state_dict()" in str(caught.value)


@pytest.mark.pitfall(79)
def test_an_event_of_a_mixin_behind_callback_is_refused_with_the_order_that_calls_it() -> None:
    class Watches:
        def post_epoch(self, trainer: Any) -> None: ...

    class Mine(dt.Callback, Watches): ...

    with pytest.raises(HookError, match=r"Watches\.post_epoch is never called.*class Mine\(Watches, Callback\)"):
        Alone(make_config(callbacks=[Mine()]), batches(1))


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
    with Everything(run_config()) as trainer:
        names = sorted(vars(trainer))
    assert len(names) <= 30, names


def test_mixins_cooperate_through_few_hooks() -> None:
    hooks = [name for name, value in vars(MixinHooks).items() if isinstance(value, FunctionType) and name[0] == "_"]
    assert len(hooks) <= 21, hooks
