"""JSONLLogger and CSVLogger: valid files at any moment, one continuous curve over kills and resumes."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.api import CSVLogger, JSONLLogger, Logger, Stamp, read_jsonl
from tests.loggers.readers import csv_rows, stamp

KINDS: dict[str, tuple[type[Logger], Callable[[Path], list[dict[str, Any]]]]] = {
    "jsonl": (JSONLLogger, read_jsonl),
    "csv": (CSVLogger, csv_rows),
}


def write(run_dir: Path, steps: range, resumed_step: int | None = None, *, kind: str = "jsonl") -> None:
    logger = KINDS[kind][0]()
    logger.open(run_dir, {"seed": 1}, resumed_step)
    for step in steps:
        logger.log({"train/loss": 1 / step}, stamp(step))
    logger.close()


def test_a_line_has_the_stamp_and_the_metrics(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "run", range(3, 4))
    lines = (tmp_path / "deep" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 3, "epoch": 0, "samples": 96, "time": 1.5e9 + 3, "train/loss": 1 / 3}
    ]


@pytest.mark.pitfall(36)
def test_what_is_not_finite_is_valid_json_and_comes_back(tmp_path: Path) -> None:
    logger = JSONLLogger()
    logger.open(tmp_path, {}, None)
    logger.log({"a": math.nan, "b": math.inf, "c": -math.inf, "d": -0.5}, Stamp(1, 0, 1, 0.0))
    logger.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    (record,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert math.isnan(record["a"])
    assert (record["b"], record["c"], record["d"]) == (math.inf, -math.inf, -0.5)


@pytest.mark.pitfall(44)
@pytest.mark.parametrize("resumed_step", [0, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_and_resumed_run_is_one_curve_of_every_step(kind: str, resumed_step: int, tmp_path: Path) -> None:
    write(tmp_path, range(1, 10), kind=kind)
    with (tmp_path / f"metrics.{kind}").open("a") as file:
        file.write('{"step": 10, "epo' if kind == "jsonl" else "10,2,3")  # the kill came in the middle of a line
    write(tmp_path, range(resumed_step + 1, 13), resumed_step, kind=kind)
    records = KINDS[kind][1](tmp_path / f"metrics.{kind}")
    assert [int(record["step"]) for record in records] == list(range(1, 13))
    assert [float(record["train/loss"]) for record in records] == [1 / step for step in range(1, 13)]
    assert [path.name for path in tmp_path.iterdir()] == [f"metrics.{kind}"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_from_nothing_keeps_the_earlier_file(kind: str, tmp_path: Path) -> None:
    for last in (3, 4, 5):
        write(tmp_path, range(1, last), kind=kind)
    lengths = {path.name: len(KINDS[kind][1](path)) for path in tmp_path.iterdir()}
    assert lengths == {f"metrics.{kind}": 4, f"metrics.1.{kind}": 2, f"metrics.2.{kind}": 3}


def test_a_metric_that_comes_later_adds_a_column_and_the_file_stays_valid(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.open(tmp_path, {}, None)
    path = tmp_path / "metrics.csv"
    assert csv_rows(path) == []
    logger.log({"a": 0.1}, Stamp(1, 0, 8, 2.5))
    assert csv_rows(path) == [{"step": "1", "epoch": "0", "samples": "8", "time": "2.5", "a": "0.1"}]
    logger.log({"b, with a comma": math.nan, "a": -math.inf}, Stamp(2, 0, 16, 3.5))
    logger.log({"b, with a comma": 1e-300}, Stamp(3, 1, 24, 4.5))
    rows = csv_rows(path)
    assert [row["a"] for row in rows] == ["0.1", "-inf", ""]
    assert [row["b, with a comma"] for row in rows] == ["", "nan", "1e-300"]
    logger.close()
