"""Where a model is cut and wrapped by `fully_shard`, and the few things done to wrapped models between steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer.compat.pytorch import gathered_twins, is_dtensor, local_tensor, shard_dim
from dream_trainer.errors import ConfigError
from dream_trainer.modules.class_change import Changed, change_class, own_class

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The children of every outermost `ModuleList`/`Sequential` of two or more children of one class."""
    children = list(model.children())
    are_alike = len(children) > 1 and len({own_class(child) for child in children}) == 1
    if are_alike and isinstance(model, nn.ModuleList | nn.Sequential):
        return [child for child in children if next(child.parameters(), None) is not None]
    return [block for child in children for block in repeated_blocks(child)]


def shard_by_blocks(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    config: dict[str, Any],
    root: dict[str, Any],
    is_part: Callable[[nn.Parameter], object],
) -> None:
    """Wraps each block, then the root, with `fully_shard`, and leaves out scalars and what an axis has divided."""
    from torch.distributed.fsdp import fully_shard

    _refuse_ties_across(model, blocks)
    left_out = {parameter for parameter in model.parameters() if parameter.ndim == 0 or is_part(parameter)}
    if left_out:
        config, root = config | {"ignored_params": left_out}, root | {"ignored_params": left_out}
    for block in blocks:
        fully_shard(block, **config)
    policy = root.get("mp_policy")
    if policy is not None and policy.param_dtype is not None:
        # Only for the root: a block's output is the next one's input, and the model's own inputs may contain a time or
        # a target, which half precision would round.
        output_dtype = None if is_cut(model) else torch.float32
        root = root | {"mp_policy": dataclasses.replace(policy, output_dtype=output_dtype, cast_forward_inputs=False)}
    fully_shard(model, **root)


def refuse_unsupported(models: Mapping[str, nn.Module], world_size: int, *, are_wrapped: bool) -> None:
    owner: dict[int, str] = {}
    for model_name, model in models.items():
        for name, module in model.named_modules(prefix=model_name):
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise ConfigError(
                    f"{name} is built with sparse=True. Sparse gradients have no norm over parameters and ranks: use "
                    "sparse=False."
                )
            if world_size > 1 and isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
                raise ConfigError(
                    f"{name} is built with max_norm={module.max_norm}. On several ranks a forward only renormalises "
                    "its own copy of the rows it looks up. Normalise in the forward instead, or after the step."
                )
        for name, parameter in model.named_parameters(prefix=model_name):
            other = owner.setdefault(id(parameter), name)
            if are_wrapped and other != name:
                raise ConfigError(
                    f"{other} and {name} are one parameter in two models, which fully_shard cannot wrap twice. Put "
                    "both models into one module, assigned to self."
                )


