"""Optimizers from OptimizerParameters: PyTorch's own classes with PyTorch's own arguments, and our own Muon."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop, Rprop, SparseAdam

from dream_trainer.checks import check_between, check_names, check_positive, refuse, spell
from dream_trainer.compat.pytorch import is_dtensor
from dream_trainer.config.parameter_class import PositiveFloat, PositiveInt, parameters
from dream_trainer.errors import ConfigError
from dream_trainer.optim.groups import GroupParameters, Placed, group, matches, place, require_match
from dream_trainer.optim.muon import Muon
from dream_trainer.parallel.sharded_model import is_sharded

_Share = Annotated[float, partial(check_between, low=0, high=1, below=True)]
OptimizerName = Literal["adamw", "adam", "sgd", "adagrad", "rmsprop", "nadam", "adafactor", "muon"]


class _Kind(NamedTuple):
    cls: type[Any]  # Any, since Optimizer's own constructor knows none of their keywords
    takes: tuple[str, ...]  # fields in addition to those that all take
    fused_on: tuple[str, ...] = ()  # devices


_EVERYWHERE = ("cpu", "cuda", "mps", "xpu")
_KINDS = {
    "adamw": _Kind(AdamW, ("betas", "eps", "amsgrad"), _EVERYWHERE),
    "adam": _Kind(Adam, ("betas", "eps", "amsgrad"), _EVERYWHERE),
    "sgd": _Kind(SGD, ("momentum", "dampening", "nesterov"), _EVERYWHERE),
    # Documented for CUDA in 2.13, added in an unknown earlier release; foreach is safe before.
    "adagrad": _Kind(Adagrad, ("eps",), ("cpu", "cuda") if torch.__version__ >= "2.13" else ("cpu",)),
    "rmsprop": _Kind(RMSprop, ("alpha", "eps", "momentum", "centered")),
    "nadam": _Kind(NAdam, ("betas", "eps")),
    "adafactor": _Kind(Adafactor, ()),
    "muon": _Kind(Muon, ("momentum", "nesterov", "ns_steps", "adjust_lr_fn", "hidden", "adamw_lr", "betas", "eps")),
}


@parameters
class OptimizerParameters:
    """One of PyTorch's named optimizers, and the grouping of the model's parameters for it.

    A hyperparameter at None has PyTorch's own default for that optimizer. A hyperparameter that the named optimizer
    does not take raises an error.

    Raises:
        ConfigError: A value is invalid, or the named optimizer does not take it.
    """

    name: OptimizerName = "adamw"
    """Optimizer. "muon" is `dream_trainer.optim.Muon` on hidden matrices and AdamW on all other parameters."""
    lr: PositiveFloat = 1e-3
    """Learning rate. 1e-3 is PyTorch's for AdamW."""
    weight_decay: Annotated[float, partial(check_between, low=0)] | None = None
    """Weight decay of matrices: decoupled in AdamW, Muon and Adafactor, an L2 penalty in the others. None is PyTorch's
    default (AdamW 0.01, Muon 0.1, the others 0)."""
    betas: tuple[float, float] | None = None
    """Decay rates of the running mean and square of the gradient: adamw, adam, nadam, and the AdamW half of muon."""
    eps: PositiveFloat | None = None
    """Added to the denominator: adamw, adam, nadam, adagrad, rmsprop, and the AdamW half of muon."""
    amsgrad: bool | None = None
    """Keep the largest running square: adamw, adam."""
    momentum: _Share | None = None
    """Momentum: sgd, rmsprop, muon."""
    dampening: Annotated[float, partial(check_between, low=0, high=1)] | None = None
    """Share of the gradient kept out of the momentum: sgd."""
    nesterov: bool | None = None
    """Nesterov momentum: sgd, muon."""
    alpha: _Share | None = None
    """Decay rate of the running square: rmsprop."""
    centered: bool | None = None
    """Normalise by the gradient's variance: rmsprop."""
    ns_steps: PositiveInt | None = None
    """Newton-Schulz iterations: muon."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] | None = None
    """How muon's rate follows a matrix's shape. None or "match_rms_adamw" makes updates as large as AdamW's, so that
    one `lr` serves both. "original" is Keller Jordan's rule, whose rate is some fifty times AdamW's."""
    hidden: Annotated[tuple[str, ...], partial(check_names, example="blocks", are_patterns=True)] = ()
    """Regular expressions of the names of muon's matrices. () takes those inside the model's repeated blocks."""
    adamw_lr: PositiveFloat | None = None
    """Learning rate of muon's AdamW half. None uses `lr`."""
    fused: bool | Literal["auto"] = "auto"
    """One kernel per group. "auto" uses it if the optimizer, device and parameters have it, otherwise one kernel per
    operation (foreach). True insists, False disables."""
    decay_vectors: bool = False
    """Decay biases, scalars and normalisation weights too. By default only matrices decay."""
    decay_embeddings: bool = True
    """Decay embedding tables."""
    groups: tuple[GroupParameters, ...] = ()
    """Parameters with a different rate or decay. The first pattern that matches a parameter decides."""
    layer_decay: Annotated[float, check_positive, partial(check_between, low=0, high=1)] | None = None
    """Factor of the learning rate from each block to the one below it. None has one rate for all."""

    def __post_init__(self) -> None:
        for name in dict.fromkeys(name for kind in _KINDS.values() for name in kind.takes):
            value = getattr(self, name)
            if name not in _KINDS[self.name].takes and value is not None and value != ():
                others = spell(repr(other) for other, kind in _KINDS.items() if name in kind.takes)
                raise ConfigError(f"{name}={value!r} means nothing to {self.name!r}. Leave it out, or use {others}.")
        if self.betas is not None:
            if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
                raise ConfigError(f"betas={self.betas!r} are not two numbers. Use a pair such as (0.9, 0.95).")
            for index, beta in enumerate(self.betas):
                check_between(f"betas[{index}]", beta, 0, 1, below=True)
        refuse(
            self.adjust_lr_fn == "original" and self.adamw_lr is None,
            f'adjust_lr_fn="original" with lr={self.lr} for both halves: Muon then needs a rate some fifty times '
            'AdamW\'s. Set adamw_lr too, such as lr=0.02, adamw_lr=3e-4, or use adjust_lr_fn="match_rms_adamw".',
        )
        are_groups = isinstance(self.groups, tuple | list) and all(isinstance(g, GroupParameters) for g in self.groups)
        example = "(GroupParameters(pattern=..., lr_scale=...),)"
        refuse(not are_groups, f"groups={self.groups!r} is no tuple of GroupParameters. Use {example}.")

    def given(self, *names: str) -> dict[str, Any]:
        """Those of these fields that are not None, as keyword arguments of PyTorch's optimizer."""
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


