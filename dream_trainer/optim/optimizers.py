"""Optimizers from OptimizerParameters: PyTorch's own classes with PyTorch's own arguments, and our own Muon; which
parameter gets which learning rate and weight decay. Each trainable one is in exactly one group."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop, Rprop, SparseAdam

from dream_trainer.checks import check_between, check_names, check_pattern, check_positive, refuse, spell
from dream_trainer.compat.pytorch import is_dtensor
from dream_trainer.config.parameter_class import PositiveFloat, PositiveInt, parameters
from dream_trainer.errors import ConfigError
from dream_trainer.optim.muon import Muon
from dream_trainer.parallel.sharded_model import is_sharded
from dream_trainer.parallel.sharding import Described, describe, named_with_ties, repeated_blocks, whole_of

# PyTorch's optimizers that cannot step DTensors; measured with torch 2.13 in float64 under `fully_shard` on 2 ranks and
# on a 2 x 2 mesh with tensor parallelism. All others agree there with one process to 4e-14.
UNSHARDABLE: tuple[type[Optimizer], ...] = (Adafactor, LBFGS, Rprop, SparseAdam)
UNSHARDABLE_FUSED: tuple[type[Optimizer], ...] = (SGD, Adagrad)  # whose fused kernel has no rule for DTensors


def whole_parameters(model: nn.Module, blocks: Sequence[nn.Module] | None) -> list[Described]:
    whole = whole_of(model)
    if whole is None:
        return describe(model, repeated_blocks(model) if blocks is None else blocks)
    own = {name: one for one in describe(model, blocks or ()) for name in one.names}
    parameters: list[Described] = []
    known: set[str] = set()
    for one in whole:
        here = next((own[name] for name in one.names if name in own), None)
        if here is None:
            parameters.append(one)
            continue
        known.update(here.names)
        if blocks is not None and (here.block > 0) != (one.block > 0):
            raise ConfigError(
                f"blocks=[...] has other modules than the model was cut by, as the one of {here.names[0]}. Leave it "
                "out, or override model_blocks, which stages and optimizers both follow."
            )
        names = (*here.names, *(name for name in one.names if name not in here.names))
        parameters.append(one._replace(names=names, parameter=here.parameter, is_trained=here.is_trained))
    if newer := sorted(own.keys() - known):
        raise ConfigError(f"{newer[0]} was added after the model was cut into stages. Add it in configure_models.")
    return parameters


def values_in_whole(model: nn.Module) -> int:
    """Number of values in the parameters of `model`, or of the whole model if it is a stage."""
    return sum(one.numel for one in whole_of(model) or describe(model, ()))


@parameters
class GroupParameters:
    """Parameters, found by pattern, with a different learning rate or weight decay.

    Raises:
        ConfigError: A value is invalid, or `lr` and `lr_scale` are both given.
    """

    pattern: str
    """Regular expression, searched for in the parameter's name: "^head\\." finds `head.weight` and `head.bias`."""
    lr: PositiveFloat | None = None
    """Learning rate, whatever that of the others and `layer_decay` are; None leaves it to `lr_scale`."""
    lr_scale: PositiveFloat | None = None
    """Factor on the learning rate that the parameters would have; None is 1."""
    weight_decay: Annotated[float, partial(check_between, low=0)] | None = None
    """Weight decay of those of them that decay; None keeps the optimizer's."""

    def __post_init__(self) -> None:
        check_pattern("pattern", self.pattern)
        if self.lr is not None and self.lr_scale is not None:
            raise ConfigError(f"lr={self.lr} and lr_scale={self.lr_scale} both set the rate. Leave one of them out.")


@dataclass(frozen=True)
class Placed:
    of: Described
    group: GroupParameters | None  # the first that matches
    decays: bool
    depth: int | None  # under `layer_decay`: 0 below the first block, then its block's number
    scale: float  # factor of the learning rate by depth


