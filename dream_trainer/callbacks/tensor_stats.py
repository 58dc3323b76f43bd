"""GradientStats, WeightStats and ActivationStats: how large the parts of the models and their outputs are, over all
ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dream_trainer.checkpoint.model_state import parameter_fqns
from dream_trainer.checks import check_names
from dream_trainer.compat.compiler import is_compiled, never_compiled
from dream_trainer.compat.pytorch import in_backward, is_dtensor, local_tensor
from dream_trainer.config.parameter_class import NonNegativeInt, PositiveInt, check_fields
from dream_trainer.distributed.world import gathered_rows
from dream_trainer.events.callback import LoggingCallback
from dream_trainer.nested import leaves
from dream_trainer.optim.optimizers import matches, require_match
from dream_trainer.trainer.abstract import AbstractTrainer
from dream_trainer.trainer.step.gradients import copies_of

OTHER = "other.parameters"  # for optimized parameters that are in no model


@dataclass(eq=False, repr=False)
class TensorStats(LoggingCallback):
    """A callback that measures groups of tensors every n steps: an interface. Use `GradientStats` or `WeightStats`."""

    needs_whole_models: ClassVar[bool] = True

    every_n_steps: PositiveInt = 100
    _: KW_ONLY
    depth: NonNegativeInt | None = 2
    histograms: bool = False

    def __post_init__(self) -> None:
        super().__init__(self.name)
        check_fields(self, TensorStats)

    @torch.no_grad()
    def _sums_of(
        self, trainer: AbstractTrainer, named: Iterable[tuple[str, nn.Parameter, Tensor | None]]
    ) -> dict[str, Tensor]:
        """This rank's sums of each group of parameters; of tensors that are None nothing but that there is a group."""
        world, sums = trainer.world, dict[str, Tensor]()
        for name, parameter, tensor in named:
            row = sums.setdefault(group_of(name, self.depth), no_sums(1, world.parameter_device)[0])
            if tensor is not None:
                add_sums(row, local_tensor(tensor), copies_of(parameter, world.world_size))
                if self.histograms:
                    trainer.log_histogram(f"{self.name}/{name}", tensor)
        return sums

    def _log(self, trainer: AbstractTrainer, sums: dict[str, Tensor]) -> None:
        if sums:
            log_sums(trainer, self.name, sums, torch.stack([*sums.values()]), "norm")


def group_of(fqn: str, depth: int | None) -> str:
    """The group of a parameter: its module down to `depth` levels below the model; None is the parameter itself."""
    return fqn if depth is None else ".".join(fqn.split(".")[:-1][: depth + 1])


def no_sums(n_groups: int, device: torch.device) -> Tensor:
    """For each group the sum of squares, largest magnitude, zeros and elements: 0, in float64 where there is any."""
    return torch.zeros(n_groups, 4, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)


def add_sums(row: Tensor, tensor: Tensor, copies: int = 1) -> None:
    """Adds a plain tensor's sums to a group's, in place; each of its elements counts `1 / copies`."""
    if not tensor.numel():  # a rank may hold nothing of a small tensor
        return
    # A norm of half-precision values is not a half-precision number.
    norm = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    row[0] += norm.to(row.dtype).square() / copies
    row[1] = torch.maximum(row[1], torch.linalg.vector_norm(tensor, math.inf).to(row.dtype))
    row[2] += (tensor.numel() - tensor.count_nonzero()) / copies
    row[3] += tensor.numel() / copies


def log_sums(trainer: AbstractTrainer, name: str, parts: Collection[str], sums: Tensor, root: str) -> None:
    """Logs the root ("norm", or "rms" of the mean square), "max" and "zeros" of parts over all ranks: a collective."""
    own, everyone = sums.to(trainer.world.device)[None], dist.group.WORLD
    stacked = own if trainer.world.world_size == 1 or everyone is None else gathered_rows(own, everyone)
    squares, _, zeros, elements = stacked.sum(0).unbind(1)
    roots = (squares if root == "norm" else squares / elements).sqrt()
    for kind, values in {root: roots, "max": stacked[:, :, 1].amax(0), "zeros": zeros / elements}.items():
        for part, value, weight in zip(parts, values, elements, strict=True):
            # A part without elements weighs nothing, and so is left out.
            trainer.log(f"{name}/{part}/{kind}", value, weight=weight, reduce="last")


