"""From meta to real, after sharding: each rank replays one tensor at a time in full and keeps its own part. Before that
the default `init_weights` runs on the tape, if the user defines none; children before parents.

1. A module built on meta before the recording, with untouched tensors, gets its `reset_parameters()`.
2. A module with an `init_weights()` without arguments gets it called, unless it has had it (in `post_init` or
   its constructor), or has weights that were given rather than drawn.

`remember` notes, before sharding, which recorded tensor each one is. `materialize` finds the places again, from the
owning module or the name (a stage may be a copy). Ranks do not communicate: all replay the same bits."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dream_trainer.compat.pytorch import (
    is_dtensor,
    local_tensor,
    reset_attention_parameters,
    second_lists,
    share_hooks,
    without_torch_function,
)
from dream_trainer.errors import InitError
from dream_trainer.meta.tape import Ref, Tape


@runtime_checkable
class HasInitWeights(Protocol):
    def init_weights(self) -> None: ...


@runtime_checkable
class HasResetParameters(Protocol):
    def reset_parameters(self) -> None: ...


@runtime_checkable
class HasPostInit(Protocol):  # a model of transformers: its constructor ends with `post_init()`
    def post_init(self) -> None: ...


def default_init(model: nn.Module, tape: Tape) -> None:
    """Initialises parameters left by the constructor of `model`, built by this tape or on meta before it."""
    children_first = [*reversed(list(model.modules()))]
    with torch.no_grad(), tape.recording():
        for module in children_first:
            tensors = chain(module.parameters(recurse=False), module.buffers(recurse=False))
            with without_torch_function():
                is_done = not any(tensor.is_meta and tape.is_untouched(tape.ref(tensor)) for tensor in tensors)
            if is_done:
                continue
            if isinstance(module, (nn.MultiheadAttention, nn.Transformer)):
                reset_attention_parameters(module)
            elif isinstance(module, HasResetParameters):
                module.reset_parameters()
        for module in children_first:
            if isinstance(module, HasInitWeights) and not _has_had_it(module, tape):
                module.init_weights()


def _has_had_it(module: HasInitWeights, tape: Tape) -> bool:
    """Whether `init_weights` must not be called: its work is done, or it cannot be called."""
    assert isinstance(module, nn.Module)
    if isinstance(module, HasPostInit) or module in tape.initialised:
        return True
    # Inner modules often take arguments here (`init_weights(std)`), and are called by their parent.
    arguments = inspect.signature(module.init_weights).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(p.default is p.empty and p.kind not in variadic for p in arguments):
        return True
    with without_torch_function():
        parameters = list(module.parameters())
        tracked = [tape.ref(p) for p in parameters if p.is_meta and tape.knows(p)]
        return bool(parameters and not tracked) or any(map(tape.is_given, tracked))


# -- What a build leaves behind.


_OF_MODULES = frozenset(vars(nn.Module()))


def refuse_lazy(models: Mapping[str, nn.Module]) -> None:
    for module, _, full_name, tensor in _tensors(models, _named_tensors):
        if is_lazy(tensor):
            name, _, _ = full_name.rpartition(".")
            raise InitError(
                f"self.{name} ({type(module).__name__}) has parameters without a shape, so it cannot be sharded. "
                "Give its constructor the sizes, or call the model once on an example batch in configure_models."
            )


def refuse_hidden(roots: Mapping[str, Any]) -> None:
    """Refuses modules and tensors on meta that are reached by attributes, and not as children of a module."""
    known = {id(part) for root in roots.values() if isinstance(root, nn.Module) for part in root.modules()}
    seen: set[int] = set()
    for root_name, root in roots.items():
        parts = root.named_modules(prefix=root_name) if isinstance(root, nn.Module) else [(root_name, root)]
        for name, part in parts:
            if isinstance(part, torch.jit.ScriptModule):
                continue  # it keeps the module that it was made from, and does not compute with it
            values = children_of(name, part) if isinstance(part, nn.Module) else [(name, part)]
            for place, found in chain.from_iterable(_reached(*value, known, seen) for value in values):
                if isinstance(found, Tensor) and not isinstance(root, nn.Module):
                    continue  # an optimizer over a trainer's list of parameters is refused later, with its name
                what = f"a {type(found).__name__}" if isinstance(found, nn.Module) else "a tensor"
                raise InitError(
                    f"self.{place} holds {what} that no module has as its own, so it stayed on the meta device. Assign "
                    "it to the module or to the trainer; nn.ModuleList and nn.ModuleDict hold several."
                )


def _reached(name: str, value: Any, known: set[int], seen: set[int]) -> Iterator[tuple[str, Any]]:
    if value is None or id(value) in seen or isinstance(value, str | bytes | int | float | type | ModuleType):
        return
    seen.add(id(value))
    if isinstance(value, Tensor | nn.Module):
        tensors = (value,) if isinstance(value, Tensor) else (*value.parameters(), *value.buffers())
        if id(value) not in known and any(tensor.is_meta for tensor in tensors):
            yield name, value
        return
    for child_name, child in children_of(name, value):
        yield from _reached(child_name, child, known, seen)


def children_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{name}[{index}]", child) for index, child in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", child) for key, child in value.items())
    elif isinstance(value, partial):
        yield from ((f"{name}.{part}", getattr(value, part)) for part in ("func", "args", "keywords"))
    elif isinstance(value, MethodType):
        yield f"{name}.__self__", value.__self__
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # it is empty
                yield f"{name}.<closure>", cell.cell_contents
    else:
        passed_over = _OF_MODULES if isinstance(value, nn.Module) else ()
        attributes = getattr(value, "__dict__", {})
        yield from ((f"{name}.{key}", child) for key, child in list(attributes.items()) if key not in passed_over)


@dataclass(frozen=True, slots=True)
class _Note:
    """The target of one meta tensor, and its name for errors."""

    ref: Ref
    name: str
    is_parameter: bool


@dataclass(slots=True)
class Plan:
    """The result of `remember`: how to replay each meta tensor of the models, and every parameter's name."""

    tape: Tape
    by_owner: dict[tuple[nn.Module, str], _Note] = field(default_factory=dict)
    by_name: dict[str, _Note] = field(default_factory=dict)
    attributes: list[tuple[Tensor, _Note]] = field(default_factory=list)
    values: Replay = field(default_factory=lambda: Replay())
    parameters: dict[int, tuple[Callable[[], Tensor | None], str]] = field(default_factory=dict)


