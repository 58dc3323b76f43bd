"""JSONLLogger: valid JSON, one continuous curve over kills and resumes."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.api import JSONLLogger, Stamp, read_jsonl, replace_file


def write(run_dir: Path, steps: range, resumed_step: int | None = None) -> None:
    logger = JSONLLogger()
    logger.open(run_dir, {"seed": 1}, resumed_step)
    for step in steps:
        logger.log({"train/loss": 1 / step}, Stamp(step, step // 5, step * 32, 1.5e9 + step))
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


def test_a_line_is_in_the_file_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    logger = JSONLLogger()
    logger.open(tmp_path, {}, None)
    logger.log({"x": 1.0}, Stamp(1, 0, 1, 0.0))
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1
    logger.close()


@pytest.mark.pitfall(44)
@pytest.mark.parametrize("resumed_step", [0, 1, 6, 9])
def test_a_killed_and_resumed_run_is_one_curve_with_every_step_once(tmp_path: Path, resumed_step: int) -> None:
    write(tmp_path, range(1, 10))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "epo')  # the kill came in the middle of a line
    write(tmp_path, range(resumed_step + 1, 13), resumed_step)
    records = read_jsonl(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 13))
    assert [record["train/loss"] for record in records] == [1 / step for step in range(1, 13)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_a_run_from_nothing_keeps_the_earlier_file(tmp_path: Path) -> None:
    for last in (3, 4, 5):
        write(tmp_path, range(1, last))
    lengths = {path.name: len(read_jsonl(path)) for path in tmp_path.glob("*.jsonl")}
    assert lengths == {"metrics.jsonl": 4, "metrics.1.jsonl": 2, "metrics.2.jsonl": 3}


def test_logging_before_opening_says_so() -> None:
    with pytest.raises(RuntimeError, match="open"):
        JSONLLogger().log({}, Stamp(0, 0, 0, 0.0))


def test_several_processes_may_replace_one_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.json"

    def replace_often(text: str) -> None:
        for _ in range(50):
            replace_file(path, text)

    texts = ["a" * 1000, "b" * 1000]
    with ThreadPoolExecutor() as threads:
        for ended in [threads.submit(replace_often, text) for text in texts]:
            ended.result()
    assert path.read_text() in texts
    assert [*tmp_path.iterdir()] == [path]