@dataclass(eq=False, repr=False)
class GradientStats(TensorStats):
    """Logs 2-norm, largest magnitude and share of zeros of gradients as `gradients/<group>/norm`, `max` and `zeros`.

    Gradients are those that the optimizers got: of the whole window, over all ranks, normalised and clipped; of one
    that steps several times in a window, its last. Groups share no parameter: `gradients/model` is of those that the
    model holds itself, outside its submodules; `depth=0` gives one value for the whole model.

    Args:
        every_n_steps: Optimizer steps between two looks.
        depth: Levels of submodules that are a group each, as in ModelSummary: 0 for whole models, None for each
            parameter on its own.
        histograms: Whether to log a histogram of each parameter's gradient too, as `gradients/<parameter>`; they are
            gathered for it, one at a time.
        name: First part of the metrics' names.
    """

    name: str = field(default="gradients", kw_only=True)

    def post_setup(self, trainer: AbstractTrainer) -> None:
        trainer.accumulation_window.watch_skipped(lambda optimizer: self._sum_up(trainer, optimizer))

    def pre_fit(self, trainer: AbstractTrainer) -> None:
        # By optimizer: several may train parts of one group, and each counts once, also in a window that is run again.
        self._sums: dict[Optimizer, dict[str, Tensor]] = {}

    def post_optimizer_step(self, trainer: AbstractTrainer, model: nn.Module, optimizer: Optimizer) -> None:
        """Sums up this rank's part of the gradients, if it is time; they are gone when `step` returns."""
        self._sum_up(trainer, optimizer)

    def _sum_up(self, trainer: AbstractTrainer, optimizer: Optimizer) -> None:
        # Counters show completed work while training_step runs: this step is not counted yet.
        if (trainer.global_step + 1) % self.every_n_steps:
            return
        names = parameter_fqns(trainer.named_models())
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._sums[optimizer] = self._sums_of(trainer, ((names.get(p, OTHER), p, p.grad) for p in parameters))

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        if not self._sums:
            return
        sums: dict[str, Tensor] = {}
        for part in self._sums.values():
            for name, row in part.items():
                before = sums.get(name, torch.zeros_like(row))
                sums[name] = before + row
                sums[name][1] = torch.maximum(before[1], row[1])
        self._sums.clear()
        self._log(trainer, sums)


@dataclass(eq=False, repr=False)
class WeightStats(TensorStats):
    """Logs 2-norm, largest magnitude and share of zeros of parameters as `weights/<group>/norm`, `max` and `zeros`.

    Frozen parameters are among them. Groups, cost and arguments are as for `GradientStats`; histograms are of the
    parameters.
    """

    name: str = field(default="weights", kw_only=True)

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        if trainer.global_step % self.every_n_steps:
            return
        named = parameter_fqns(trainer.named_models()).items()
        of_parameters = ((name, p, p.detach()) for p, name in named if isinstance(p, nn.Parameter))
        self._log(trainer, self._sums_of(trainer, of_parameters))


@dataclass(eq=False, repr=False)
class ActivationStats(LoggingCallback):
    """Logs root mean square, largest magnitude and share of zeros of modules' outputs, as `activations/<module>/rms`,
    `max` and `zeros`.

    They cover all elements that a module returned in the accumulation window, in all its calls, micro-batches and
    ranks. If an output is not a tensor, the first floating-point tensor in it counts. Modules inside compiled ones are
    left out, with a warning.

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
    modules: Annotated[Sequence[str], partial(check_names, example="attention$", are_patterns=True)] | None = None
    name: str = "activations"

    def __post_init__(self) -> None:
        super().__init__(self.name)
        check_fields(self, ActivationStats)
        self._hooks: list[RemovableHandle] = []

    def post_setup(self, trainer: AbstractTrainer) -> None:
        models = trainer.named_models()
        named = {name: part for prefix, model in models.items() for name, part in model.named_modules(prefix=prefix)}
        if self.modules is None:
            blocks = {id(part) for model in models.values() for part in trainer.model_blocks(model) or model.children()}
            chosen = {name: module for name, module in named.items() if id(module) in blocks}
        else:
            for pattern in self.modules:
                require_match("modules", pattern, [(name,) for name in named], "module")
            chosen = {name: module for name, module in named.items() if matches(self.modules, (name,))}
        hidden = {
            id(inner)
            for model in models.values()
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
        log_sums(trainer, self.name, self._modules, self._sums, "rms")

    def on_exception(self, trainer: AbstractTrainer, exc: BaseException) -> None:
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _adds_to(row: Tensor) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():  # activation checkpointing computes again
            return
        tensor = next((leaf for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)
        if tensor is not None:
            with torch.no_grad():
                if is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements):
                    tensor = tensor.full_tensor()  # its parts are still to be summed over ranks
                add_sums(row, local_tensor(tensor))

    return never_compiled(hook)
