"""The tape: runs model-building code for real, except that large and empty tensors stay on meta and are recorded.

To the code that runs, the meta tensors look like CPU tensors; when it asks one for values, the calls behind it are
replayed on the spot. Not deferred or not replayed:

- `torch.Tensor(n, m)`, the legacy constructor, allocates for real.
- `torch.manual_seed` inside a recording seeds real draws only; `generator=` is honoured exactly.
- Storages written behind torch's back (`numpy`, `from_dlpack`): the arrays handed out are read-only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from dream_trainer.compat.pytorch import of_class_of, storage_id, without_torch_function, write_count
from dream_trainer.distributed.seeds import hash_seed, preserved_random_state, seed_cpu
from dream_trainer.errors import InitError
from dream_trainer.meta.recorded_calls import (
    EMPTY,
    FILLED,
    METADATA,
    OVERWRITES,
    QUIET_WRITES,
    READS,
    Op,
    RecordedCalls,
    Ref,
    map_leaves,
    name_of,
    targets,
    tensor_leaves,
)


class Tape:
    """Records how tensors are made, and makes them later, one at a time, the same bits on every rank."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.history = RecordedCalls(seed)
        self._initialised: WeakSet[nn.Module] = WeakSet()
        self._recordings = 0
        self._is_recording = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Defers and records inside, also when entered again; the real generators are seeded, and restored on exit."""
        if self._is_recording:
            yield
            return
        self._is_recording = True
        self._recordings += 1
        try:
            with preserved_random_state():
                seed_cpu(hash_seed(b"recording", self.seed, self._recordings))
                with Recorder(self.history, self._initialised):
                    yield
        finally:
            self._is_recording = False

    def has_initialised(self, module: nn.Module) -> bool:
        """Whether `module.init_weights()` ran in a recording, and wrote to something: its constructor may call it."""
        return module in self._initialised

    def tracks(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a meta tensor that this tape can replay."""
        with without_torch_function():
            return tensor.is_meta and self.history.knows(tensor)

    def is_untouched(self, tensor: Tensor) -> bool:
        """Whether `tensor` was allocated (here, or on meta before the recording) and never written to."""
        with without_torch_function():
            return tensor.is_meta and self.history.is_untouched(self.history.ref(tensor))

    def is_given(self, tensor: Tensor) -> bool:
        """Whether `tensor`'s values were copied from a real tensor, as loading weights does."""
        with without_torch_function():
            return self.tracks(tensor) and self.history.is_given(self.history.ref(tensor))


LARGE = 1 << 20  # smallest number of elements of a deferred filled tensor: 4 MB in fp32


