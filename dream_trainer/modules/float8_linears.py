"""Linear layers that multiply in float8 (torchao), made of plain ones in place: names, parameters and hooks stay.
Scales are computed in each forward and backward, so there is no state, and checkpoints are those of plain layers.
`convert_to_float8_training`, which is public, replaces modules, and so loses their hooks and references to them."""
# pyright: reportMissingImports=false

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn as nn
from torch import Tensor
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from dream_trainer.compat.pytorch import local_tensor, with_local
from dream_trainer.modules.class_change import Changed, change_class

# Of no type, so that checkers need no torchao.
Float8Layer: Any = Float8Linear
GatheredInFloat8: Any = WeightWithDynamicFloat8CastTensor  # by `fully_shard`; every rank scales by the largest of all
MULTIPLE = 16  # float8 matrix products need both sizes of a weight to be multiples of this


class Float8(Changed, Float8Layer):  # type: ignore[misc]
    config: ClassVar[Any]
    linear_mm_config: ClassVar[Any]

    def forward(self, input: Tensor) -> Tensor:
        device = input.device.type
        if torch.is_autocast_enabled(device):  # torchao's only checks CUDA's
            input = input.to(torch.get_autocast_dtype(device))
        output: Tensor = super().forward(input)
        return output


def linears(blocks: Iterable[nn.Module], model: nn.Module, skip: Sequence[str]) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers of `blocks` that no pattern of `skip` finds, by their names in `model`."""
    inside = {id(part) for block in blocks for part in block.modules()}
    for name, module in model.named_modules():
        if id(module) in inside and type(module) is nn.Linear and not any(re.search(p, name) for p in skip):
            yield name, module


def sizes_fit(linear: nn.Linear) -> bool:
    """Whether this rank's part of the weight has sizes that float8 products take."""
    return all(size % MULTIPLE == 0 for size in local_tensor(linear.weight).shape)


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


def compute_in_float8(linear: nn.Linear, config: Any) -> None:
    change_class(linear, Float8, key=config, **attributes(config))


def gather_in_float8(linear: nn.Linear, config: Any) -> None:
    """Has `fully_shard`, which comes later, gather the weight of a layer in float8. The parameter is replaced."""
    weight, products = linear.weight, attributes(config)["linear_mm_config"]
    part = GatheredInFloat8(local_tensor(weight).detach(), products, config.cast_config_weight.target_dtype)
    linear.weight = nn.Parameter(with_local(weight.detach(), part), requires_grad=weight.requires_grad)
    vars(linear.weight).update(vars(weight))


def has_products(device: torch.device) -> bool:
    """Whether `device` multiplies in float8: NVIDIA's from compute capability 8.9 on, and AMD's."""
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 9)
