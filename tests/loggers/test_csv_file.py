"""CSVLogger: a file that is a valid table at any moment, one continuous curve over kills and resumes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.api import CSVLogger, Stamp
from tests.loggers.readers import csv_rows


def write(run_dir: Path, steps: range, resumed_step: int | None = None) -> None:
    logger = CSVLogger()
    logger.open(run_dir, {}, resumed_step)
    for step in steps:
        logger.log({"train/loss": 1 / step}, Stamp(step, step // 5, step * 32, 1.5e9 + step))
    logger.close()


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


@pytest.mark.pitfall(44)
@pytest.mark.parametrize("resumed_step", [0, 1, 6, 9])
def test_a_killed_and_resumed_run_is_one_curve_with_every_step_once(tmp_path: Path, resumed_step: int) -> None:
    write(tmp_path, range(1, 10))
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("10,2,3")  # the kill came in the middle of a line
    write(tmp_path, range(resumed_step + 1, 13), resumed_step)
    rows = csv_rows(tmp_path / "metrics.csv")
    assert [int(row["step"]) for row in rows] == list(range(1, 13))
    assert [float(row["train/loss"]) for row in rows] == [1 / step for step in range(1, 13)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_run_from_nothing_keeps_the_earlier_file(tmp_path: Path) -> None:
    write(tmp_path, range(1, 3))
    write(tmp_path, range(1, 5))
    assert {path.name: len(csv_rows(path)) for path in tmp_path.iterdir()} == {"metrics.csv": 4, "metrics.1.csv": 2}
