"""What decides on the groups of a model's parameters, those of a pipeline's other stages included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from dream_trainer.errors import ConfigError
from dream_trainer.parallel.sharding import repeated_blocks


class Described(NamedTuple):
    """A parameter of a model."""

    names: tuple[str, ...]  # several if it is tied, first that of the stage
    parameter: nn.Parameter | None  # None if it is another stage's
    is_trained: bool  # of another stage's, whether it was when the model was cut
    ndim: int
    numel: int
    is_vector: bool  # has fewer than two dimensions or is the weight of a normalisation
    is_embedding: bool
    block: int  # number of its block, from 1; 0 outside of them


class WholeParameters(NamedTuple):
    """All parameters of a model, each once, in the order of `parameters()`, and the number of its blocks."""

    parameters: Sequence[Described]
    n_blocks: int


_whole: WeakKeyDictionary[nn.Module, WholeParameters] = WeakKeyDictionary()


def remember_whole(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Notes the parameters of `model`, from which other stages' layers are about to be taken."""
    parameters, n_blocks = describe(model, blocks)
    _whole[model] = WholeParameters([one._replace(parameter=None) for one in parameters], n_blocks)


def whole_parameters(model: nn.Module, blocks: Sequence[nn.Module] | None) -> WholeParameters:
    if model not in _whole:
        return describe(model, repeated_blocks(model) if blocks is None else blocks)
    whole, own = _whole[model], {name: one for one in describe(model, blocks or ()).parameters for name in one.names}
    parameters: list[Described] = []
    known: set[str] = set()
    for one in whole.parameters:
        here = next((own[name] for name in one.names if name in own), None)
        if here is None:
            parameters.append(one)
            continue
        known.update(here.names)
        if blocks is not None and (here.block > 0) != (one.block > 0):
            raise ConfigError(
                f"blocks=[...] has other modules than the model was cut by, as the one of {here.names[0]}. Leave it "
                "out, or override model_blocks, which pipelines and optimizers both follow."
            )
        names = (*here.names, *(name for name in one.names if name not in here.names))
        parameters.append(one._replace(names=names, parameter=here.parameter, is_trained=here.is_trained))
    if newer := sorted(own.keys() - known):
        raise ConfigError(f"{newer[0]} was added after the model was cut into stages. Add it in configure_models.")
    return WholeParameters(parameters, whole.n_blocks)


def values_in_whole(model: nn.Module) -> int:
    """How many values the parameters of `model` have, or of what it is a stage of."""
    known = _whole[model].parameters if model in _whole else describe(model, ()).parameters
    return sum(one.numel for one in known)


def describe(model: nn.Module, blocks: Sequence[nn.Module]) -> WholeParameters:
    vectors = {id(p) for p in model.parameters() if p.ndim < 2} | _owned(model, nn.LayerNorm | nn.RMSNorm)
    embeddings = _owned(model, nn.Embedding | nn.EmbeddingBag)
    block_of = {id(p): number for number, block in enumerate(blocks, start=1) for p in block.parameters()}
    parameters = [
        Described(
            names, p, p.requires_grad, p.ndim, p.numel(), id(p) in vectors, id(p) in embeddings, block_of.get(id(p), 0)
        )
        for names, p in named_with_ties(model)
    ]
    return WholeParameters(parameters, len(blocks))


def named_with_ties(model: nn.Module) -> list[tuple[tuple[str, ...], nn.Parameter]]:
    """Each parameter once with all its names, in the order of `parameters()`."""
    names: dict[int, list[str]] = {}
    # `state_dict()` leaves out the names of wrappers for compilation and activation checkpointing, and has ties twice.
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter):
            names.setdefault(id(value), []).append(name)
    return [(tuple(names.get(id(p), [name])), p) for name, p in model.named_parameters()]


def _owned(model: nn.Module, kinds: Any) -> set[int]:
    return {id(p) for m in model.modules() if isinstance(m, kinds) for p in m.parameters(recurse=False)}
