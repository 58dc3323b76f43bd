"""TensorParallelMixin: several ranks share the work of each layer, and see the same data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch.distributed.device_mesh import DeviceMesh

from dream_trainer.checks import listed
from dream_trainer.config.device_parameters import TensorParallelConfigMixin
from dream_trainer.parallel.axis import TENSOR, Parallelism
from dream_trainer.trainer.abstract import AbstractTrainer


class TensorParallelMixin(AbstractTrainer):
    """Tensor-parallel training. Override `apply_tensor_parallel(mesh)`.

    Parameters that were tied or frozen before the plan are so after it. Whatever the plan leaves out stays whole on
    each rank.
    """

    _config_class: ClassVar[type | None] = TensorParallelConfigMixin
    _parallelism: ClassVar[Parallelism | None] = TENSOR

    def apply_tensor_parallel(self, mesh: DeviceMesh) -> None:
        """Splits layers over `mesh` (one dimension, tp) with `parallelize_module`; every model's plan is its own.
        Required if `device_parameters.tensor_parallel` > 1."""

    def _finish_setup(self) -> None:
        super()._finish_setup()
        ranks, models = self.world.mesh_shape.tp, self.named_models()
        if ranks == 1:
            return
        from dream_trainer.parallel.tensor_layers import undeclared_dropouts

        if undeclared := undeclared_dropouts(models):
            self.warn_once(
                "undeclared dropouts",
                f"{listed(undeclared, 3)}: apply_tensor_parallel does not say whether the tensor_parallel="
                f"{ranks} ranks have these layers' input whole or a part each, so that each drops the same places. Say "
                "it with dream_trainer.modules.declare_random_layer(module, mesh, Shard(dim) or Replicate()).",
            )

    def _wrap_step(self, step: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        step = super()._wrap_step(step)
        devices = self._runtime.config.device_parameters
        if devices.tensor_parallel == 1:
            return step
        if not devices.compile:  # compiled blocks would be compiled with what compares them
            from dream_trainer.parallel.tensor_layers import EqualParts, once_for_each_shape

            step = once_for_each_shape(step, EqualParts(self.named_models(), self.world))
        if self._runtime.config.tensor_parallel_parameters.loss_parallel:
            from torch.distributed.tensor.parallel import loss_parallel

            step = loss_parallel()(step)
        return step
