"""FSDPMixin: shards parameters, gradients and optimizer state over the ranks with FSDP2's `fully_shard`."""

from __future__ import annotations

from typing import Any, ClassVar

from dream_trainer.config.device_parameters import FSDPConfigMixin
from dream_trainer.parallel.sharding import shard_by_blocks
from dream_trainer.trainer.abstract import AbstractTrainer
from dream_trainer.trainer.runtime import is_whole_in_steps


class FSDPMixin(AbstractTrainer):
    """Sharded training. Override `apply_fully_shard` to wrap by hand, or `model_blocks` to name the blocks."""

    _config_class: ClassVar[type | None] = FSDPConfigMixin
    _shards_parameters: ClassVar[bool] = True

    def apply_fully_shard(self, config: dict[str, Any]) -> None:
        """Wraps each block of every model with parameters, then the model, in `fully_shard`; frozen models too.

        The root keeps its own parameters gathered between forward and backward, as `fully_shard` does by default; the
        blocks of a stage keep theirs too, through all micro-batches of a batch.

        Args:
            config: Keyword arguments of `fully_shard`: the mesh, the policies of precision and offload if configured,
                and in stages `reshard_after_forward`.
        """
        super().apply_fully_shard(config)
        runtime = self._runtime
        blocks = {"reshard_after_forward": runtime.config.fsdp_parameters.reshard_after_forward} | config
        for model in runtime.registry.parameterised_models():
            if is_whole_in_steps(runtime, model):
                runtime.parallel.shard(model, config["mesh"], self.world.refuse_if_forbidden)
            else:
                shard_by_blocks(model, self.model_blocks(model), blocks, config, runtime.parallel.gradients.part)