def _refuse_ties_across(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """A parameter lies in one block, or outside all."""
    names = {module: name for name, module in model.named_modules()}
    members = {part for block in blocks for part in block.modules()}
    outside = [p for part in model.modules() if part not in members for p in part.parameters(recurse=False)]
    in_blocks = [(f"block {names.get(block, own_class(block).__name__)!r}", [*block.parameters()]) for block in blocks]
    homes: dict[nn.Parameter, str] = {}
    for home, parameters in (*in_blocks, ("the root", outside)):
        for parameter in parameters:
            if homes.setdefault(parameter, home) != home:
                name = next(name for name, other in model.named_parameters() if other is parameter)
                raise ConfigError(
                    f"{name} is in {homes[parameter]} and in {home}, which are sharded apart and cannot share it. "
                    "Override model_blocks so that one block has both places, or the root."
                )


@contextmanager
def keeping_tied_and_frozen(models: Mapping[str, nn.Module]) -> Iterator[None]:
    """Inside, `parallelize_module` unties parameters and trains frozen ones; afterwards both are as before."""
    slots: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for model_name, model in models.items():
        for prefix, module in model.named_modules(prefix=model_name):
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                slots.setdefault(parameter, []).append((f"{prefix}.{name}", module, name))
    yield
    for parameter, ((first_name, first, name), *others) in slots.items():
        parameter_now = first.get_parameter(name)
        if not parameter.requires_grad:
            parameter_now.requires_grad_(False)
        for other_name, module, alias in others:
            both = parameter_now, module.get_parameter(alias)
            layouts = {(one.device_mesh, one.placements) if is_dtensor(one) else None for one in both}
            if len(layouts) > 1:
                raise ConfigError(
                    f"{first_name} and {other_name} are tied, and the tensor-parallel plan splits them in different "
                    "ways. Split both along the same dimension, or leave both out of the plan."
                )
            module.register_parameter(alias, parameter_now)


def dim_of_part(parameter: object, mesh_dim: str) -> int | None:
    """Along which dimension ranks of `mesh_dim` split it; -1 if each has all of it; None if it is on no such mesh."""
    if not is_dtensor(parameter) or mesh_dim not in (names := parameter.device_mesh.mesh_dim_names or ()):
        return None
    dim = shard_dim(parameter.placements[names.index(mesh_dim)])
    return -1 if dim is None else dim


def move_what_is_whole(model: nn.Module, device: torch.device) -> None:
    """Moves buffers and unsharded parameters to `device`, the compute device of an offloaded model."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if not is_dtensor(parameter):
                parameter.data = parameter.data.to(device)
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules of `model` that `fully_shard` wrapped, outermost first."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def outermost_fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    found = fsdp_modules(model)
    inside = {id(part) for outer in found for part in outer.modules() if part is not outer}  # type: ignore[attr-defined]
    return [module for module in found if id(module) not in inside]


ARE_GATHERED: WeakSet[nn.Module] = WeakSet()  # models whose parameters full copies replace at the moment


@contextmanager
def frozen(*models: nn.Module) -> Iterator[None]:
    """Inside, the parameters of `models` take no gradients; gradients still flow through them to their inputs."""
    wrapped = [module for model in models for module in fsdp_modules(model)]
    parameters = {id(p): p for model in models for p in model.parameters()}
    parameters |= {id(p): p for module in wrapped for p, _ in gathered_twins(module)}
    before = [(p, p.requires_grad) for p in parameters.values()]
    for parameter in parameters.values():
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)
        for module in wrapped:
            for sharded, gathered in gathered_twins(module):
                gathered.requires_grad_(sharded.requires_grad)


class KeepsWeightsInPlace(Changed):
    """A recurrent module that leaves each weight where it is; cuDNN then copies them at every call, and warns once."""

    def flatten_parameters(self) -> None:
        """Does nothing: on CUDA weights would move into one piece of memory, where the next gather finds none."""


def keep_recurrent_weights_in_place(model: nn.Module) -> None:
    """Makes the recurrent modules of `model` fit to be wrapped by `fully_shard`."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            change_class(module, KeepsWeightsInPlace)


def local_indices(tensor: DTensor, dim: int) -> Tensor:
    """The indices along `dim` that this rank has, int64 on the CPU, for every kind of sharding. No communication."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    shape = [1] * tensor.ndim
    shape[dim] = tensor.shape[dim]
    indices = torch.arange(tensor.shape[dim]).view(shape)
    placements = [placement if shard_dim(placement) == dim else Replicate() for placement in tensor.placements]
    sharded = distribute_tensor(indices, tensor.device_mesh, placements, src_data_rank=None)
    return local_tensor(sharded).flatten().cpu()


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient, laid out as the parameter; sums that tensor parallelism left are made."""
    gradient = parameter.grad
    assert gradient is not None
    if is_dtensor(parameter) and is_dtensor(gradient) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_tensor(gradient)


@dataclass(frozen=True)
class Tie:
    """A parameter that several stages of a pipeline share."""

    names: tuple[str, ...]  # all names in the whole model; checkpoints have the first
    ranks: tuple[int, ...]  # those that have a copy, in the order of their first name
    own_name: str | None  # name of this rank's copy in its part of the model; None without one


class Described(NamedTuple):
    names: tuple[str, ...]  # several if it is tied, first that of the stage
    parameter: nn.Parameter | None  # None if it is another stage's
    is_trained: bool  # of another stage's, whether it was when the model was cut
    ndim: int
    numel: int
    is_vector: bool  # has fewer than two dimensions or is the weight of a normalisation
    is_embedding: bool
    block: int  # number of its block, from 1; 0 outside them


class _Cut(NamedTuple):
    ties: Sequence[Tie]
    whole: Sequence[Described]


_cut: WeakKeyDictionary[nn.Module, _Cut] = WeakKeyDictionary()


def is_held(name: str, names: Collection[str]) -> bool:
    """Whether `names` has `name`, or a part around it."""
    return any(name == held or name.startswith(f"{held}.") for held in names)


def ties_of(model: nn.Module, stages: Sequence[Collection[str]], ranks: Sequence[int], own_rank: int) -> list[Tie]:
    """The parameters of `model`, which is still whole, that more than one rank will have."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    ties = []
    for of_one in names.values():
        holders: dict[int, str] = {}
        for name in of_one:
            rank = next(rank for rank, held in zip(ranks, stages, strict=True) if is_held(name, held))
            holders.setdefault(rank, name)
        if len(holders) > 1:
            ties.append(Tie(tuple(of_one), tuple(holders), holders.get(own_rank)))
    return ties


def remember_cut(model: nn.Module, ties: Sequence[Tie], blocks: Sequence[nn.Module]) -> None:
    """Records what is known of `model` before other stages' layers are removed from it."""
    _cut[model] = _Cut(ties, [one._replace(parameter=None) for one in describe(model, blocks)])


def is_cut(model: nn.Module) -> bool:
    """Whether this rank only has some stages' layers of `model`, not all."""
    return model in _cut


def ties_in(model: nn.Module) -> Sequence[Tie]:
    """The parameters that several stages share, in the same order on all ranks; empty without stages."""
    return _cut[model].ties if model in _cut else ()


def whole_of(model: nn.Module) -> Sequence[Described] | None:
    """The parameters of the whole model that `model` is a part of; None without stages."""
    return _cut[model].whole if model in _cut else None


def describe(model: nn.Module, blocks: Sequence[nn.Module]) -> list[Described]:
    """All parameters of `model`, each once, in the order of `parameters()`."""
    vectors = {id(p) for p in model.parameters() if p.ndim < 2} | _owned(model, nn.LayerNorm | nn.RMSNorm)
    embeddings = _owned(model, nn.Embedding | nn.EmbeddingBag)
    block_of = {id(p): number for number, block in enumerate(blocks, start=1) for p in block.parameters()}
    return [
        Described(
            names, p, p.requires_grad, p.ndim, p.numel(), id(p) in vectors, id(p) in embeddings, block_of.get(id(p), 0)
        )
        for names, p in named_with_ties(model)
    ]


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


def names_in_whole(model: nn.Module) -> Mapping[str, tuple[str, ...]]:
    """Maps `model`'s names of tied parameters to all their names in the whole model; empty without stages."""
    return {tie.own_name: tie.names for tie in ties_in(model) if tie.own_name is not None}