class Replay:
    """How tensors become real."""

    def fill(self, group: list[MetaPlace], tape: Tape, device: torch.device) -> None:
        """Replays one storage and gives every tensor that looks at it its values."""
        storage, used_uninitialised = tape.replay(group[0].note.ref)
        for place in group:
            _check(place, place.note.ref.view(storage), used_uninitialised, tape)
        plain = [place for place in group if place.part is None]
        shared: torch.UntypedStorage | None = None
        refs = [place.note.ref for place in plain]
        if len(refs) > 1 or any(ref.size.numel() * ref.dtype.itemsize == storage.nbytes() for ref in refs):
            shared = storage
            if device.type != "cpu":
                shared = torch.empty(0, dtype=torch.uint8).set_(storage).to(device).untyped_storage()
        for place in group:
            full = place.note.ref.view(storage)
            if place.part is not None:
                fill(place.part, full)
                put(place, place.part)
            elif shared is not None:
                put(place, place.note.ref.view(shared))
            else:
                values = torch.empty_strided(full.size(), full.stride(), dtype=full.dtype, device=device)
                put(place, values.copy_(full))

    def settle(self, model: nn.Module, device: torch.device) -> None:
        """Also lets FSDP and recurrent modules take note of their new parameters."""
        model.to(device)


@dataclass(slots=True)
class MetaPlace:
    """One tensor object that is on meta now, every slot of a module that holds it, and room for this rank's part."""

    tensor: Tensor
    note: _Note
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)
    part: Tensor | None = None


def remember(models: Mapping[str, nn.Module], tape: Tape) -> Plan:
    """Notes which recorded tensor every parameter, buffer and tensor attribute on meta is, before anything shards."""
    plan = Plan(tape)
    for module, name, full_name, tensor in _tensors(models, _named_tensors):
        if isinstance(tensor, nn.Parameter):
            # One on meta takes no room, and could not be swapped for a real one if it was referred to weakly.
            kept = partial(lambda one: one, tensor) if tensor.is_meta else weakref.ref(tensor)
            plan.parameters.setdefault(id(tensor), (kept, full_name))
        if tensor.is_meta:
            note = _Note(tape.ref(tensor), full_name, isinstance(tensor, nn.Parameter))
            plan.by_owner.setdefault((module, name), note)
            plan.by_name[plain_name(full_name)] = note
    for _, _, full_name, tensor in _tensors(models, _attributes):
        if tensor.is_meta:
            note = _Note(tape.ref(tensor), full_name, isinstance(tensor, nn.Parameter))
            plan.attributes.append((tensor, note))
    return plan


@torch.no_grad()
def materialize(models: Mapping[str, nn.Module], plan: Plan, device: torch.device | str) -> None:
    """Makes every tensor of the models real, on `device`; sharded parameters get this rank's part. Parameters keep
    their identity, save where a weak reference to them exists; shared memory stays shared."""
    device = torch.device(device)
    _refuse_left_behind(models, plan)
    places = _places(models, plan)
    by_storage: dict[int, list[MetaPlace]] = {}
    for place in places:
        if is_dtensor(place.tensor):
            # All parts before any full tensor: interleaved, the heap kept holes worth 25% of the shard.
            place.part = torch.empty_like(place.tensor, device=device)
        by_storage.setdefault(place.note.ref.storage, []).append(place)
    for group in by_storage.values():
        plan.values.fill(group, plan.tape, device)
    for model in models.values():
        plan.values.settle(model, device)


