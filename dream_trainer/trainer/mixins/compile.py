"""CompileMixin: compiles each block in place, so that equal blocks compile once and names in the state dict stay."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from dream_trainer.config.device_parameters import CompileConfigMixin, CompileParameters
from dream_trainer.errors import StepError
from dream_trainer.modules.class_change import change_class, own_class
from dream_trainer.modules.recompute import BlockState, Moves, Recomputed
from dream_trainer.parallel.axis import COMPILATION, Parallelism, Traced
from dream_trainer.parallel.joined_buffers import unread_in_training
from dream_trainer.trainer.abstract import AbstractTrainer


class Watched(Traced):
    """A compiled block that is recomputed: its second run starts from what the first one left in buffers."""

    _is_known = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_known or not self.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        self._is_known = True
        moves = Moves()
        state = BlockState(self, (), moves)
        output = super().__call__(*args, **kwargs)
        state.look(own_class(self).__name__)
        parts = list(self.modules())
        read = [name for index, name in moves.written if name not in unread_in_training(parts[index])]
        if read:
            raise StepError(
                f"{own_class(self).__name__} writes into {read[0]!r} in its forward, and PyTorch compiles blocks under "
                "activation checkpointing so that backward would compute with what was written. Leave this block out "
                "of one of the two by apply_activation_checkpointing or apply_compile, or use compile=False."
            )
        return output


class CompileMixin(AbstractTrainer):
    """Compiled training. Override `apply_compile` to compile other parts, or `model_blocks` to name the blocks."""

    _config_class: ClassVar[type | None] = CompileConfigMixin
    _parallelism: ClassVar[Parallelism | None] = COMPILATION

    def apply_compile(self) -> None:
        """Compiles the blocks of every model in place; a model without repeated blocks is compiled as one.

        Raises:
            ConfigError: A parallelism cannot have the blocks compiled as the config asks.
        """
        parameters: CompileParameters = self._runtime.config.compile_parameters
        given = ("backend", "fullgraph", "dynamic", "mode")
        options = {name: vars(parameters)[name] for name in given} | {"options": None}
        axes = self._runtime.parallel.active_axes(self._runtime.config)
        for axis in axes:
            options |= axis.compile_options(self._runtime.config, self._runtime.launched)
        for model in self._runtime.registry.parameterised_models():
            for block in self.model_blocks(model) or [model]:
                if isinstance(block, Recomputed):
                    change_class(block, Watched)
                if block.forward.__module__.startswith("torch."):
                    change_class(block, Traced)
                are_done = [axis.compile_block(block, options) for axis in axes]
                if not any(are_done):
                    block.compile(**options)
