"""ActivationStats: how large the outputs of modules are in training, now and then."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dream_trainer.callbacks.gradient_stats import add_sums, no_sums
from dream_trainer.checks import check_names, check_pattern
from dream_trainer.compat.compiler import is_compiled, never_compiled
from dream_trainer.compat.pytorch import in_backward, local_tensor
from dream_trainer.config.parameter_class import PositiveInt, check_fields
from dream_trainer.errors import ConfigError
from dream_trainer.events.callback import LoggingCallback
from dream_trainer.nested import leaves
from dream_trainer.trainer.abstract import AbstractTrainer


@dataclass(eq=False, repr=False)
class ActivationStats(LoggingCallback):
    """Logs root mean square, largest magnitude and share of zeros of modules' outputs, as `activations/<module>/rms`,
    `max` and `zeros`.

    They cover all elements that a module returned in the accumulation window, in all its calls, micro-batches and
    ranks. Outputs that activation checkpointing recomputes count once. If an output is not a tensor, the first
    floating-point tensor in it counts. A step that is due reads the outputs, runs one collective and waits for nothing;
    in the others the modules have no hook.

    A compiled module is measured from outside. Modules inside one are left out, and this logs once: a hook would not
    run there, or would break the graph.

    Args:
        every_n_steps: Optimizer steps between two measurements.
        modules: Regular expressions to be found in names such as `"model.layers.0.attention"`. Default: the blocks that
            `model_blocks` names; of a model without any, its children.
        name: First part of the metrics' names.

    Raises:
        ConfigError: A value is invalid; at the end of setup, also if an expression is found in no name.
    """

    needs_whole_models: ClassVar[bool] = True

    every_n_steps: PositiveInt = 100
    _: KW_ONLY
    modules: Annotated[Sequence[str], partial(check_names, example="attention$")] | None = None
    name: str = "activations"

    def __post_init__(self) -> None:
        super().__init__(self.name)
        check_fields(self, ActivationStats)
        for pattern in self.modules or ():
            check_pattern("modules", pattern)
        self._modules: dict[str, nn.Module] = {}
        self._hooks: list[RemovableHandle] = []
        self._first_batch_idx = 0
        self._sums = torch.empty(0, 4)

    def post_setup(self, trainer: AbstractTrainer) -> None:
        chosen = dict(_by_pattern(trainer, self.modules) if self.modules is not None else _blocks(trainer))
        hidden = {
            id(inner)
            for model in trainer.named_models().values()
            for outer in model.modules()
            if is_compiled(outer)
            for inner in outer.modules()
            if inner is not outer
        }
        self._modules = {name: module for name, module in chosen.items() if id(module) not in hidden}
        if len(self._modules) < len(chosen):
            trainer.warn_once(
                f"hidden from {self.name}",
                f"{type(self).__name__} leaves out {len(chosen) - len(self._modules)} of {len(chosen)} modules, which "
                "are inside compiled ones: hooks do not run there. Choose the compiled modules themselves, or train "
                "without compile.",
            )

    def pre_train_batch(self, trainer: AbstractTrainer, batch: Any, batch_idx: int) -> None:
        # Counters show completed work: the window that begins is not counted yet.
        if (trainer.global_step + 1) % self.every_n_steps:
            return
        if not self._hooks:
            self._first_batch_idx = batch_idx
            self._sums = no_sums(len(self._modules), trainer.world.device)
            for module, row in zip(self._modules.values(), self._sums, strict=True):
                self._hooks.append(module.register_forward_hook(_adds_to(row)))
        elif batch_idx == self._first_batch_idx:  # the window runs again
            self._sums.zero_()

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        if not self._hooks:
            return
        self._remove_hooks()
        squares, largest, zeros, elements = _over_ranks(self._sums, trainer.world.world_size).unbind(1)
        statistics = {"rms": (squares / elements).sqrt(), "max": largest, "zeros": zeros / elements}
        for kind, values in statistics.items():
            for module, value, weight in zip(self._modules, values, elements, strict=True):
                # A module that put out nothing weighs nothing, and so is left out.
                trainer.log(f"{self.name}/{module}/{kind}", value, weight=weight, reduce="last")

    def on_exception(self, trainer: AbstractTrainer, exc: BaseException) -> None:
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _blocks(trainer: AbstractTrainer) -> Iterator[tuple[str, nn.Module]]:
    for model_name, model in trainer.named_models().items():
        chosen = {id(module) for module in trainer.model_blocks(model) or model.children()}
        yield from ((n, module) for n, module in model.named_modules(prefix=model_name) if id(module) in chosen)


def _by_pattern(trainer: AbstractTrainer, patterns: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    named = {
        name: module
        for model_name, model in trainer.named_models().items()
        for name, module in model.named_modules(prefix=model_name)
    }
    for pattern in patterns:
        matching = [name for name in named if re.search(pattern, name)]
        if not matching:
            some = ", ".join(list(named)[:5])
            raise ConfigError(f"modules: {pattern!r} is found in no module's name. They begin with {some}.")
        yield from ((name, named[name]) for name in matching)


def _adds_to(row: Tensor) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():  # activation checkpointing computes again
            return
        floats = (leaf for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        tensor = next(floats, None)
        if tensor is not None:
            with torch.no_grad():
                add_sums(row, _local(tensor))

    return never_compiled(hook)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of an output; of one whose parts are still to be summed over ranks, the sum."""
    if type(tensor) is not Tensor:
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            return tensor.full_tensor()
    return local_tensor(tensor)


def _over_ranks(sums: Tensor, world_size: int) -> Tensor:
    """The sums over all ranks; outputs that are equal on several ranks count several times on both sides of a mean."""
    if world_size == 1:
        return sums
    import torch.distributed as dist

    ranks = [torch.empty_like(sums) for _ in range(world_size)]
    dist.all_gather(ranks, sums)
    stacked = torch.stack(ranks)
    total = stacked.sum(0)
    total[:, 1] = stacked[:, :, 1].amax(0)
    return total
