"""Which parameter gets which learning rate and weight decay; each trainable one is in exactly one group."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Any

from torch import nn

from dream_trainer.checks import check_between, check_pattern
from dream_trainer.config.parameter_class import PositiveFloat, parameters
from dream_trainer.errors import ConfigError
from dream_trainer.parallel.sharding import Described, describe, named_with_ties, repeated_blocks, whole_of


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
