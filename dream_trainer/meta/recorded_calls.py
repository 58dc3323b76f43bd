"""Recorded calls, indexed by the storages they write, and the replay of the few that one tensor depends on; effects of
torch functions on their arguments, from their names: all that the tape knows of PyTorch's API.

Calls have references to storages instead of tensors, so views, `nn.Parameter(...)` and `.data` need no record."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dream_trainer.compat.pytorch import changes_its_first, storage_id, tree_iter, tree_map, without_torch_function
from dream_trainer.distributed.seeds import hash_seed
from dream_trainer.errors import InitError

# factories whose result holds no values yet
EMPTY = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}

FILLED = {  # factories that are worth deferring when their result is large
    *("zeros", "ones", "full", "rand", "randn", "randint", "normal", "eye"),
    *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_full"),
}

READS = {  # functions that bring values into Python
    *("item", "tolist", "numpy", "__array__", "__repr__", "__str__", "__format__", "__reduce_ex__", "__dlpack__"),
    *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__"),
    *("equal", "allclose", "is_nonzero", "pin_memory"),
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
    is_source: bool = False  # its output holds no values that anybody chose


@dataclass(slots=True)
class _Storage:
    meta: torch.UntypedStorage  # held: a freed meta storage's id would be reused
    writers: list[int]


class RecordedCalls:
    """A list of calls, of which those that one tensor depends on can run again: each draws by (seed, its number)."""

    def __init__(self, seed: int) -> None:
        self._first_seed = hash_seed(b"draw", seed)
        self.ops: list[Op] = []
        self.storages: dict[int, _Storage] = {}
        self.foreign: set[int] = set()
        self.asked: dict[int, int] = {}  # storages whose values the code saw, and after how many calls it did so last

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
        op = Op(_uninitialised, (count,), kwargs, outputs, (), (), None, torch.get_default_dtype(), is_source=True)
        self.append(op, [tensor])

    def is_untouched(self, ref: Ref) -> bool:
        return all(self.ops[number].is_source for number in self.storages[ref.storage].writers)

    def is_given(self, ref: Ref) -> bool:
        """Whether the last write to the whole storage copied a real tensor into it, as loading weights does."""
        last = self.ops[self.storages[ref.storage].writers[-1]]
        is_copy = last.overwrites == ref.storage and name_of(last.func) == "copy_"
        return (is_copy and not last.reads) or (last.func is torch.clone and not last.reads)

    def is_drawn(self, ref: Ref) -> bool:
        """Whether any of the calls that the storage's present values depend on draws random numbers."""
        return any(name_of(self.ops[number].func) in DRAWS for number in self.calls_behind(ref.storage))

    def is_foreign(self, ref: Ref) -> bool:
        """Whether the storage was on meta before any recorded call, and nothing has been written to it since."""
        return ref.storage in self.foreign and self.is_untouched(ref)

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
        return real, any(self.ops[number].is_source for number in numbers)

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
