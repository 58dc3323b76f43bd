"""Settings that do not go together: each row of the table is refused as a whole and by no part of it, and is in the
docs."""

from pathlib import Path
from typing import Any

import pytest

from tests.api import UNSUPPORTED, Combination, ConfigError, refuse_combinations

ON = {"on_nonfinite": "retry", "sync_policy": "defer_all_reduce"}


def settings(names: tuple[str, ...]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, _, value in (name.partition("=") for name in names):
        given[name] = value or ON.get(name) or (2 if name.endswith("_parallel") else True)
    return given


@pytest.mark.parametrize("row", UNSUPPORTED, ids=lambda row: "+".join(row.settings))
def test_a_combination_is_refused_as_a_whole_and_by_no_part(row: Combination) -> None:
    given = settings(row.settings)
    with pytest.raises(ConfigError) as refused:
        refuse_combinations(given)
    assert row.remedy in str(refused.value)
    assert all(name in str(refused.value) for name in given)
    for name in given:
        refuse_combinations({other: value for other, value in given.items() if other != name})


def test_the_docs_have_the_table() -> None:
    rows = [f"| {' + '.join(f'`{name}`' for name in names)} | {reason} |" for names, reason, _ in UNSUPPORTED]
    table = "\n".join(["| together | why not |", "| --- | --- |", *rows])
    assert table in (Path(__file__).parents[2] / "docs/combinations.md").read_text()
