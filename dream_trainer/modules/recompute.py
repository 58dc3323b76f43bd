"""Activation checkpointing in place: non-reentrant, and selective at the level of operations (arXiv:2205.05198)."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

from dream_trainer.compat.pytorch import StopRecomputation, function_modes, operation
from dream_trainer.errors import StepError
from dream_trainer.modules.class_change import Changed, change_class, own_class
from dream_trainer.modules.forward_state import Key, containers_in, content_of, fill, noted, put_back, tensors_in


class Recomputed(Changed):
    """Keeps the inputs of its forward, and computes the rest again in backward."""

    _contexts: Any = None  # makes the pair of contexts of selective checkpointing
    _moves: Moves | None = None  # what its forwards write into; known from the first on
    block_name = ""  # its name in errors; the name of its class if it is empty

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, checkpointed if a backward can follow."""
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # a compiled one is traced once for both runs
            if self._contexts is not None:
                kwargs["context_fn"] = self._contexts
            return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)
        if self._moves is None:
            self._moves = Moves()
        call = BlockCall(self, super().forward, (args, kwargs), self._moves)
        saves_too_early = any(isinstance(module, nn.RReLU) for module in self.modules())  # and then draws its noise
        with set_checkpoint_early_stop(not call.is_watched and not saves_too_early):
            output = checkpoint(call.run, *args, use_reentrant=False, context_fn=call.contexts, **kwargs)
        call.has_run(output)
        return output


