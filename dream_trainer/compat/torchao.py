"""torchao's float8: its linear layer, and the weight that `fully_shard` gathers in float8.

`convert_to_float8_training`, which is public, replaces modules, and so loses their hooks and references to them."""
# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

# Of no type, so that checkers need no torchao.
Float8Layer: Any = Float8Linear
GatheredInFloat8: Any = WeightWithDynamicFloat8CastTensor  # by `fully_shard`; every rank scales by the largest of all
MULTIPLE = 16  # float8 matrix products need both sizes of a weight to be multiples of this


def float8_config(recipe: str, *, all_gather: bool, emulate: bool) -> Float8LinearConfig:
    config = Float8LinearConfig.from_recipe_name(recipe)
    # Numbers of tokens may not be multiples of 16; others are not padded.
    return replace(config, enable_fsdp_float8_all_gather=all_gather, emulate=emulate, pad_inner_dim=True)


def attributes(config: Float8LinearConfig) -> dict[str, Any]:
    """Attributes that a `Float8Linear` of that config has in addition to a linear layer's."""
    with torch.device("meta"):
        plain = torch.nn.Linear(MULTIPLE, MULTIPLE)
        layer = convert_to_float8_training(torch.nn.Linear(MULTIPLE, MULTIPLE), config=config)
    return {name: value for name, value in vars(layer).items() if name not in vars(plain)}
