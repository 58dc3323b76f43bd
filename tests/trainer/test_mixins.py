"""Mixins compose in any order, every subset works, and what is missing is named when the trainer is built."""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import dream_trainer as dt
from tests.api import ConfigError, HookError
from tests.trainer.small import Built, Validates, batches, by_hand, filled_network, fit, run_config, sgd, weights

MIXINS = [dt.SetupMixin, dt.FSDPMixin, dt.EvalMixin, dt.CheckpointMixin, dt.LoggerMixin]
CONFIGS = [dt.SetupConfigMixin, dt.FSDPConfigMixin, dt.EvalConfigMixin, dt.CheckpointConfigMixin, dt.LoggerConfigMixin]
# What SetupMixin calls only if the config asks for it: all orders of all mixins would be too many to build.
PARALLEL = [dt.SetupMixin, dt.FSDPMixin, dt.TensorParallelMixin, dt.ActivationCheckpointingMixin, dt.CompileMixin]
SUBSETS = [subset for size in range(6) for subset in itertools.combinations(range(5), size)]


class Algorithm(Validates, Built):
    """The user's part: the same class body whatever it is mixed with."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, batches(4), batches(4))

    def setup(self) -> None:
        super().setup()
        if not isinstance(self, dt.SetupMixin):
            self.model = filled_network()
            self.optimizer = sgd(self.model)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.log("extra", 1.0)
        return super().training_step(batch, batch_idx)


def assert_as_by_hand(trainer: Any) -> None:
    expected = by_hand([[batch] for batch in batches(4)] * 2)
    assert all(torch.equal(value, weights(expected)[name]) for name, value in weights(trainer.model).items())


def make_config(subset: tuple[int, ...]) -> Any:
    cls = dataclass(kw_only=True)(type("Config", (dt.BaseTrainerConfig, *(CONFIGS[i] for i in subset)), {}))
    devices, training = dt.DeviceParameters(device="cpu"), dt.TrainingParameters(n_epochs=2)
    return cls(project="p", group="g", experiment="e", device_parameters=devices, training_parameters=training)


@pytest.mark.parametrize("subset", SUBSETS, ids=lambda s: "+".join(MIXINS[i].__name__ for i in s) or "alone")
def test_every_subset_of_mixins_trains_like_the_loop_by_hand(subset: tuple[int, ...]) -> None:
    trainer = fit(type("T", (Algorithm, dt.BaseTrainer, *(MIXINS[i] for i in subset)), {})(make_config(subset)))
    assert_as_by_hand(trainer)
    assert trainer.global_step == 8


def test_bases_in_every_order_build_the_same_trainer() -> None:
    count = 0
    for subset in SUBSETS:
        config = make_config(subset)
        for order in itertools.permutations([dt.BaseTrainer, *(MIXINS[i] for i in subset)]):
            assert type("T", (Algorithm, *order), {})(config).global_step == 0
            count += 1
    assert count == sum(math.factorial(len(subset) + 1) for subset in SUBSETS)


def test_parallel_mixins_in_every_order_build_the_same_trainer_and_it_trains() -> None:
    config = run_config(training_parameters=dt.TrainingParameters(n_epochs=2))
    trainers = [
        type("T", (Algorithm, dt.BaseTrainer, *order), {})(config) for order in itertools.permutations(PARALLEL)
    ]
    assert len({trainer.describe() for trainer in trainers}) == 1
    assert_as_by_hand(fit(trainers[-1]))


@pytest.mark.parametrize("mixin", [*MIXINS[1:], *PARALLEL[2:], dt.LocalSGDMixin], ids=lambda mixin: mixin.__name__)
def test_a_config_without_a_mixins_field_is_named_when_the_trainer_is_built(mixin: type) -> None:
    with pytest.raises(ConfigError, match=mixin.__name__.replace("Mixin", "ConfigMixin")):
        type("T", (Algorithm, dt.BaseTrainer, mixin), {})(make_config(()))


DATA, STEP, MODELS = "configure_dataloaders", "training_step", "configure_models"


@pytest.mark.parametrize(
    ("bases", "defined", "told"),
    [
        ((dt.BaseTrainer,), (DATA,), STEP),
        ((dt.BaseTrainer, dt.SetupMixin), (DATA, STEP), MODELS),
        ((dt.BaseTrainer, dt.SetupMixin), (DATA, STEP, MODELS), "assign your optimizers to self there.$"),
    ],
)
def test_a_missing_hook_is_named_at_once(bases: tuple[type, ...], defined: tuple[str, ...], told: str) -> None:
    hooks = {name: getattr(Algorithm, name, lambda self: None) for name in defined}
    with pytest.raises(HookError, match=told):
        type("T", bases, hooks)(make_config((0,)))


@pytest.mark.pitfall(51)
def test_building_a_trainer_has_no_side_effects(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    type("T", (Algorithm, dt.BaseTrainer, *MIXINS), {})(make_config((0, 1, 2, 3, 4)))
    assert not torch.distributed.is_initialized()
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(torch.get_rng_state(), before)


def test_hooks_that_only_setup_mixin_calls_are_said_once_where_it_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    with type("Overrides", (Algorithm, dt.BaseTrainer), {})(make_config(())) as trainer:
        trainer.fit()
        trainer.fit()
    said = [text.split()[0] for text in caplog.messages if "is never called: only SetupMixin does" in text]
    hooks = ("configure_models", "configure_optimizers", "init_weights")
    assert sorted(said) == [f"Overrides.{hook}" for hook in hooks]
