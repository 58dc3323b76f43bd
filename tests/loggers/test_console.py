"""ConsoleLogger and how numbers are spelled."""

import math
from pathlib import Path

import pytest

from tests.api import ConsoleLogger, Stamp, format_bytes, format_count, format_duration, format_number


@pytest.mark.pitfall(47)
def test_the_console_gets_one_plain_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    logger = ConsoleLogger()
    logger.open(tmp_path, {}, 7)
    logger.log({"train/loss": 1.23456, "train/lr": 3e-4}, Stamp(1200, 2, 38400, 0.0))
    said = capsys.readouterr().out
    assert said.splitlines()[1] == "epoch 2 | step 1200 | train/loss 1.235 | train/lr 0.0003"
    assert "resumed at step 7" in said
    assert "\x1b" not in said
    assert "\r" not in said


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.0, "3"),
        (48000.0, "48,000"),
        (1.23456, "1.235"),
        (0.012345, "0.01235"),
        (3e-7, "3e-07"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_have_four_significant_digits(value: float, text: str) -> None:
    assert format_number(value) == text


def test_durations_counts_and_bytes_are_readable() -> None:
    assert [format_duration(s) for s in (0, 42.4, 725, 10800, 187200)] == [
        "0:00",
        "0:42",
        "12:05",
        "3:00:00",
        "2d 4:00:00",
    ]
    assert [format_count(c) for c in (0, 950, 12345, 124e6, 7.24e9, 2e12)] == [
        "0",
        "950",
        "12.3 K",
        "124 M",
        "7.24 B",
        "2 T",
    ]
    assert [format_bytes(b) for b in (512, 1536, 2**40)] == ["512 B", "1.50 KiB", "1.00 TiB"]
