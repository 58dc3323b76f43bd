"""How many samples a batch holds whose loader does not know: the user's count, otherwise a guess."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, index
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from dream_trainer.errors import DataError, HookError
from dream_trainer.nested import leaves

_REMEDY = "Override `batch_size(self, batch) -> int` in your trainer."


@runtime_checkable
class GraphBatch(Protocol):
    @property
    def num_graphs(self) -> int: ...


class SampleCount:
    """Counts the samples of batches that come from a user's loader."""

    def __init__(self, own: Callable[[Any], int] | None = None, warn: Callable[[str], None] | None = None) -> None:
        self.own = own
        self._warn = warn

    def __call__(self, batch: Any, declared: int | None = None) -> int:
        """The user's count, or the number of graphs or packed sequences, or the first dimension of the first tensor."""
        if self.own is not None:
            return whole_number(self.own(batch), "batch_size", batch)
        if type(batch) in (tuple, list) and (common := _common(batch)) is not None:
            return common
        counts, lists = _counts(batch)
        if not counts:
            raise DataError(
                f"Cannot tell how many samples a batch of type {type(batch).__name__} holds: it has no tensor with a "
                f"dimension. If it is a sample, wrap its dataset in a DataLoader. {_REMEDY}"
            )
        count = counts[0]
        is_doubtful = min(counts) != max(counts) or any(map(_are_alike, lists))
        if count != declared and self._warn is not None and is_doubtful:
            warn, self._warn = self._warn, None
            shapes = [str([*leaf.shape]) for leaf in leaves(batch) if isinstance(leaf, Tensor)]
            more = ", ..." if len(shapes) > 4 else ""
            warn(
                f"a batch of type {type(batch).__name__} with tensors of shapes {', '.join(shapes[:4])}{more} is "
                f"counted as {count} samples, the first tensor's first dimension. If it holds another number, means "
                f"and samples_seen are wrong. {_REMEDY}"
            )
        return count


def _common(parts: Sequence[Any]) -> int | None:
    """The first dimension that all parts of a usual batch have, tensors of types that differ; None of any other."""
    count, kinds = None, set()
    for part in parts:
        if type(part) is not Tensor or part.ndim == 0 or count not in (None, part.shape[0]):
            return None
        count = part.shape[0]
        kinds.add(part.dtype)
    return count if len(kinds) == len(parts) else None


def _counts(batch: Any) -> tuple[list[int], list[list[Any]]]:
    """First dimensions of its tensors, or only the number of its graphs or packed sequences; and its lists."""
    counts: list[int] = []
    lists: list[list[Any]] = []
    pending = [batch]
    while pending:
        part = pending.pop()
        if isinstance(part, Tensor):
            if part.ndim > 0:
                counts.append(part.shape[0])
        elif isinstance(part, PackedSequence):  # a tuple too
            return [int(part.batch_sizes[0])], []
        elif isinstance(part, (list, tuple)):
            if isinstance(part, list):
                lists.append(part)
            pending += part[::-1]
        elif isinstance(part, Mapping):
            pending += [*part.values()][::-1]
        elif isinstance(part, GraphBatch):
            return [int(part.num_graphs)], []
        elif dataclasses.is_dataclass(part) and not isinstance(part, type):
            pending += [attrgetter(field.name)(part) for field in dataclasses.fields(part)][::-1]
    return counts, lists


def _are_alike(parts: list[Any]) -> bool:
    """Whether a list's parts could be samples: tensors of one type, and of one shape or of three dimensions or more."""
    first = parts[0] if len(parts) > 1 else None
    if not isinstance(first, Tensor) or first.ndim == 0:
        return False
    return all(
        isinstance(part, Tensor)
        and part.dtype is first.dtype
        and (part.shape == first.shape or part.ndim == first.ndim > 2)
        for part in parts
    )


def whole_number(value: Any, hook: str, batch: Any) -> int:
    """`value` as an int: a tensor would be counted in place, and be no number in logs and checkpoints."""
    try:
        return index(value)
    except TypeError:
        kind = type(batch).__name__
        raise HookError(f"{hook} gave {value!r} for a batch of type {kind}. Give a whole number.") from None


IGNORED = -100  # the label of a token that predicts nothing; `cross_entropy` leaves it out by default


def count_tokens(batch: Any) -> int | None:
    """Tokens of a batch without padding; None if unknown without waiting for a device."""
    if isinstance(batch, Mapping):
        for key, count in _COUNTS.items():
            values = batch.get(key)
            is_of_samples = key == "labels" and type(values) is Tensor and values.ndim < 2  # classes, say
            if type(values) is Tensor and values.dtype is not torch.float32 and not is_of_samples:
                return int(count(values)) if values.device.type == "cpu" else None
        counts = [count_tokens(part) for part in batch.values() if isinstance(part, Mapping)]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None
    if type(batch) is tuple and len(batch) == 2 and isinstance(batch[0], str):
        return count_tokens(batch[1])
    return None


_COUNTS: dict[str, Callable[[Tensor], Tensor]] = {
    "documents": lambda values: (values >= 0).sum(),
    "attention_mask": lambda values: torch.count_nonzero(values),
    "labels": lambda values: (values != IGNORED).sum(),
}