class Recorder(TorchFunctionMode):
    """Sees every torch call made while it is entered, and keeps in `history` those that deferred tensors need."""

    def __init__(self, history: RecordedCalls, initialised: WeakSet[nn.Module]) -> None:
        super().__init__()
        self.history = history
        self._initialised = initialised

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = [*tensor_leaves(args), *tensor_leaves(kwargs)]
        if any(_is_opaque(leaf) for leaf in leaves):
            return func(*args, **kwargs)
        if name_of(func) in EMPTY or name_of(func) in FILLED:
            return self._factory(func, args, kwargs)
        if any(leaf.is_meta for leaf in leaves):
            return self._tracked(func, args, kwargs)
        result = func(*args, **kwargs)
        is_new_on_meta = isinstance(result, Tensor) and result.is_meta and ("device" in kwargs or not leaves)
        if is_new_on_meta and not _is_empty(result):
            self._append(func, args, {**kwargs, "device": "cpu"}, result, [])  # made under torch.device("meta")
        return result

    def _factory(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Defers a factory's result if it is empty or large, and meant for the CPU."""
        name, like = (name_of(func), next(iter((*tensor_leaves(args), *tensor_leaves(kwargs))), None))
        is_tracked = like is not None and like.is_meta
        device = torch.device(kwargs.get("device") or (torch.get_default_device() if like is None else like.device))
        is_strided = kwargs.get("layout", torch.strided if like is None else like.layout) is torch.strided
        takes_values = name in ("normal", "full") and like is not None
        if takes_values or not is_strided or device.type not in ("cpu", "meta") or kwargs.get("out") is not None:
            return self._tracked(func, args, kwargs) if is_tracked else func(*args, **kwargs)
        on_meta = {key: value for key, value in kwargs.items() if key not in ("generator", "pin_memory")}
        result = func(*map_leaves(_to_meta, args[:1]), *args[1:], **map_leaves(_to_meta, {**on_meta, "device": "meta"}))
        is_asked_for = is_tracked or device.type == "meta"
        if name in FILLED and result.numel() < LARGE and not is_asked_for:
            return func(*args, **kwargs)
        if name in EMPTY:
            self.history.append_source(result)
            if result.numel() == 0 and not is_asked_for:
                return func(*args, **kwargs)  # `torch.load` points it to read data, which cannot be recorded
            return result
        on_cpu = {**kwargs, "device": "cpu"}
        on_cpu.pop("pin_memory", None)
        self._append(func, args, self._with_generators(func, args, on_cpu), result, [])
        return result

    def _tracked(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call that some meta tensor takes part in."""
        name = name_of(func)
        if name in ("__get__", "__set__"):
            return self._property(func, args)
        if name in READS or name in QUIET_WRITES:
            return self._read(func, args, kwargs)
        if name == "cpu":
            return args[0]
        if name == "to":
            kept: dict[str, Any] = {key: kwargs.pop(key) for key in ("copy", "memory_format") if key in kwargs}
            moved = func(*map_leaves(_example, args), **map_leaves(_example, kwargs))
            if moved.device.type not in ("cpu", "meta") or not args[0].is_meta:
                return self._read(func, (args[0], moved.device, moved.dtype), kept)
            if moved.dtype == args[0].dtype and not kept:
                return args[0]
            args, kwargs = (args[0], moved.dtype), kept
        if name == "cuda":
            return self._read(func, args, kwargs)
        if name == "__deepcopy__":
            return self._deepcopy(*args)
        if name in ("data_ptr", "const_data_ptr"):
            return storage_id(args[0]) + args[0].storage_offset() * args[0].element_size()
        if name == "get_device":
            return -1
        if name == "backward":
            raise InitError(
                "backward() cannot run while a model is built on the meta device. Compute gradient-based initial "
                "values in `load_pretrained`, when parameters are real."
            )
        if name in METADATA:
            return func(*args, **kwargs)
        written = targets(func, args, kwargs)
        if any(not target.is_meta for target in written):
            return self._read(func, args, kwargs, written)
        return self._record(func, args, kwargs, written)

    def _property(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Properties alias or describe; those of the device tell what the code would see without the tape."""
        name, tensor = func.__self__.__name__, args[0]
        if name_of(func) == "__set__":
            # A real tensor without elements is such as the parameter of a lazy module, which cannot be asked.
            is_empty = not tensor.is_meta and (is_lazy(tensor) or tensor.numel() == 0)
            if name == "data" and args[1].is_meta and is_empty:
                return torch.utils.swap_tensors(tensor, of_class_of(tensor, args[1]))
            if name == "data" and tensor.is_meta != args[1].is_meta:
                value = self._real(args[1]) if args[1].is_meta else self._given(args[1])
                return func(tensor, value)
            return func(*args)
        # An empty one that is not recorded asks whether `torch.device("meta")` is on, as transformers does.
        if tensor.is_meta and not (_is_empty(tensor) and not self.history.knows(tensor)):
            answers = {"is_meta": False, "is_cpu": True, "device": torch.device("cpu")}
            if name in answers:
                return answers[name]
        return func(*args)

    def _given(self, real: Tensor) -> Tensor:
        """A recorded meta tensor that will replay as a copy of `real`."""
        result: Tensor = _to_meta(real.detach())
        self._append(torch.clone, (real,), {}, result, [])
        return result

    def _real(self, leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.is_meta):
            return leaf
        ref = self.history.ref(leaf)
        self.history.asked[ref.storage] = len(self.history.ops)
        return ref.view(self.history.replay(ref)[0])

    def _read(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[Tensor] = ()
    ) -> Any:
        """Runs a call for real, on replayed values; nothing of it is recorded."""
        if any(target.is_meta for target in written):
            raise InitError(
                f"torch.{name_of(func)} writes to a deferred and to a real tensor at once, which cannot be replayed. "
                "Split it into one call for each."
            )
        result = func(*map_leaves(self._real, args), **map_leaves(self._real, kwargs))
        if name_of(func) in ("numpy", "__array__"):
            result.setflags(write=False)
        return result

    def _deepcopy(self, tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if id(tensor) not in memo:
            with torch.no_grad():
                copied = self._record(torch.Tensor.clone, (tensor,), {}, [])
            copied.requires_grad_(tensor.requires_grad)
            vars(copied).update(deepcopy(vars(tensor), memo))
            memo[id(tensor)] = copied
        known: Tensor = memo[id(tensor)]
        return known

    def _record(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]
    ) -> Any:
        """Runs a call on meta and appends it, unless it turns out to be a view, a question or a read."""
        stand_ins: list[Tensor] = []

        def meta(leaf: Any) -> Any:
            if isinstance(leaf, torch.Generator):
                return None
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                stand_ins.append(_to_meta(leaf))
                return stand_ins[-1]
            return leaf

        tracked = [leaf for leaf in (*tensor_leaves(args), *tensor_leaves(kwargs)) if leaf.is_meta]
        for leaf in tracked:
            self.history.ref(leaf)
        counts = [write_count(leaf) for leaf in tracked]
        try:
            result = func(*map_leaves(meta, args), **map_leaves(meta, kwargs))
        except NotImplementedError:
            if not written:
                return self._read(func, args, kwargs)
            result = None if name_of(func) == "__setitem__" else args[0]
        except (RuntimeError, TypeError):
            if written:
                raise
            return self._read(func, args, kwargs)  # needs values; a real mistake raises again, in its own words
        storages = {storage_id(stand_in) for stand_in in stand_ins}
        leaves = tensor_leaves(result) if storages else ()
        is_alias = any(leaf.is_meta and storage_id(leaf) in storages for leaf in leaves)
        if is_alias or any(write_count(stand_in) for stand_in in stand_ins):
            return self._read(func, args, kwargs)
        also = [leaf for leaf, count in zip(tracked, counts, strict=True) if write_count(leaf) != count]
        writes = [*written, *also]
        if writes or any(not self.history.knows(leaf) for leaf in tensor_leaves(result) if leaf.is_meta):
            self._append(func, args, self._with_generators(func, args, kwargs), result, writes)
        return result

    def _with_generators(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Replaces a user's generator by a clone, and advances it as the call would have."""
        if any(isinstance(value, torch.Generator) for value in args):
            raise InitError(f"torch.{name_of(func)} got a generator by position. Pass it as `generator=`.")
        generator = kwargs.get("generator")
        if generator is None:
            return kwargs
        if generator.device.type != "cpu":
            raise InitError(
                f"generator= is on {generator.device}, and initial weights are drawn on the CPU. "
                "Use torch.Generator() so that every device gets the same bits."
            )
        clone = generator.clone_state()
        with torch.no_grad():
            func(*map_leaves(self._real, args), **map_leaves(self._real, kwargs))
        return {**kwargs, "generator": clone}

    def _append(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, writes: list[Tensor]
    ) -> None:
        new, outputs = [], []
        for position, leaf in enumerate(tensor_leaves(result)):
            if leaf.is_meta and not self.history.knows(leaf):
                new.append(leaf)
                outputs.append((position, self.history.look(leaf)))

        refs: list[Ref] = []

        def captured(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if not leaf.is_meta:
                return leaf.detach().clone()
            refs.append(self.history.ref(leaf))
            return refs[-1]

        args, kwargs = map_leaves(captured, args), map_leaves(captured, kwargs)
        overwrites = _overwritten(func, refs, writes)
        reads = tuple({ref.storage for ref in refs} - {overwrites})
        written = tuple({storage_id(target) for target in writes})
        op = Op(func, args, kwargs, tuple(outputs), written, reads, overwrites, torch.get_default_dtype())
        self.history.append(op, new)
        if writes:
            self._initialised.update(_initialising())


def _initialising() -> Iterator[nn.Module]:
    """The modules whose `init_weights()` is running: looked up on the stack, since their methods are not replaced."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "init_weights" and frame.f_code.co_argcount > 0:
            owner = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(owner, nn.Module):
                yield owner
        frame = frame.f_back


def _overwritten(func: Callable[..., Any], refs: list[Ref], writes: list[Tensor]) -> int | None:
    """The storage that a call fills completely without having read it."""
    if name_of(func) not in OVERWRITES or len({storage_id(target) for target in writes}) != 1:
        return None
    target = writes[0]
    is_whole = target.is_contiguous() and target.numel() * target.element_size() == target.untyped_storage().nbytes()
    is_read_too = sum(ref.storage == storage_id(target) for ref in refs) > 1
    return storage_id(target) if is_whole and not is_read_too else None


def _is_empty(tensor: Tensor) -> bool:
    """Whether it is a plain tensor without elements; a parameter of a lazy module cannot be asked."""
    return type(tensor) is Tensor and tensor.numel() == 0


def _is_opaque(tensor: Tensor) -> bool:
    """Whether a subclass (DTensor, quantised weights ...) dispatches by itself and is not recorded."""
    cls: Any = type(tensor)
    plain: Any = Tensor
    return cls.__torch_dispatch__ is not plain.__torch_dispatch__


def _example(leaf: Any) -> Any:
    """A tensor of the type and device that `leaf` seems to have."""
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty(0, dtype=leaf.dtype, device="cpu" if leaf.is_meta else leaf.device)


def _to_meta(leaf: Any) -> Any:
    return leaf.detach().to("meta") if isinstance(leaf, Tensor) and not leaf.is_meta else leaf
