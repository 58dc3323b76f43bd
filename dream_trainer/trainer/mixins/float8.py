"""Float8Mixin: the linear layers of the blocks multiply in float8, by torchao."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, ClassVar

import torch.nn as nn

from dream_trainer.config.device_parameters import Float8ConfigMixin, Float8Parameters
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.errors import ConfigError
from dream_trainer.parallel.axis import FLOAT8, Parallelism
from dream_trainer.trainer.abstract import AbstractTrainer
from dream_trainer.trainer.runtime import Runtime


class Float8Mixin(AbstractTrainer):
    """Training in float8. Override `apply_float8` to choose layers by hand, or `model_blocks` to name the blocks."""

    _config_class: ClassVar[type | None] = Float8ConfigMixin
    _parallelism: ClassVar[Parallelism | None] = FLOAT8

    def __init__(self, config: BaseTrainerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        recipe = self._runtime.config.device_parameters.float8
        if recipe == "none":
            return
        if find_spec("torchao") is None:
            raise ConfigError(f"float8={recipe!r} needs torchao, which is not installed. Run pip install torchao.")
        if recipe != "tensorwise" and self._runtime.config.float8_parameters.all_gather:
            raise ConfigError(
                f"float8_parameters.all_gather=True with float8={recipe!r}: shards are gathered with one scale for "
                'each weight. Use float8="tensorwise", or all_gather=False.'
            )

    def apply_float8(self) -> None:
        """Makes the linear layers of every model's blocks multiply in float8.

        Layers whose sizes (per rank, if sharded) are not multiples of 16 are not converted; this is logged.

        Raises:
            ConfigError: The device has no such products; a model has no repeated blocks, or no layer in them fits.
        """
        from dream_trainer.modules.float8_linears import (
            compute_in_float8,
            float8_config,
            gather_in_float8,
            has_products,
        )

        recipe, parameters = self._runtime.config.device_parameters.float8, self._runtime.config.float8_parameters
        if not parameters.emulate and not has_products(self.world.device):
            raise ConfigError(
                f"float8={recipe!r} on {self.world.device}: it has no products of float8, as GPUs since Ada and Hopper "
                "have. Use float8_parameters.emulate=True to see what float8 does to a training, slowly."
            )
        all_gather = parameters.all_gather and self.world.parameter_shape.dp_shard > 1
        modules = [module for model in self.named_models().values() for module in model.modules()]
        config = float8_config(recipe, all_gather=all_gather, emulate=parameters.emulate)
        for linear in _chosen(self._runtime, parameters):
            compute_in_float8(linear, config)
            places = [part for part in modules if any(p is linear.weight for p in part.parameters(recurse=False))]
            if all_gather and len(places) == 1:  # a tie cannot be two tensors
                gather_in_float8(linear, config)


def _chosen(runtime: Runtime, parameters: Float8Parameters) -> list[nn.Linear]:
    from dream_trainer.modules.float8_linears import linears, sizes_fit

    found = [
        (f"{name}.{layer}", linear)
        for name, model in runtime.registry.models().items()
        for layer, linear in linears(runtime.hooks.model_blocks(model), model, parameters.skip)
    ]
    left = [f"{name} ({linear.out_features} x {linear.in_features})" for name, linear in found if not sizes_fit(linear)]
    chosen = [linear for _, linear in found if sizes_fit(linear)]
    if not chosen:
        why = f"the sizes of {', '.join(left[:3])} are no multiples of 16" if left else "there is none"
        raise ConfigError(
            f"float8={runtime.config.device_parameters.float8!r} finds no linear layer in the blocks of the models: "
            f"{why}. Override model_blocks to name other blocks, or apply_float8 to choose layers by hand."
        )
    if left:
        runtime.warn_once(
            "float8",
            f"{len(left)} of {len(found)} linear layers stay out of float8, whose sizes are to be multiples of 16 on "
            f"each rank: {', '.join(left[:3])}{', ...' if len(left) > 3 else ''}",
        )
    return chosen
