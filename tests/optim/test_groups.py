"""Parameter groups: every parameter once, with the rate and decay that its name, kind and depth ask for."""

from typing import Any

import pytest
import torch.nn as nn

from tests.api import ConfigError, GroupParameters, freeze, keep_only, parameter_groups, remember_cut, values_in_whole
from tests.optim.models import model

MATRICES = {
    "position",
    "embedding.weight",
    "head.weight",
    *(f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("up", "down")),
}


def values(groups: list[dict[str, Any]], key: str) -> dict[str, float]:
    """The value of `key` for each parameter's name; fails if a name comes twice."""
    pairs = [(name, group[key]) for group in groups for name, _ in group["params"]]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def test_only_matrices_decay_and_every_parameter_has_one_group() -> None:
    module = model()
    groups = parameter_groups(module, lr=0.1, weight_decay=0.5)
    decays = values(groups, "weight_decay")
    assert decays == {name: 0.5 if name in MATRICES else 0.0 for name, _ in module.named_parameters()}
    assert len(groups) == 2
    assert {id(p) for group in groups for _, p in group["params"]} == {id(p) for p in module.parameters()}


def test_groups_have_one_order_whatever_a_model_begins_with() -> None:
    """As stages of a pipeline need: the second one may begin with a norm, where the first begins with a matrix."""
    for parts in ((nn.Linear(4, 4), nn.LayerNorm(4)), (nn.LayerNorm(4), nn.Linear(4, 4))):
        groups = parameter_groups(nn.Sequential(*parts), lr=0.1, weight_decay=0.01)
        assert [(one["name"], one["weight_decay"]) for one in groups] == [("decay", 0.01), ("no_decay", 0.0)]


def test_groups_have_names_that_tell_them_apart() -> None:
    (one,) = parameter_groups(model(), lr=0.1, weight_decay=0.0)
    assert one["name"] == "no_decay"
    several = parameter_groups(
        model(),
        lr=1.0,
        weight_decay=0.5,
        layer_decay=0.5,
        groups=(GroupParameters(pattern="^head", lr=3.0), GroupParameters(pattern=r"\.up\.", lr_scale=4.0)),
    )
    assert {group["name"]: (group["lr"], group["weight_decay"]) for group in several} == {
        "layer_0_decay": (0.125, 0.5),
        "layer_1_no_decay": (0.25, 0.0),
        r"\.up\. layer_1_decay": (1.0, 0.5),
        r"\.up\. layer_1_no_decay": (1.0, 0.0),
        "layer_1_decay": (0.25, 0.5),
        "layer_2_no_decay": (0.5, 0.0),
        r"\.up\. layer_2_decay": (2.0, 0.5),
        r"\.up\. layer_2_no_decay": (2.0, 0.0),
        "layer_2_decay": (0.5, 0.5),
        "layer_3_no_decay": (1.0, 0.0),
        "^head decay": (3.0, 0.5),
        "^head no_decay": (3.0, 0.0),
    }
    assert len(several) == 12


def test_embeddings_may_be_left_out_of_the_decay_and_vectors_taken_in() -> None:
    groups = parameter_groups(model(), lr=0.1, weight_decay=0.5, decay_embeddings=False)
    assert {name for name, decay in values(groups, "weight_decay").items() if decay} == MATRICES - {"embedding.weight"}
    groups = parameter_groups(model(), lr=0.1, weight_decay=0.5, decay_vectors=True)
    assert set(values(groups, "weight_decay").values()) == {0.5}
    assert len(groups) == 1


def test_the_first_pattern_that_matches_decides() -> None:
    groups = parameter_groups(
        model(),
        lr=0.1,
        weight_decay=0.5,
        groups=(
            GroupParameters(pattern=r"blocks\.1\.up", lr_scale=3.0),
            GroupParameters(pattern=r"blocks\.1\.", lr=0.7, weight_decay=0.2),
        ),
    )
    rates, decays = values(groups, "lr"), values(groups, "weight_decay")
    for name, rate in rates.items():
        assert rate == pytest.approx(0.3 if "blocks.1.up" in name else 0.7 if "blocks.1." in name else 0.1)
    assert decays["blocks.1.down.weight"] == 0.2
    assert decays["blocks.1.up.weight"] == 0.5
    assert decays["blocks.1.norm.weight"] == 0.0  # a vector still does not decay


def test_a_tied_parameter_counts_once_and_answers_to_either_name() -> None:
    module = model(tied=True)
    groups = parameter_groups(
        module, lr=0.1, weight_decay=0.5, groups=(GroupParameters(pattern=r"^head\.", lr_scale=2.0),)
    )
    rates = values(groups, "lr")
    assert "head.weight" not in rates
    assert rates["embedding.weight"] == 0.2
    assert freeze(module, ["head"]) == ["embedding.weight"]
    assert not module.embedding.weight.requires_grad


def test_layer_decay_follows_the_formula() -> None:
    rates = values(parameter_groups(model(), lr=1.0, weight_decay=0.0, layer_decay=0.5), "lr")
    # Two blocks: embeddings 0.5**3, block 1 0.5**2, block 2 0.5**1, head and last norm 1.
    expected = {"position": 0.125, "embedding.weight": 0.125, "norm.weight": 1.0, "norm.bias": 1.0}
    expected |= {"head.weight": 1.0, "head.bias": 1.0}
    for name in ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight"):
        expected |= {f"blocks.0.{name}": 0.25, f"blocks.1.{name}": 0.5}
    assert rates == expected


def test_layer_decay_without_blocks_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"layer_decay=0.5 needs repeated blocks.*blocks=\[...\]"):
        parameter_groups(nn.Linear(2, 2), lr=1.0, weight_decay=0.0, layer_decay=0.5)


def test_a_pattern_that_matches_nothing_names_what_is_near() -> None:
    with pytest.raises(ConfigError, match=r"groups: '\^haed' matches no parameter of the model. Near names: head"):
        parameter_groups(model(), lr=1, weight_decay=0, groups=(GroupParameters(pattern="^haed", lr=1.0),))
    with pytest.raises(ConfigError, match=r"freeze: 'embeding' matches no .* embedding.weight"):
        freeze(model(), ["head", "embeding"])


def test_a_stage_of_a_pipeline_knows_how_many_values_the_whole_model_has() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    assert values_in_whole(model) == 9 + 8
    remember_cut(model, (), list(model))
    keep_only(model, ["0"])
    assert sum(p.numel() for p in model.parameters()) == 9
    assert values_in_whole(model) == 9 + 8
