"""Tensors whose first values were computed from others of a model, and how to compute them again from new ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dream_trainer.meta.functions import CASTS, name_of
from dream_trainer.meta.recorded_calls import RecordedCalls, Ref


@dataclass(frozen=True, slots=True)
class Derived:
    """How a tensor got its first values."""

    ref: Ref
    history: RecordedCalls
    sources: Mapping[str, tuple[Ref, ...]] = field(default_factory=dict)
    """The names of the tensors that it was computed from, with what was read of each: it, or it before a cast."""

    def computed(self, read: Callable[[str], Tensor]) -> Tensor:
        """The values that it has when those that it was computed from are as `read` gives them, whole on the CPU."""
        given: dict[int, torch.UntypedStorage] = {}
        for name, refs in self.sources.items():
            values = read(name)
            for ref in refs:
                if ref.storage not in given:
                    given[ref.storage] = torch.UntypedStorage(self.history.storages[ref.storage].meta.nbytes())
                ref.view(given[ref.storage]).copy_(values)
        return self.ref.view(self.history.replay(self.ref, given)[0])


def derivations(refs: Mapping[str, Ref], sources: Collection[str], history: RecordedCalls) -> dict[str, Derived]:
    """How each tensor of `refs` got its first values, as far as these come from those of `sources`."""
    readable: dict[int, list[tuple[str, Ref]]] = {}
    for name in sources:
        for ref in _before_casts(refs[name], history):
            readable.setdefault(ref.storage, []).append((name, ref))
    found = {}
    for name, ref in refs.items():
        if name in sources:
            continue
        read: dict[str, tuple[Ref, ...]] = {}
        for number in history.calls_behind(ref.storage):
            op = history.ops[number]
            for storage in op.reads:
                for source, part in readable.get(storage, ()):
                    if part not in read.get(source, ()):
                        read[source] = (*read.get(source, ()), part)
        found[name] = Derived(ref, history, read)
    return found


def is_changed_since(ref: Ref, first: int, history: RecordedCalls) -> bool:
    """Whether a tensor was computed anew from what it held before the call number `first`, and not only cast."""
    numbers = history.calls_behind(_before_casts(ref, history)[-1].storage)
    return numbers[0] < first <= numbers[-1]


def asked(refs: Mapping[str, Ref], history: RecordedCalls) -> str:
    """The name of a tensor of which code saw the values, or others computed from them; "" if there is none."""
    seen: dict[int, int] = {}
    for storage, number in history.asked.items():
        seen[storage] = max(number, seen.get(storage, -1))
        for read in (read for call in history.calls_behind(storage) for read in history.ops[call].reads):
            seen[read] = max(number, seen.get(read, -1))
    for name, ref in refs.items():
        chain = _before_casts(ref, history)
        if any(seen.get(part.storage, -1) >= history.storages[part.storage].writers[-1] for part in chain):
            return name
    return ""


def _before_casts(ref: Ref, history: RecordedCalls) -> list[Ref]:
    """`ref`, what it was cast from, and so on."""
    chain = [ref]
    while True:
        writers = history.storages[chain[-1].storage].writers
        op = history.ops[writers[0]]
        if len(writers) > 1 or name_of(op.func) not in CASTS or len(op.reads) != 1 or not isinstance(op.args[0], Ref):
            return chain
        if op.args[0].size != ref.size:
            return chain
        chain.append(op.args[0])