def build_optimizer(
    parameters: OptimizerParameters, model: nn.Module, *, blocks: Sequence[nn.Module] | None = None
) -> Optimizer:
    """The named optimizer over the trainable parameters of `model`, grouped as `parameters` says.

    Args:
        parameters: The optimizer and its numbers.
        model: On its device (not on meta), and already sharded if it will be: call this in `configure_optimizers`.
        blocks: The model's repeated blocks, lowest first; by default those that sharding finds. A trainer with its own
            `model_blocks` passes `self.model_blocks(model)`.

    Raises:
        ConfigError: The optimizer cannot step sharded parameters, it is really two ("muon"), or the groups do not fit
            the model.
    """
    if parameters.name == "muon":
        raise ConfigError(
            'name="muon" makes two optimizers, Muon and AdamW. Use self.optimizers = build_optimizers(...), and '
            "self.step(model, self.optimizers), which clips by one norm over both."
        )
    return build_optimizers(parameters, model, blocks=blocks)[0]


def build_optimizers(
    parameters: OptimizerParameters, model: nn.Module, *, blocks: Sequence[nn.Module] | None = None
) -> list[Optimizer]:
    """The optimizers that the name stands for: Muon and AdamW for "muon", one for every other name.

    Pass the list to `self.step`: the same line of code works for every name. Muon takes the matrices that
    `parameters.hidden` names, by default those inside the repeated blocks; AdamW the rest: embeddings, head, norms,
    biases, and tensors of more than two dimensions.

    Args and errors are those of `build_optimizer`; "muon" without a hidden matrix is a ConfigError too.
    """
    options = parameters.groups, parameters.layer_decay, parameters.decay_vectors, parameters.decay_embeddings
    placed = place(model, *options, blocks)
    if parameters.name == "muon":
        return _build_muon(parameters, placed)
    kind = _KINDS[parameters.name]
    return [_build(kind.cls, parameters, placed, lr=parameters.lr, options=parameters.given(*kind.takes))]


