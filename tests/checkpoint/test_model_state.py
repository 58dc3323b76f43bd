"""Models go into a checkpoint and come back by name, in place."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import api
from tests.checkpoint.states import save


def test_extra_state_comes_back_with_its_types(tmp_path: Path) -> None:
    class Seeing(nn.Linear):
        seen: dict[int, str] = {}

        def get_extra_state(self) -> dict[int, str]:
            return self.seen

        def set_extra_state(self, state: dict[int, str]) -> None:
            self.seen = state

    models, others = {"net": Seeing(1, 1)}, {"net": Seeing(1, 1)}
    models["net"].seen = {3: "three"}
    path = save(tmp_path, 1, shared={"extra": api.model_extra_state(models)})
    api.load_model_extra_state(others, api.read_shared(path)["extra"])
    assert others["net"].seen == {3: "three"}


@pytest.mark.pitfall(38)
def test_a_renamed_layer_is_an_error_naming_both_names(tmp_path: Path) -> None:
    path = save(tmp_path, 1, tensors=api.model_tensors({"net": nn.ModuleDict({"old": nn.Linear(2, 2)})}))
    renamed = {"net": nn.ModuleDict({"new": nn.Linear(2, 2)})}
    before = renamed["net"]["new"].weight.clone()
    with pytest.raises(api.CheckpointError, match=r"has no models\.net\.new\.bias, models\.net\.new\.weight"):
        api.load_tensors(path, api.model_tensors(renamed), world=api.Ranks.alone())
    assert torch.equal(renamed["net"]["new"].weight, before)


def test_names_do_not_change_by_compilation() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    expected = list(api.model_tensors({"net": plain}))
    plain.compile()
    assert list(api.model_tensors({"net": plain})) == expected
    assert [f"models.{name}" for name in api.parameter_fqns({"net": plain}).values()] == expected


def test_a_state_dict_that_makes_its_tensors_anew_is_an_error() -> None:
    class Halved(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {name: value.half() for name, value in super().state_dict(*args, **kwargs).items()}

    with pytest.raises(api.CheckpointError, match=r"gives 'weight', which is not one of its parameters or buffers"):
        api.model_tensors({"net": Halved(2, 2)})


@pytest.mark.parametrize("value", [torch.tensor([9.0]), torch.zeros(5, dtype=torch.int64)])
def test_a_ranks_buffer_of_another_shape_or_type_is_an_error(value: torch.Tensor) -> None:
    model = nn.Module()
    model.register_buffer("queue", torch.zeros(5))
    with pytest.raises(api.CheckpointError, match=r"models\.net\.queue .* does not fit the model"):
        api.load_rank_buffers({"net": model}, {"models.net.queue": value})
