"""CompileMixin: compiles each block in place, so that equal blocks compile once and names in the state dict stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn as nn

from dream_trainer.compat.async_collectives import options_of_overlap, waited, why_memory_is_not_shared
from dream_trainer.config.parallel_parameters import CompileConfigMixin, CompileParameters
from dream_trainer.errors import ConfigError, StepError
from dream_trainer.modules.block_state import BlockState, Moves
from dream_trainer.modules.class_change import Changed, change_class, own_class
from dream_trainer.modules.recompute import Recomputed
from dream_trainer.parallel.joined_buffers import unread_in_training
from dream_trainer.trainer.abstract import AbstractTrainer


class Traced(Changed):
    """Calls its own forward from here: the compiler would pass over PyTorch's own files and layers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Waiting(Traced):
    """Is called with what collectives have finished, before its compiled code begins."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*map(waited, args), **{name: waited(value) for name, value in kwargs.items()})


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

    def _finish_setup(self) -> None:
        super()._finish_setup()
        config = self._runtime.config
        if config.compile_parameters.async_tensor_parallel and not config.device_parameters.compile:
            raise ConfigError(
                "compile_parameters.async_tensor_parallel=True overlaps nothing without compiled blocks. Set "
                "device_parameters.compile=True too, or leave it False."
            )

    def apply_compile(self) -> None:
        """Compiles the blocks of every model in place; a model without repeated blocks is compiled as one.

        Raises:
            ConfigError: Products are to overlap where they cannot, or sequences are shared and a block is within
                another.
        """
        super().apply_compile()
        parameters: CompileParameters = self._runtime.config.compile_parameters
        devices = self._runtime.config.device_parameters
        is_split, is_shared = devices.tensor_parallel > 1, devices.context_parallel > 1
        options = None
        if is_split and parameters.async_tensor_parallel and self.world.mesh is not None:
            options = self._options_of_overlap(self.world.mesh["tp"].get_group())
        for model in self._runtime.registry.parameterised_models():
            parts = self.model_blocks(model) or [model]
            if is_shared:
                _refuse_parts_of_parts(model, parts)
            for part in parts:
                if isinstance(part, Recomputed):
                    change_class(part, Watched)
                if is_split:
                    change_class(part, Waiting)
                elif part.forward.__module__.startswith("torch."):
                    change_class(part, Traced)
                mode = parameters.mode if options is None else None
                if is_shared:
                    from dream_trainer.parallel.compiled_attention import compile_with_shared_attention

                    compile_with_shared_attention(part, backend=parameters.backend, mode=mode, options=options)
                    continue
                part.compile(
                    backend=parameters.backend,
                    fullgraph=parameters.fullgraph,
                    # Layers that are split cannot be of variable shapes, as None would make them.
                    dynamic=False if is_split else parameters.dynamic,
                    mode=mode,
                    options=options,
                )

    def _options_of_overlap(self, group: dist.ProcessGroup) -> dict[str, Any]:
        if (why_not := why_memory_is_not_shared(group, self.world.device)) is not None:
            raise ConfigError(
                f"compile_parameters.async_tensor_parallel=True: {why_not}. It needs GPUs that read each other's "
                "memory, as those that NVLink connects do. Use False elsewhere."
            )
        return options_of_overlap(self._runtime.config.compile_parameters.mode)


def _refuse_parts_of_parts(model: nn.Module, parts: Sequence[nn.Module]) -> None:
    names = {module: name for name, module in model.named_modules()}
    for part in parts:
        inner = next((module for module in part.modules() if module is not part and module in parts), None)
        if inner is not None:
            raise ConfigError(
                f"model_blocks gives {names.get(part)!r} and {names.get(inner)!r}, which is within it: under "
                "context_parallel each block is compiled whole, by itself. Name one of the two, or use compile=False."
            )