def _build_muon(parameters: OptimizerParameters, placed: Sequence[Placed]) -> list[Optimizer]:
    matrices = [one for one in placed if one.of.ndim == 2]
    if parameters.hidden:
        for pattern in parameters.hidden:
            require_match("hidden", pattern, [one.of.names for one in matrices], "trainable matrix")
        hidden = [one for one in matrices if matches(parameters.hidden, one.of.names)]
    else:
        hidden = [one for one in matrices if one.of.block > 0 and not one.of.is_vector and not one.of.is_embedding]
    if not hidden:
        raise ConfigError(
            'name="muon" found no trainable matrix inside repeated blocks (a ModuleList or Sequential of two or more '
            "modules of one class). Name the matrices with hidden=(pattern, ...), or pass blocks=[...]."
        )
    in_muon = {one.of.names for one in hidden}
    rest = [one for one in placed if one.of.names not in in_muon]
    options = parameters.given("momentum", "nesterov", "ns_steps")
    options["adjust_lr_fn"] = parameters.adjust_lr_fn or "match_rms_adamw"
    optimizers = [_build(Muon, parameters, hidden, lr=parameters.lr, options=options)]
    if rest:
        rate = parameters.lr if parameters.adamw_lr is None else parameters.adamw_lr
        optimizers.append(_build(AdamW, parameters, rest, lr=rate, options=parameters.given("betas", "eps")))
    return optimizers


def _build(
    cls: type[Any], parameters: OptimizerParameters, placed: Sequence[Placed], *, lr: float, options: dict[str, Any]
) -> Optimizer:
    decay = parameters.weight_decay
    if decay is None:
        decay = inspect.signature(cls).parameters["weight_decay"].default
    groups = group(placed, lr=lr, weight_decay=decay)
    if cls is not Muon:
        for one in groups:
            one |= _implementation(cls, [p for _, p in one["params"]], parameters.fused)
    optimizer: Optimizer = cls(groups, lr=lr, weight_decay=decay, **options)
    refuse_unshardable(optimizer)
    return optimizer


def _implementation(cls: type[Any], parameters: Sequence[nn.Parameter], fused: bool | str) -> dict[str, bool]:
    """A group's implementation: fused, or foreach, or one by one (with both sharded and plain parameters)."""
    obstacle = _obstacle(cls, parameters)
    if fused is True and obstacle is not None:
        raise ConfigError(f'fused=True: {cls.__name__} has no fused kernel for {obstacle}. Use fused="auto".')
    if fused is not False and obstacle is None:
        return {"fused": True}
    return {"foreach": not _is_mixture(parameters)}


def _obstacle(cls: type[Any], parameters: Sequence[nn.Parameter]) -> str | None:
    """Why the fused kernel cannot step these parameters; None if it can."""
    fused_on = next(kind.fused_on for kind in _KINDS.values() if kind.cls is cls)
    if not fused_on:
        return "any parameter"
    for parameter in parameters:
        if parameter.device.type not in fused_on:
            return f"parameters on {parameter.device.type}"
        if not torch.is_floating_point(parameter):
            return f"{parameter.dtype} parameters"
    if cls in UNSHARDABLE_FUSED and any(is_sharded(p) for p in parameters):
        return "sharded parameters"
    return "sharded and plain parameters in one group" if _is_mixture(parameters) else None


def _is_mixture(parameters: Iterable[nn.Parameter]) -> bool:
    return len({is_sharded(parameter) for parameter in parameters}) > 1


# PyTorch's optimizers that cannot step DTensors; measured with torch 2.13 in float64 under `fully_shard` on 2 ranks and
# on a 2 x 2 mesh with tensor parallelism. All others agree there with one process to 4e-14.
UNSHARDABLE: tuple[type[Optimizer], ...] = (Adafactor, LBFGS, Rprop, SparseAdam)

UNSHARDABLE_FUSED: tuple[type[Optimizer], ...] = (SGD, Adagrad)  # whose fused kernel has no rule for DTensors


def refuse_unshardable(optimizer: Optimizer) -> None:
    """Raises ConfigError for an optimizer with sharded parameters that PyTorch would fail to step, or step wrong."""
    sharded = [g for g in optimizer.param_groups if any(is_dtensor(p) for p in g["params"])]
    if not sharded:
        return
    name = type(optimizer).__name__
    if isinstance(optimizer, UNSHARDABLE):
        raise ConfigError(
            f"{name} cannot step sharded parameters. Use AdamW, Adam, SGD, Adagrad, RMSprop, NAdam, or Muon of "
            "dream_trainer.optim."
        )
    if isinstance(optimizer, UNSHARDABLE_FUSED) and any(group.get("fused") for group in sharded):
        raise ConfigError(
            f"{name}(fused=True) cannot step sharded parameters: its kernel has no rule for DTensors. "
            f"Use {name}(foreach=True)."
        )