def freeze(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Sets `requires_grad` to False on the parameters that a pattern matches; for `configure_models`.

    Args:
        model: Any module, on meta too.
        patterns: Regular expressions, searched for in the parameters' names; a tied parameter has several.

    Returns:
        Names of the parameters that are frozen now by a pattern, in the model's order.

    Raises:
        ConfigError: A pattern is not a regular expression, or matches no parameter.
    """
    if isinstance(patterns, str):
        raise ConfigError(f"freeze was given the text {patterns!r}. Use a list of patterns: [{patterns!r}].")
    patterns = tuple(patterns)
    named = named_with_ties(model)
    for pattern in patterns:
        check_pattern("freeze", pattern)
        require_match("freeze", pattern, [names for names, _ in named])
    frozen = []
    for names, parameter in named:
        if matches(patterns, names):
            parameter.requires_grad_(False)
            frozen.append(names[0])
    return frozen


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    groups: Sequence[GroupParameters] = (),
    layer_decay: float | None = None,
    decay_vectors: bool = False,
    decay_embeddings: bool = True,
    blocks: Sequence[nn.Module] | None = None,
) -> list[dict[str, Any]]:
    """Groups for any of PyTorch's optimizers: `torch.optim.AdamW(parameter_groups(model, lr=..., weight_decay=...))`.

    Biases, scalars and weights of normalisation layers do not decay unless `decay_vectors`.

    For a model that is cut into stages these are the whole model's groups; they are empty if the stage has none of
    their parameters.

    With `layer_decay` = d and L blocks, the rate of block l (1 to L, in order) is `lr * d**(L + 1 - l)`. That of
    embeddings and everything registered before the first block is `lr * d**(L + 1)`, and that of everything after the
    last one `lr`. This is the layer-wise decay of BEiT (Bao et al. 2021, arXiv 2106.08254), after ELECTRA's. Parameters
    between two blocks have the rate of the block before them.

    Args:
        model: The model, sharded or not. Frozen parameters are left out.
        lr: Learning rate.
        weight_decay: Weight decay of parameters that decay.
        groups: Pattern groups; the first that matches a parameter decides.
        layer_decay: Factor of the rate from block to block, above 0 to 1.
        decay_vectors: Whether parameters of fewer than two dimensions and normalisation weights decay.
        decay_embeddings: Whether tables of `nn.Embedding` and `nn.EmbeddingBag` decay.
        blocks: The repeated blocks, lowest first; by default those that sharding finds.

    Returns:
        Dicts of named `params`, `lr`, `weight_decay` and a `name` that no other has, in the model's order: "decay",
        then "no_decay"; after "layer_3_" with `layer_decay` (0: below the first block, L + 1: above the last one), and
        after the pattern of a pattern group.

    Raises:
        ConfigError: A pattern matches nothing (or only what earlier patterns match), nothing is trainable, or
            `layer_decay` is set and there are no blocks.
    """
    placed = place(model, groups, layer_decay, decay_vectors, decay_embeddings, blocks)
    return group(placed, lr=lr, weight_decay=weight_decay)


def place(
    model: nn.Module,
    groups: Sequence[GroupParameters],
    layer_decay: float | None,
    decay_vectors: bool,
    decay_embeddings: bool,
    blocks: Sequence[nn.Module] | None,
) -> list[Placed]:
    """The properties that decide the group of each trainable parameter; arguments and errors of `parameter_groups`."""
    whole = whole_parameters(model, blocks)
    trainable = [one for one in whole if one.is_trained]
    if not trainable:
        raise ConfigError(
            f"{type(model).__name__} has no trainable parameter. Leave some of its {len(whole)} parameters unfrozen."
        )
    chosen = [next((group for group in groups if matches((group.pattern,), one.names)), None) for one in trainable]
    for pattern_group in groups:
        require_match("groups", pattern_group.pattern, [one.names for one in whole])
        if not any(pattern_group is other for other in chosen):
            raise ConfigError(
                f"groups: every parameter that {pattern_group.pattern!r} matches is frozen or taken by a pattern "
                "before it. Put the narrower pattern first, or remove this one."
            )
    n_blocks = max(one.block for one in whole)
    depths = {} if layer_decay is None else _depths(whole, n_blocks, layer_decay)
    factor = 1.0 if layer_decay is None else layer_decay
    return [
        Placed(
            one,
            group=matching,
            decays=(decay_vectors or not one.is_vector) and (decay_embeddings or not one.is_embedding),
            depth=depths.get(one.names),
            scale=factor ** (n_blocks + 1 - depths[one.names]) if depths else 1.0,
        )
        for one, matching in zip(trainable, chosen, strict=True)
    ]


def group(placed: Iterable[Placed], *, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Joins parameters of the same pattern group, layer and decay into one group."""
    joined: dict[str, dict[str, Any]] = {}
    names: set[str] = set()
    for entry in placed:
        matching, depth = entry.group, entry.depth
        rate, decay = lr * entry.scale, weight_decay
        if matching is not None:
            scale = 1.0 if matching.lr_scale is None else matching.lr_scale
            rate = rate * scale if matching.lr is None else matching.lr
            decay = decay if matching.weight_decay is None else matching.weight_decay
            depth = depth if matching.lr is None else None
        prefix = "" if depth is None else f"layer_{depth}_"
        prefix = prefix if matching is None else f"{matching.pattern} {prefix}"
        for kind, of_kind in (("decay", decay), ("no_decay", 0.0)):
            name = f"{prefix}{kind}"
            joined.setdefault(name, {"name": name, "params": [], "lr": rate, "weight_decay": of_kind})
        name = f"{prefix}{'decay' if decay and entry.decays else 'no_decay'}"
        names.add(name)
        if entry.of.parameter is not None:
            joined[name]["params"].append((entry.of.names[0], entry.of.parameter))
    # An optimizer takes groups with names or without, and asks an empty one for them.
    return [one if one["params"] else one | {"param_names": []} for name, one in joined.items() if name in names]


def _depths(whole: Sequence[Described], last: int, layer_decay: float) -> dict[tuple[str, ...], int]:
    """Layers by the parameter's names, of `last` blocks; see `parameter_groups`."""
    if not last:
        raise ConfigError(
            f"layer_decay={layer_decay} needs repeated blocks, and the model has no ModuleList or Sequential of two or "
            "more modules of one class. Pass blocks=[...], lowest first, or use groups with lr_scale."
        )
    depths: dict[tuple[str, ...], int] = {}
    passed = 0
    for one in whole:
        if one.block:
            depths[one.names] = passed = one.block
        elif one.is_embedding:
            depths[one.names] = 0
        else:
            depths[one.names] = last + 1 if passed == last else passed
    return depths


def matches(patterns: Iterable[str], names: tuple[str, ...]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns for name in names)


def require_match(
    field: str, pattern: str, names: Sequence[tuple[str, ...]], what: str = "parameter of the model"
) -> None:
    if any(matches((pattern,), aliases) for aliases in names):
        return
    flat = [name for aliases in names for name in aliases]
    near = get_close_matches(re.sub(r"[\\^$()*+?]", "", pattern), flat, n=3, cutoff=0.4) or flat[:3]
    raise ConfigError(f"{field}: {pattern!r} matches no {what}. Near names: {', '.join(near) or 'none'}.")


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
            members = [p for _, p in one["params"]]
            obstacle = _obstacle(cls, members)
            if parameters.fused is True and obstacle is not None:
                raise ConfigError(f'fused=True: {cls.__name__} has no fused kernel for {obstacle}. Use fused="auto".')
            is_fused = parameters.fused is not False and obstacle is None
            # Otherwise foreach, or one by one with both sharded and plain parameters.
            one |= {"fused": True} if is_fused else {"foreach": not _is_mixture(members)}
    optimizer: Optimizer = cls(groups, lr=lr, weight_decay=decay, **options)
    refuse_unshardable(optimizer)
    return optimizer


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


def refuse_unshardable(optimizer: Optimizer) -> None:
    """Raises ConfigError for an optimizer with sharded parameters that PyTorch would fail to step, or step wrong."""
    sharded = [g for g in optimizer.param_groups if any(is_dtensor(p) for p in g["params"])]
    name = type(optimizer).__name__
    if sharded and isinstance(optimizer, UNSHARDABLE):
        raise ConfigError(
            f"{name} cannot step sharded parameters. Use AdamW, Adam, SGD, Adagrad, RMSprop, NAdam, or Muon of "
            "dream_trainer.optim."
        )
    if isinstance(optimizer, UNSHARDABLE_FUSED) and any(group.get("fused") for group in sharded):
        raise ConfigError(
            f"{name}(fused=True) cannot step sharded parameters: its kernel has no rule for DTensors. "
            f"Use {name}(foreach=True)."
        )
