"""The tape: runs model-building code for real, except that large and empty tensors stay on meta and are recorded.

To the code that runs, the meta tensors look like CPU tensors; when it asks one for values, the calls behind it are
replayed on the spot. Not deferred or not replayed:

- `torch.Tensor(n, m)`, the legacy constructor, allocates for real.
- `torch.manual_seed` inside a recording seeds real draws only; `generator=` is honoured exactly.
- Storages written behind torch's back (`numpy`, `from_dlpack`): the arrays handed out are read-only.

Recorded calls are indexed by the storages they write. They have references to storages instead of tensors, so views,
`nn.Parameter(...)` and `.data` need no record.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from dream_trainer.compat.pytorch import (
    changes_its_first,
    of_class_of,
    storage_id,
    tree_iter,
    tree_map,
    without_torch_function,
    write_count,
)
from dream_trainer.distributed.seeds import hash_seed, preserved_random_state, seed_cpu
from dream_trainer.errors import InitError

# -- Effects of torch functions on their arguments, from their names: all that the tape knows of PyTorch's API.

# factories whose result holds no values yet
EMPTY = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}

FILLED = {  # factories that are worth deferring when their result is large
    *("zeros", "ones", "full", "rand", "randn", "randint", "normal", "eye"),
    *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_full"),
}

READS = {  # functions that bring values into Python, or to a device
    *("item", "tolist", "numpy", "__array__", "__repr__", "__str__", "__format__", "__reduce_ex__", "__dlpack__"),
    *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__"),
    *("equal", "allclose", "is_nonzero", "pin_memory", "cuda"),
}

QUIET_WRITES = {"batch_norm", "instance_norm"}  # write running statistics without counting it: they run for real

METADATA = {  # end in `_` and yet write no values: they change the tensor object, which stays on meta
    *("requires_grad_", "detach_", "retain_grad", "set_", "t_", "transpose_", "swapaxes_", "swapdims_"),
    *("squeeze_", "unsqueeze_", "as_strided_", "rename_"),
}

OVERWRITES = {  # in-place functions whose result does not depend on what their target held before
    *("zero_", "fill_", "copy_", "normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_"),
    *("constant_", "kaiming_uniform_"),
}

DRAWS = {  # functions whose result is random
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"),
    *("rand_like", "randn_like", "randint_like"),
    *("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_", "bernoulli_"),
    "kaiming_uniform_",
}

CASTS = {"to", "type", "double", "float", "half", "bfloat16", "clone", "contiguous"}  # other memory, maybe other dtype


def name_of(func: Callable[..., Any]) -> str:
    """The function's own name; for a property's getter or setter `__get__` or `__set__`."""
    return str(getattr(func, "__name__", ""))


def targets(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call writes values into, as far as its name tells."""
    if kwargs.get("out") is not None:
        return list(tensor_leaves(kwargs["out"]))
    if (changes_its_first(func) and name_of(func) not in METADATA) or kwargs.get("inplace") is True:
        first = args[0] if args else next(iter(kwargs.values()))
        return list(tensor_leaves(first))
    return []


def tensor_leaves(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor))


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """A copy of nested tuples, lists, dicts and slices with `function` applied to what lies in them."""

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, slice):
            return slice(*map_leaves(function, (leaf.start, leaf.stop, leaf.step)))
        return function(leaf)

    return tree_map(mapped, value, is_leaf=lambda part: isinstance(part, torch.Size))  # else it gets a plain tuple


# -- Recorded calls, and the replay of the few that one tensor depends on.


@dataclass(frozen=True, slots=True)
class Ref:
    """One way to look at a recorded storage."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool

    def view(self, storage: torch.UntypedStorage) -> Tensor:
        with torch.no_grad():
            plain = torch.empty(0, dtype=self.dtype, device=storage.device)
            plain.set_(storage, self.offset, self.size, self.stride)
            return plain.conj() if self.is_conj else plain


@dataclass(slots=True)
class Op:
    """One recorded call, its tensors replaced by `Ref` (recorded ones) or clones (real ones), generators by clones."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[tuple[int, Ref], ...]  # new tensors: position in the result, and meta layout
    writes: tuple[int, ...]  # storages of earlier calls
    reads: tuple[int, ...]  # storages whose earlier values it depends on
    overwrites: int | None  # a storage among `writes` none of whose earlier values survive
    default_dtype: torch.dtype


@dataclass(slots=True)
class _Storage:
    meta: torch.UntypedStorage  # held: a freed meta storage's id would be reused
    writers: list[int]


