"""The parity matrix has each pair of axes and options that a config may have together."""

import itertools
from typing import Any

import pytest

from tests.api import ConfigError
from tools.parity_cells import Cell, all_cells

CHOICES: dict[str, dict[str, Any]] = {
    "replicas": {"dp_replicate": 2},
    "shards": {"dp_shard": 2},
    "layers": {"tp": 2},
    "sequences": {"cp": 2},
    "experts": {"ep": 2, "experts": True},
    "stages": {"pp": 2},
    "accumulation": {"accumulation": 2},
    "full recomputation": {"recompute": "full"},
    "selective recomputation": {"recompute": "selective"},
    "overlap": {"overlap_reduce": True},
    "compilation": {"backend": "aot_eager"},
    "blocks": {"by_blocks": True},
}


def has(cell: Cell, choice: str) -> bool:
    usual = Cell()
    values = ((getattr(cell, name), value, getattr(usual, name)) for name, value in CHOICES[choice].items())
    return all(
        of_cell == value if isinstance(value, str) else of_cell != of_usual for of_cell, value, of_usual in values
    )


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(CHOICES, 2)])
def test_two_that_go_together_are_in_a_cell(one: str, other: str) -> None:
    if any(has(cell, one) and has(cell, other) for cell in all_cells()):
        return
    assert CHOICES[one].keys() & CHOICES[other].keys() or is_refused(CHOICES[one] | CHOICES[other])


def is_refused(values: dict[str, Any]) -> bool:
    try:
        return Cell(**values).device_parameters is None
    except ConfigError:
        return True
