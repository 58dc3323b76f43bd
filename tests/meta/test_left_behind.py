"""Weights that are loaded while a model is built are kept, and what cannot be made real is an error that names it."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import dream_trainer as dt
from tests.api import InitError
from tests.trainer.small import FromSeed, batches, run_config

WIDTH = 4


def theirs() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


def built(make: Any) -> Any:
    config = run_config(training_parameters=dt.TrainingParameters(max_steps=0))
    trainer = type("Case", (FromSeed,), {"configure_models": make})(config, batches(1))
    trainer.fit()
    return trainer


class Loads(nn.Sequential):
    def __init__(self, file: str = "new.pt", **options: Any) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.load_state_dict(torch.load(file, **options))


LOADS: dict[str, Callable[[], nn.Module]] = {
    "values": Loads,
    "values with a location": lambda: Loads(map_location=lambda storage, location: storage),
    "values of a mapped file": lambda: Loads(mmap=True),
    "values of a legacy file": lambda: Loads("legacy.pt"),
    "a whole model": lambda: torch.load("model.pt", weights_only=False),
}


@pytest.mark.parametrize("what", LOADS)
def test_what_torch_load_gives_while_a_model_is_built_is_kept(what: str) -> None:
    torch.save(theirs().state_dict(), "new.pt")
    torch.save(theirs().state_dict(), "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(theirs(), "model.pt")

    def configure_models(self: Any) -> None:
        self.model = LOADS[what]()

    with built(configure_models) as trainer:
        for name, value in theirs().state_dict().items():
            assert torch.equal(trainer.model.state_dict()[name], value), name


HIDDEN: dict[str, Callable[[nn.Linear], Any]] = {
    "list": lambda teacher: [teacher],
    "tuple": lambda teacher: (1, teacher),
    "dict": lambda teacher: {"teacher": teacher},
    "tensor of an object": lambda teacher: SimpleNamespace(weight=teacher.weight),
    "partial": lambda teacher: partial(teacher, WIDTH),
    "method": lambda teacher: teacher.forward,
    "closure": lambda teacher: lambda x: teacher(x),
    "object": lambda teacher: SimpleNamespace(teacher=teacher),
}
# In the trainer itself other checks refuse the first four.
PLACES = [*(("model.", how) for how in HIDDEN), *(("", how) for how in list(HIDDEN)[4:])]


@pytest.mark.parametrize(("owner", "how"), PLACES)
def test_a_hidden_module_is_an_error_that_says_where(owner: str, how: str) -> None:
    def configure_models(self: Any) -> None:
        self.model = theirs()
        place = self.model if owner else self
        place.hidden = HIDDEN[how](nn.Linear(WIDTH, WIDTH).requires_grad_(False))

    with pytest.raises(InitError, match=rf"self\.{owner}hidden.* holds a (Linear|tensor) .*Assign it to the module"):
        built(configure_models)


def test_a_lazy_module_is_named_and_one_that_has_run_trains() -> None:
    def lazy(self: Any) -> None:
        self.model = nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d())

    def has_run(self: Any) -> None:
        lazy(self)
        self.model(torch.ones(2, 3))

    with pytest.raises(InitError, match=r"self.model.0 \(LazyLinear\) has parameters without a shape.* example batch"):
        built(lazy)
    with built(has_run) as trainer:
        assert trainer.model[0].weight.shape == (WIDTH, 3)
        assert trainer.model[0].weight.isfinite().all()
