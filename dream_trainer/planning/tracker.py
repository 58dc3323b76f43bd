"""Tracker: the bytes that live on a rank, of what kind and made by which module, and its collectives."""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from dream_trainer.compat.lone_rank import (
    FakeTensor,
    TorchDispatchMode,
    is_traceable_wrapper_subclass_type,
    name_of_group,
    ranks_of_group,
    without_propagation,
)
from dream_trainer.compat.pytorch import in_backward, local_tensor, name_of_operation, storage_id
from dream_trainer.nested import leaves
from dream_trainer.users_code import line_running_in

TEMPORARIES = "temporaries"  # made in backward or by the optimizer, and of no other kind


@dataclass(slots=True, eq=False)
class Piece:
    """Bytes that lived between two ticks, and their purpose, which may be found out later."""

    n_bytes: int
    kind: str
    module: str
    born: int
    died: float = math.inf


@dataclass(frozen=True)
class Crossing:
    """What one collective over the ranks of some dimensions does in a step."""

    operation: str
    dimensions: str
    ranks: int
    calls: int
    n_bytes: int  # of whole tensors: gathered, before they are scattered, or reduced
    sent: int  # by this rank, if a collective is a ring
    hosts: int  # on which the ranks are


@dataclass(frozen=True, kw_only=True)
class StepMeasure:
    """A step on one rank."""

    peak: int
    at_peak: dict[str, int]  # bytes at the peak by kind
    modules: dict[str, int]  # bytes at the peak by the module that made them, or whose parameters they belong to
    traffic: list[Crossing]
    flops: int  # of matrix products and attention, with what is computed again
    read: dict[str, int]  # lines that asked a tensor for its value, with the number of times


