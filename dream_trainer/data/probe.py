"""A few samples of a dataset, compared between ranks. If each rank has already split or shuffled its dataset, it would
be split twice or trained in part, which looks right on any single rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from dream_trainer.data.sampler import ENDLESS, KeyedDataset, draws_nothing
from dream_trainer.data.worker_start import started, worker_loader
from dream_trainer.distributed.seeds import preserved_random_state

if TYPE_CHECKING:
    from dream_trainer.data.loader import ShardReader

Leaf = str | int | list[float]
# parts of a sample by place: a digest, or a few numbers that another host may compute a little differently.
Summary = dict[str, Leaf]

_NUMBERS = 64
_TOLERANCE = 0.01


def probed(readers: Mapping[str, ShardReader], *, times: int = 1) -> dict[str, list[Summary]]:
    """Summaries of the first and last sample of each dataset, each `times` in a row; empty if they cannot be loaded."""
    summaries: dict[str, list[Summary]] = {}
    for name, reader in readers.items():
        loader, data = reader.loader, KeyedDataset(reader.loader.dataset, summary, reader.seed)
        keys = [(0, [index]) for index in sorted({0, len(loader.dataset) - 1} - {ENDLESS - 1}) for _ in range(times)]
        loaded: Iterator[Any] = map(data.__getitems__, keys)
        if loader.num_workers > 0 and not draws_nothing(loader.dataset):
            options = {"batch_sampler": keys, "num_workers": 1, "pin_memory": False}
            loaded = started(worker_loader(data, loader, torch.Generator("cpu"), **options))
        with preserved_random_state():
            summaries[name] = [_next(loaded, data.is_ordered) for _ in keys]
    return summaries


def _next(loaded: Iterator[Any], is_ordered: bool) -> Summary:
    try:
        found: Any = next(loaded)
    except Exception:  # training will raise it too, with a better message
        return {}
    sample_summary: Summary = found[0] if is_ordered else found  # with a mark
    return sample_summary


def summary(sample: Any) -> Summary:
    """The parts of a sample that ranks can compare: tensors, arrays, numbers and strings in nested containers."""
    return dict(_parts("sample", sample))


def _parts(name: str, value: Any) -> Iterator[tuple[str, Leaf]]:
    if isinstance(value, str | bytes):
        # A file's name may differ between hosts.
        yield f"{name} (text)", xxhash.xxh3_64_intdigest(value.encode() if isinstance(value, str) else value)
    elif isinstance(value, bool | int | float | np.generic):
        yield from _parts_of_array(name, np.asarray(value))
    elif type(value) is torch.Tensor and value.layout is torch.strided and not value.is_meta:
        tensor = value.detach().cpu()
        yield from _parts_of_array(name, (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy())
    elif isinstance(value, np.ndarray):
        yield from _parts_of_array(name, value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _parts(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value[:_NUMBERS]):
            yield from _parts(f"{name}[{index}]", item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _parts(name, vars(value))


def _parts_of_array(name: str, values: np.ndarray) -> Iterator[tuple[str, Leaf]]:
    if values.dtype.kind not in "biuf":
        return
    yield f"{name} (shape)", str(values.shape)
    if values.dtype.kind == "f" or values.dtype == np.uint8:  # pictures too: decoders differ by a shade
        flat = values.reshape(-1).astype(np.float64)
        chosen = flat[:: max(1, len(flat) // _NUMBERS)][:_NUMBERS].tolist()
        yield name, [*chosen, float(flat.mean()), float(flat.std())] if len(flat) else []
    else:
        yield name, xxhash.xxh3_64_intdigest(np.ascontiguousarray(values.astype(np.int64)).tobytes())


def differing(summaries: Sequence[Summary]) -> dict[str, int]:
    """The parts that differ between summaries, each with the first rank whose part is not rank 0's."""
    names = dict.fromkeys(name for rank_summary in summaries for name in rank_summary)
    first = summaries[0]
    rank_of_name: dict[str, int] = {}
    for name in [name for name in names if not name.endswith("(text)")] or names:
        differs = [not _alike(first.get(name), rank_summary.get(name)) for rank_summary in summaries]
        if any(differs):
            rank_of_name[name] = differs.index(True)
    return rank_of_name


def _alike(one: Leaf | None, other: Leaf | None) -> bool:
    if not isinstance(one, list) or not isinstance(other, list):
        return one == other
    if len(one) != len(other):
        return False
    scale = max((abs(value) for value in one), default=0.0)
    return bool(np.allclose(one, other, rtol=0.0, atol=_TOLERANCE * scale, equal_nan=True))