class BlockCall:
    """One call of a block: its first run, and a second one, as if at the same time, in each backward through it."""

    last: ClassVar[weakref.ref[Recomputed] | None] = None  # the block of this process that was computed again last

    def __init__(self, block: Recomputed, forward: Callable[..., Any], given: Any, moves: Moves) -> None:
        self._block, self._forward = block, forward
        self._state = BlockState(block, given, moves)
        self.is_watched = self._state.is_new  # the first in these modes, whose second run has to give the same
        self._flags = [(parameter, parameter.requires_grad) for parameter in block.parameters()]
        self._modes = function_modes()  # backward runs without
        self._python = random.getstate()  # of torch's it is kept already
        self._inner: Any = None
        self._expected: list[tuple[Tensor, int]] | None = None  # what the first run gave, if it is watched
        self._found: list[tuple[Tensor, int]] | None = None
        self._again: ExitStack | None = None

    def contexts(self) -> tuple[Any, Any]:
        """The contexts of the first and of each second run."""
        selective = self._block._contexts
        first, self._inner = (nullcontext(), nullcontext()) if selective is None else selective()
        return first, self

    def run(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        if self._again is not None and self._expected is not None:
            self._found = _values(output)
        return output

    def has_run(self, output: Any) -> None:
        self._state.look(named(self._block))
        self._state.let_graphs_go()
        if self.is_watched:
            self._expected = _values(output)

    def __enter__(self) -> None:
        BlockCall.last = weakref.ref(self._block)
        self._found = None
        with ExitStack() as stack:
            for parameter, required in self._flags:
                if parameter.requires_grad is not required:
                    parameter.requires_grad_(required)
                    stack.callback(parameter.requires_grad_, not required)
            stack.callback(random.setstate, random.getstate())
            random.setstate(self._python)
            stack.callback(put_back, self._state.put_in_place())
            for mode in self._modes[len(function_modes()) :]:
                stack.enter_context(mode)
            stack.enter_context(self._inner)
            self._again = stack.pop_all()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        assert self._again is not None
        stack, self._again = self._again, None
        stack.__exit__(kind, error, trace)
        if error is not None:
            if not isinstance(error, StopRecomputation):
                error.add_note(f"This was raised while {named(self._block)} was computed again. {_REMEDY}")
        elif self._expected is not None and self._found is not None:
            expected, self._expected = self._expected, None  # once
            if not _are_close(expected, self._found):
                raise StepError(f"{named(self._block)} gives other numbers when it is computed again. {_REMEDY}")


_REMEDY = (
    "Under activation checkpointing a backward runs a block's forward again. Take from and add to lists outside of the "
    "block, draw random numbers from PyTorch's or Python's global generator, or override "
    "apply_activation_checkpointing to leave this block out."
)


def mismatch(error: Exception) -> StepError:
    """Our error for PyTorch's, that a second run saved something else than the first."""
    block = None if BlockCall.last is None else BlockCall.last()
    name = "a block" if block is None else named(block)
    return StepError(f"{name} does something else when it is computed again: {str(error).splitlines()[0]} {_REMEDY}")


def named(block: Recomputed) -> str:
    name = own_class(block).__name__
    return f"{block.block_name} ({name})" if block.block_name else f"a block of class {name}"


def _values(output: Any) -> list[tuple[Tensor, int]]:
    """The tensors that a block gave, and how often each has been written to."""
    return [(tensor.detach(), tensor._version) for tensor in tensors_in(output)]


@torch.no_grad()
def _are_close(expected: Sequence[tuple[Tensor, int]], found: Sequence[tuple[Tensor, int]]) -> bool:
    """Whether all are the same within rounding: some kernels of GPUs add in another order each time."""
    if len(expected) != len(found):
        return False
    for (one, version), (other, _) in zip(expected, found, strict=True):
        if one._version != version:
            continue  # the model has written into it since
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if torch.equal(one, other) or not one.numel():  # which plans and DTensors know, and not `allclose`
            continue
        if not one.is_floating_point():
            return False
        missed = (one - other).masked_fill(one.isnan() & other.isnan(), 0).abs().max()
        if not missed <= torch.finfo(one.dtype).eps ** 0.5 * one.abs().nan_to_num(posinf=0.0).max():
            return False
    return True


def recompute(module: nn.Module, keep: Sequence[str] = (), name: str = "") -> None:
    if isinstance(module, Recomputed):
        return
    contexts = None
    if keep:
        operations = [op for name in keep if (op := operation(name)) is not None]
        contexts = staticmethod(partial(create_selective_checkpoint_contexts, operations))
    change_class(module, Recomputed, key=tuple(keep), _contexts=contexts)
    cast("Recomputed", module).block_name = name


# -- State that a block's forward may change besides gradients. Each call notes attributes, buffers, lists and dicts,
# and copies the tensors that a forward writes into.


class Moves:
    """Observed writes of one block's forwards."""

    def __init__(self) -> None:
        self.written: set[Key] = set()  # attributes and buffers that hold tensors which a forward writes into
        self.modes: set[tuple[bool, ...]] = set()  # the observed train/eval modes of the block's modules
        self.versions: dict[Key, int] = {}  # writes to each other one by the end of the last forward


class BlockState:
    def __init__(self, block: nn.Module, given: Any, moves: Moves) -> None:
        self._moves = moves
        modules = list(block.modules())
        self._contents, self._noted = noted(modules)
        self._modes = tuple([module.training for module in modules])
        self._versions = [tensor._version for _, tensor in self._noted]
        self.is_new = self._modes not in moves.modes or any(
            key not in moves.written and moves.versions.get(key) != version
            for (key, _), version in zip(self._noted, self._versions, strict=True)
        )
        self._copies = {id(tensor): _copy(tensor) for key, tensor in self._noted if self.is_new or key in moves.written}
        self._n_own = len(self._contents)
        self._contents += [(container, content_of(container)) for container in containers_in(given)]

    def look(self, block: str) -> None:
        """Notes what the forward since then has written into; waits for the device if that is not known yet."""
        moves = self._moves
        for (key, tensor), version in zip(self._noted, self._versions, strict=True):
            if key in moves.written:
                continue
            if self.is_new:
                if tensor._version != version or not _is_same(tensor, self._copies[id(tensor)]):
                    moves.written.add(key)
            elif tensor._version != version:
                raise StepError(
                    f"{block} wrote into {key[1]!r}, but its first forwards did not, so its former content is lost. "
                    "Resume from the last checkpoint, or leave this block out of activation checkpointing."
                )
        moves.modes.add(self._modes)
        moves.versions = {key: tensor._version for key, tensor in self._noted if key not in moves.written}
        written = {id(tensor) for key, tensor in self._noted if key in moves.written}
        self._copies = {number: copy for number, copy in self._copies.items() if number in written}

    def let_graphs_go(self) -> None:
        """Keeps only the values of tensors that earlier forwards left on modules, since their graphs hold memory."""
        own = self._contents[: self._n_own]
        values = (value for _, content in own for value in (content.values() if isinstance(content, dict) else content))
        graphs = [value for value in values if isinstance(value, Tensor) and value.grad_fn is not None]
        if graphs:
            bare = {id(value): value.detach().requires_grad_(value.requires_grad) for value in graphs}
            self._contents[: self._n_own] = [(container, _replaced(content, bare)) for container, content in own]

    def put_in_place(self) -> list[tuple[Any, Any]]:
        """Puts a copy of this state in the block's place; gives what was there, for `put_back`."""
        before = [(container, content_of(container)) for container, _ in self._contents]
        fresh = {number: _copy(copy) for number, copy in self._copies.items()}
        for container, content in self._contents:
            fill(container, _replaced(content, fresh) if fresh else content)
        return before


def _replaced(content: Any, fresh: Mapping[int, Tensor]) -> Any:
    if isinstance(content, dict):
        return {name: fresh.get(id(value), value) for name, value in content.items()}
    return content if isinstance(content, set) else [fresh.get(id(value), value) for value in content]


@torch.no_grad()
def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _is_same(tensor: Tensor, copy: Tensor) -> bool:
    return tensor.shape == copy.shape and tensor.dtype == copy.dtype and torch.equal(tensor, copy)