class Tracker(TorchDispatchMode):
    """Follows the storages of tensors that operations make while it is on."""

    _is_paused = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, Piece] = {}  # by storage
        self._pieces: list[Piece] = []  # also those that have died in this window
        self._tick = self._total = self._peak = self._peak_at = self._flops = 0
        self._sent = defaultdict[tuple[str, str], list[int]](list)  # bytes of each call, by operation and group
        self._read = Counter[str]()
        self._names: dict[int, str] = {}
        self._inside: list[str] = []
        self.is_users_turn = False  # whether the user's step runs, and nothing that it has called of ours to step

    # -- what lives

    def mark(self, tensors: Iterable[Any], kind: str, module: str | None = None) -> None:
        """Says what tensors are for, from their birth on."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                piece = self._note(local_tensor(tensor), kind)
                piece.kind = kind
                piece.module = piece.module if module is None else module

    def module_of(self, tensor: Tensor) -> str | None:
        """Of a tensor that lives."""
        return self._alive[key].module if (key := storage_id(local_tensor(tensor))) in self._alive else None

    def _note(self, tensor: Tensor, kind: str) -> Piece:
        storage, key = tensor.untyped_storage(), storage_id(tensor)
        if key not in self._alive:
            self._add(key, storage.nbytes(), kind, self._inside[-1] if self._inside else "")
            weakref.finalize(storage, self._remove, key).atexit = False
        return self._alive[key]

    def _add(self, key: int, n_bytes: int, kind: str, module: str) -> None:
        self._tick += 1
        self._alive[key] = Piece(n_bytes, kind, module, self._tick)
        self._pieces.append(self._alive[key])
        self._total += n_bytes
        if self._total > self._peak:
            self._peak, self._peak_at = self._total, self._tick

    def _remove(self, key: int) -> Piece:
        piece = self._alive.pop(key)
        piece.died = self._tick
        self._total -= piece.n_bytes
        return piece

    # -- one window

    @contextmanager
    def window(self, modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
        """Inside, counts what `measured` returns."""
        self._names = {id(part): path for path, part in modules}
        for counted in (self._sent, self._read, self._inside):
            counted.clear()
        self._pieces = [*self._alive.values()]
        self._peak, self._peak_at, self._flops = self._total, self._tick, 0
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if (key := storage_id(storage)) in self._alive:
                before = self._remove(key)
                self._add(key, storage.nbytes(), before.kind, before.module)

        with ExitStack() as stack:
            # FSDP frees and remakes parameters by resizing their storages, which no mode sees.
            stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_))
            stack.enter_context(without_propagation(partial(patch.object, self, "_is_paused", new=True)))
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            stack.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            stack.enter_context(self)
            yield

    def measured(self, world: Any) -> StepMeasure:
        """The last window."""
        kinds, modules = Counter[str](), Counter[str]()
        for piece in self._pieces:
            if piece.born <= self._peak_at <= piece.died:
                kinds[piece.kind] += piece.n_bytes
                modules[piece.module] += piece.n_bytes
        traffic = [_crossing(world, *key, sent) for key, sent in self._sent.items()]
        return StepMeasure(
            peak=self._peak,
            at_peak=dict(kinds),
            modules=dict(modules),
            traffic=sorted(traffic, key=lambda row: (row.dimensions, row.operation)),
            flops=self._flops,
            read={line: times for line, times in self._read.items() if line},
        )

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside.append(self._names.get(id(module), self._inside[-1] if self._inside else ""))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside.pop()

    # -- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(is_traceable_wrapper_subclass_type, types)):  # runs the operation on what it wraps
            return NotImplemented
        if self._is_paused:
            return func(*args, **kwargs)
        namespace, name = name_of_operation(func) or ("", "")
        has_none = bool(args) and isinstance(args[0], FakeTensor)
        if has_none and namespace == "aten" and name in ("_local_scalar_dense", "equal"):
            return self._answer(name, args[0])
        # Without values what is waited for would be another tensor.
        result = args[0] if has_none and name == "wait_tensor" else func(*args, **kwargs)
        if namespace in ("c10d", "_c10d_functional", "fsdp"):
            self._note_communication(namespace, name, args, kwargs, result)
        if (count := _FLOPS.get(name) if namespace == "aten" else None) is not None:
            self._flops += count(*args, **kwargs, out_val=result)
        is_forward = self.is_users_turn and (self._inside or not in_backward())
        kind = "activations" if is_forward else TEMPORARIES
        for tensor in leaves(result):
            if isinstance(tensor, Tensor) and not (tensor.is_meta or is_traceable_wrapper_subclass_type(type(tensor))):
                self._note(tensor, kind)
        return result

    def _answer(self, name: str, tensor: Tensor) -> float | int | bool:
        """A value of a tensor that has none: 1, False, and that two tensors are equal."""
        if self.is_users_turn:
            self._read[line_running_in(sys._current_frames()[threading.get_ident()])] += 1
        if name == "equal":
            return True
        return False if tensor.dtype is torch.bool else 1.0 if tensor.is_floating_point() else 1

    def _note_communication(self, namespace: str, name: str, args: Any, kwargs: Any, result: Any) -> None:
        given = [tensor for tensor in leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        if namespace == "fsdp":  # copies between parameters and what is sent
            self._are_for_communication(kwargs.get("out", result))
            if name == "chunk_cat":
                self.mark(leaves(args[0]), "gradients")
            return
        group = name_of_group(args)
        if group is None or name in ("wait_tensor", "barrier"):
            return
        self._are_for_communication(given, result)
        operation, whole = _COLLECTIVES.get(name, (name.strip("_"), lambda given, result: given))
        self._sent[operation, group].append(sum(tensor.nbytes for tensor in leaves(whole(given, result))))

    def _are_for_communication(self, *tensors: Any) -> None:
        for tensor in leaves(tensors):
            if isinstance(tensor, Tensor):
                piece = self._note(tensor, "communication")
                piece.kind = "communication" if piece.kind in ("activations", TEMPORARIES) else piece.kind


def _shapes(query: Tensor, *others: Tensor) -> Iterator[tuple[int, ...]]:
    """As if each head of the query had keys of its own: PyTorch 2.11 counts no grouped ones."""
    return ((*query.shape[:2], *each.shape[2:]) for each in (query, *others))


_ATTENTION = "_scaled_dot_product_flash_attention"
_FLOPS: dict[str, Callable[..., int]] = {
    **{name[1]: count for packet, count in flop_registry.items() if (name := name_of_operation(packet)) is not None},
    f"{_ATTENTION}_for_cpu": lambda q, k, v, *_, **__: sdpa_flop_count(*_shapes(q, k, v)),
    f"{_ATTENTION}_for_cpu_backward": lambda d, q, k, v, *_, **__: sdpa_backward_flop_count(d.shape, *_shapes(q, k, v)),
}
# Their names here, and the whole tensors of what is given to them and what they return.
_COLLECTIVES: dict[str, tuple[str, Callable[[list[Tensor], Any], Any]]] = {
    "_allgather_base_": ("all_gather", lambda given, result: given[0]),
    "_reduce_scatter_base_": ("reduce_scatter", lambda given, result: given[1]),
    "alltoall_base_": ("all_to_all", lambda given, result: given[1]),
    "allreduce_": ("all_reduce", lambda given, result: given),
    "broadcast_": ("broadcast", lambda given, result: given),
    "all_gather_into_tensor": ("all_gather", lambda given, result: result),
    "reduce_scatter_tensor": ("reduce_scatter", lambda given, result: given[0]),
    "all_to_all_single": ("all_to_all", lambda given, result: given[0]),
    "recv_": ("receive", lambda given, result: given),
}
_SHARES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def _crossing(world: Any, operation: str, group: str, calls: list[int]) -> Crossing:
    ranks, n_bytes = ranks_of_group(group), sum(calls)
    n, hosts = len(ranks), len({*map(world.host_of, ranks)})
    share = _SHARES[operation] * (n - 1) / n if operation in _SHARES else float(operation != "receive")
    return Crossing(operation, _dimensions(world, ranks), n, len(calls), n_bytes, round(share * n_bytes), hosts)


def _dimensions(world: Any, ranks: list[int]) -> str:
    """The mesh dimensions along which ranks differ."""
    names, step = list[str](), world.world_size
    for name, size in world.mesh_shape._asdict().items():
        step //= size
        different = len({rank // step % size for rank in ranks})
        if different > 1:
            names.append(name if different == size else f"{name} ({different} of {size})")
    return " x ".join(names)
