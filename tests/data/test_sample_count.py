"""Batches of a loader of the user's own: how many samples each is counted as, and when that is doubtful."""

from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from tests.api import DataError, HookError, SampleCount

Pair = namedtuple("Pair", ["x", "y"])


class Graphs:
    """As PyTorch Geometric joins graphs: rows are nodes, and `num_graphs` is computed."""

    def __init__(self, sizes: list[int]) -> None:
        self.batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        self.x = torch.ones(len(self.batch), 3)

    @property
    def num_graphs(self) -> int:
        return int(self.batch[-1]) + 1


def counted(batch: Any, declared: int | None = None) -> tuple[int, int]:
    """The count, and how many warnings two batches give."""
    warnings: list[str] = []
    count = SampleCount(warn=warnings.append)
    found = {count(batch, declared) for _ in range(2)}
    return found.pop(), len(warnings)


OF_FIVE: dict[str, Any] = {
    "tensor": torch.ones(5, 2),
    "tuple": (torch.ones(5, 2), torch.ones(5)),
    "nested": {"name": "x", "inner": {"ids": torch.ones(5, 1)}},
    "UserDict": UserDict({"ids": torch.ones(5)}),
    "graphs": Graphs([3, 1, 2, 4, 1]),
    "graphs and rows of nodes": (torch.ones(11), Graphs([3, 1, 2, 4, 1])),
    "packed": {"length": torch.ones(1), "packed": pack_sequence([torch.ones(n) for n in (4, 3, 2, 2, 1)])},
}
DOUBTFUL: dict[str, Any] = {
    "images": [torch.ones(3, 8, 8)] * 4,
    "time first": (torch.ones(3, 2, 4), torch.ones(2)),
    "namedtuple": Pair(torch.ones(3), torch.ones(5)),
}


@pytest.mark.parametrize("kind", OF_FIVE)
def test_a_batch_of_five_samples_is_counted_without_a_doubt(kind: str) -> None:
    assert counted(OF_FIVE[kind]) == (5, 0)


@pytest.mark.pitfall(100)
@pytest.mark.parametrize("kind", DOUBTFUL)
def test_lists_and_batches_without_a_common_first_dimension_warn_once_unless_the_loader_has_that_number(
    kind: str,
) -> None:
    batch = DOUBTFUL[kind]
    assert counted(batch) == (3, 1)
    assert counted(batch, declared=3) == (3, 0)
    assert counted(batch, declared=2) == (3, 1)


@pytest.mark.parametrize("batch", [[torch.ones(3, 8, 8)], (torch.ones(2, 2, 4), torch.ones(2))], ids=["images", "time"])
def test_a_first_batch_that_looks_right_by_chance_does_not_hide_the_next(batch: Any) -> None:
    warnings: list[str] = []
    count = SampleCount(warn=warnings.append)
    count(batch)
    assert warnings == []
    count([torch.ones(3, 8, 8)] * 4 if isinstance(batch, list) else (torch.ones(2, 5, 4), torch.ones(5)))
    assert len(warnings) == 1


def test_the_users_own_count_is_taken_and_is_a_whole_number() -> None:
    assert SampleCount(len)([torch.ones(3, 8, 8)] * 4) == 4
    total = SampleCount(lambda batch: (batch > 0).sum())(torch.tensor([1.0, 0.0, 2.0]))
    assert total == 2
    assert type(total) is int
    with pytest.raises(HookError, match=r"2\.5 for a batch of type str"):
        SampleCount(lambda batch: 2.5)("batch")  # type: ignore[arg-type, return-value]


def test_a_batch_without_tensors_names_the_hook_to_override() -> None:
    with pytest.raises(DataError, match=r"batch_size\(self, batch\)"):
        SampleCount()({"text": ["a", "b"]})