def _refuse_left_behind(models: Mapping[str, nn.Module], plan: Plan) -> None:
    """Refuses attributes that hold what was a parameter until sharding put another in its place."""
    now = {id(parameter) for model in models.values() for parameter in model.parameters()}
    for _, _, full_name, tensor in _tensors(models, _attributes):
        kept, former = plan.parameters.get(id(tensor), (None, ""))
        if kept is not None and kept() is tensor and id(tensor) not in now:
            raise InitError(
                f"{full_name} holds the parameter {former} a second time, as it was before sharding, and would not be "
                "trained. Keep its name there, and use get_parameter(name)."
            )


def _places(models: Mapping[str, nn.Module], plan: Plan) -> list[MetaPlace]:
    """Every distinct tensor object on meta; non-leaf attributes first, whose graphs would hold on to parameters."""
    places: dict[int, MetaPlace] = {}
    for module, name, full_name, tensor in _tensors(models, _named_tensors):
        if not tensor.is_meta:
            continue
        note = plan.by_owner.get((module, name)) or plan.by_name.get(plain_name(full_name))
        if note is None or note.ref.size != tensor.shape:
            raise InitError(
                f"{full_name} is on the meta device and is not what configure_models() left there. "
                "Create and reshape parameters in configure_models(); parallelise without replacing them."
            )
        place = places.setdefault(id(tensor), MetaPlace(tensor, note))
        if (module, name) not in place.slots:
            place.slots.append((module, name))
    attributes: dict[int, MetaPlace] = {}
    for tensor, note in plan.attributes:
        if tensor.is_meta and id(tensor) not in places:
            attributes.setdefault(id(tensor), MetaPlace(tensor, note))
    plan.attributes.clear()  # a second reference to a tensor would forbid swapping it
    plan.by_owner.clear()
    return [*attributes.values(), *places.values()]


def _check(place: MetaPlace, full: Tensor, used_uninitialised: bool, tape: Tape) -> None:
    """Refuses parameters (and buffers whose constructor ran outside the tape) that hold no chosen values."""
    if full.numel() == 0 or not used_uninitialised:
        return
    name = place.note.name
    if place.note.is_parameter:
        # A sum is NaN if any element is, and needs no memory; infinities of both signs make it NaN too.
        if tape.is_untouched(place.note.ref) or (full.sum().isnan() and full.isnan().any()):
            raise InitError(
                f"Parameter {name} has uninitialised values. Set all of them in its module's constructor or "
                "in init_weights()."
            )
    elif place.note.ref.storage in tape.foreign and tape.is_untouched(place.note.ref):
        raise InitError(
            f"Buffer {name} was computed on the meta device before configure_models(), so its values are lost. "
            "Build the model inside configure_models(), or fill the buffer in init_weights()."
        )


@torch.no_grad()
def fill(tensor: Tensor, full: Tensor) -> None:
    """Gives a tensor, however it is sharded, its part of the values of `full`, which every rank has in whole."""
    if not is_dtensor(tensor):
        tensor.copy_(full)
        return
    from torch.distributed.tensor import distribute_tensor

    on_mesh = full.to(tensor.device_mesh.device_type, tensor.dtype)
    cut = distribute_tensor(on_mesh, tensor.device_mesh, tensor.placements, src_data_rank=None)
    local_tensor(tensor).copy_(local_tensor(cut))


def put(place: MetaPlace, real: Tensor) -> None:
    """Turns a meta tensor into `real`: the same object if PyTorch can, otherwise in the same slots."""
    old = place.tensor
    place.tensor, place.part = real, None  # no second reference to either, or they cannot be swapped
    if isinstance(old, nn.Parameter) and not isinstance(real, nn.Parameter):
        real = nn.Parameter(real, requires_grad=old.requires_grad)
        real.__class__ = old.__class__
    elif old.is_leaf:
        real.requires_grad_(old.requires_grad)
    vars(real).update(vars(old))
    try:
        torch.utils.swap_tensors(old, real)
        share_hooks(old, old)
    except RuntimeError:
        if not place.slots:
            raise InitError(
                f"{place.note.name} cannot be made real in place: something else refers to it weakly or in a graph. "
                "Make it a buffer, or detach it."
            ) from None
        for module, name in place.slots:
            setattr(module, name, real)


def _tensors(
    models: Mapping[str, nn.Module], of_module: Callable[[nn.Module], Iterator[tuple[str, Tensor]]]
) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    """What `of_module` gives of every module: the module, the tensor's name in it and in whole, and the tensor."""
    for model_name, model in models.items():
        for prefix, module in model.named_modules(prefix=model_name, remove_duplicate=False):
            for name, tensor in of_module(module):
                yield module, name, f"{prefix}.{name}", tensor


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors in the module's other attributes, in lists, tuples and dicts too."""
    passed_over = ("_parameters", "_buffers", "_modules", *second_lists(module))
    for name, value in vars(module).items():
        if name not in passed_over:
            yield from _nested(name, value)


def _nested(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, list | tuple | dict):
        for child_name, child in children_of(name, value):
            yield from _nested(child_name, child)


def plain_name(fqn: str) -> str:
    """A parameter's name without what compilation and activation checkpointing add to it."""
    return fqn.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