class Tape:
    """Records how tensors are made, and makes them later, one at a time, the same bits on every rank: the calls that
    one depends on run again, each with the draws of (seed, its number)."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._first_seed = hash_seed(b"draw", seed)
        self._recordings = 0
        self._is_recording = False
        self.initialised: WeakSet[nn.Module] = WeakSet()
        # Modules whose `init_weights()` ran in a recording, and wrote to something: their constructors may call it.
        self.ops: list[Op] = []
        self.storages: dict[int, _Storage] = {}
        self.foreign: set[int] = set()  # storages that were on meta before any recorded call
        self.asked: dict[int, int] = {}  # storages whose values the code saw, and after how many calls it did so last

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
                seed_cpu(hash_seed(b"recording", self._seed, self._recordings))
                with Recorder(self):
                    yield
        finally:
            self._is_recording = False

    def ref(self, tensor: Tensor) -> Ref:
        """How to find `tensor` (on meta) again; a meta tensor never seen before counts as uninitialised."""
        if storage_id(tensor) not in self.storages:
            self.append_source(tensor)
            self.foreign.add(storage_id(tensor))
        return self.look(tensor)

    def knows(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self.storages

    def append(self, op: Op, new: list[Tensor]) -> None:
        """Adds a call; `new` are the meta tensors that `op.outputs` describes."""
        number = len(self.ops)
        self.ops.append(op)
        for tensor in new:
            self.storages.setdefault(storage_id(tensor), _Storage(tensor.untyped_storage(), [number]))
        for storage in op.writes:
            self.storages[storage].writers.append(number)

    def append_source(self, tensor: Tensor) -> None:
        """Records `tensor` (on meta) as allocated and not yet written."""
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        outputs = ((0, self.look(tensor)),)
        kwargs = {"dtype": tensor.dtype}
        op = Op(_uninitialised, (count,), kwargs, outputs, (), (), None, torch.get_default_dtype())
        self.append(op, [tensor])

    def is_untouched(self, ref: Ref) -> bool:
        return all(self.ops[number].func is _uninitialised for number in self.storages[ref.storage].writers)

    def is_given(self, ref: Ref) -> bool:
        """Whether the last write to the whole storage copied a real tensor into it, as loading weights does."""
        last = self.ops[self.storages[ref.storage].writers[-1]]
        is_copy = last.overwrites == ref.storage and name_of(last.func) == "copy_"
        return (is_copy and not last.reads) or (last.func is torch.clone and not last.reads)

    def is_drawn(self, ref: Ref) -> bool:
        """Whether any of the calls that the storage's present values depend on draws random numbers."""
        return any(name_of(self.ops[number].func) in DRAWS for number in self.calls_behind(ref.storage))

    def replay(
        self, ref: Ref, given: Mapping[int, torch.UntypedStorage] | None = None
    ) -> tuple[torch.UntypedStorage, bool]:
        """The real storage in CPU memory, and whether the calls that made it used uninitialised memory."""
        given = given or {}
        numbers = self.calls_behind(ref.storage, given)
        last_use: dict[int, int] = {ref.storage: len(self.ops)}
        for number in numbers:
            op = self.ops[number]
            for storage in (*op.reads, *op.writes, *(output.storage for _, output in op.outputs)):
                last_use[storage] = max(number, last_use.get(storage, 0))
        live: dict[int, torch.UntypedStorage] = dict(given)
        random_state, default_dtype = torch.get_rng_state(), torch.get_default_dtype()
        try:
            with torch.no_grad(), without_torch_function():
                for number in numbers:
                    self._run(number, live)
                    for storage in [key for key in live if last_use.get(key, -1) <= number]:
                        del live[storage]
        finally:
            torch.default_generator.set_state(random_state)
            torch.set_default_dtype(default_dtype)
        real = live.get(ref.storage)
        if real is None:
            real = torch.UntypedStorage(self.storages[ref.storage].meta.nbytes())
        return real, any(self.ops[number].func is _uninitialised for number in numbers)

    def look(self, tensor: Tensor) -> Ref:
        """How `tensor` looks at its storage, recorded or not."""
        if tensor.is_neg():
            raise InitError(
                "A lazily negated view (the imaginary part of a conjugate) cannot be replayed. "
                "Call `.resolve_conj()` before `.imag` in the model's constructor."
            )
        offset, is_conj = tensor.storage_offset(), tensor.is_conj()
        return Ref(storage_id(tensor), tensor.dtype, tensor.size(), tensor.stride(), int(offset), is_conj)

    def calls_behind(self, storage: int, given: Collection[int] = ()) -> list[int]:
        """Numbers, ascending, of the calls that the storage's present values depend on."""
        needed: set[int] = set()
        seen: set[tuple[int, int]] = set()
        pending = [(storage, len(self.ops))]
        while pending:
            key, bound = pending.pop()
            if key in given:
                continue
            writers = self.storages[key].writers
            index = bisect_left(writers, bound) - 1
            if index < 0 or (key, writers[index]) in seen:
                continue
            number = writers[index]
            seen.add((key, number))
            needed.add(number)
            op = self.ops[number]
            pending.extend((read, number) for read in op.reads)
            if op.overwrites != key:
                pending.append((key, number))
        return sorted(needed)

    def _run(self, number: int, live: dict[int, torch.UntypedStorage]) -> None:
        op = self.ops[number]

        def real(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                if leaf.storage not in live:
                    live[leaf.storage] = torch.UntypedStorage(self.storages[leaf.storage].meta.nbytes())
                return leaf.view(live[leaf.storage])
            return leaf.clone_state() if isinstance(leaf, torch.Generator) else leaf

        torch.set_default_dtype(op.default_dtype)
        # The generator takes 32 bits. Counting up from a hashed start, no two draws of a model share a seed.
        torch.default_generator.manual_seed((self._first_seed + number) & 0xFFFF_FFFF)
        result = op.func(*map_leaves(real, op.args), **map_leaves(real, op.kwargs))
        leaves = list(tensor_leaves(result)) if op.outputs else []
        for position, ref in op.outputs:
            if ref.storage not in live:
                live[ref.storage] = _laid_out(leaves[position], ref, self.storages[ref.storage].meta.nbytes())


def _uninitialised(count: int, *, dtype: torch.dtype) -> Tensor:
    """A flat tensor of NaN, to reveal uninitialised values; zeros if the dtype has no NaN."""
    flat = torch.empty(count, dtype=dtype, device="cpu")
    return flat.fill_(float("nan") if dtype.is_floating_point or dtype.is_complex else 0)


def _laid_out(real: Tensor, ref: Ref, nbytes: int) -> torch.UntypedStorage:
    """The storage of a replayed output, in the layout that its meta twin had (later references rely on it)."""
    same_layout = (real.stride(), real.storage_offset()) == (ref.stride, ref.offset)
    is_flat = real.dim() == 1 and real.numel() * real.element_size() == nbytes
    if (same_layout or is_flat) and real.untyped_storage().nbytes() == nbytes:
        return real.untyped_storage()
    storage = torch.UntypedStorage(nbytes)
    ref.view(storage).copy_(real)
    return storage


# -- Recording.


LARGE = 1 << 20  # smallest number of elements of a deferred filled tensor: 4 MB in fp32


class Recorder(TorchFunctionMode):
    """Sees every torch call made while it is entered, and keeps on `tape` those that deferred tensors need."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

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
            self.tape.append_source(result)
            if result.numel() == 0 and not is_asked_for:
                return func(*args, **kwargs)  # `torch.load` points it to read data, which cannot be recorded
            return result
        on_cpu = {key: value for key, value in kwargs.items() if key != "pin_memory"} | {"device": "cpu"}
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
                if args[1].is_meta:
                    return func(tensor, self._real(args[1]))
                copied = _to_meta(args[1])  # will replay as a copy of the real tensor
                self._append(torch.clone, (args[1],), {}, copied, [])
                return func(tensor, copied)
            return func(*args)
        # An empty one that is not recorded asks whether `torch.device("meta")` is on, as transformers does.
        if tensor.is_meta and not (_is_empty(tensor) and not self.tape.knows(tensor)):
            answers = {"is_meta": False, "is_cpu": True, "device": torch.device("cpu")}
            if name in answers:
                return answers[name]
        return func(*args)

    def _real(self, leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.is_meta):
            return leaf
        ref = self.tape.ref(leaf)
        self.tape.asked[ref.storage] = len(self.tape.ops)
        return ref.view(self.tape.replay(ref)[0])

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
            self.tape.ref(leaf)
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
        if writes or any(not self.tape.knows(leaf) for leaf in tensor_leaves(result) if leaf.is_meta):
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
            if leaf.is_meta and not self.tape.knows(leaf):
                new.append(leaf)
                outputs.append((position, self.tape.look(leaf)))

        refs: list[Ref] = []

        def captured(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if not leaf.is_meta:
                return leaf.detach().clone()
            refs.append(self.tape.ref(leaf))
            return refs[-1]

        args, kwargs = map_leaves(captured, args), map_leaves(captured, kwargs)
        overwrites = _overwritten(func, refs, writes)
        reads = tuple({ref.storage for ref in refs} - {overwrites})
        written = tuple({storage_id(target) for target in writes})
        op = Op(func, args, kwargs, tuple(outputs), written, reads, overwrites, torch.get_default_dtype())
        self.tape.append(op, new)
        if writes:
            self.tape.initialised.update(_initialising())


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
