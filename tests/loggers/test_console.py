"""ConsoleLogger and how numbers are spelled."""

import math
from collections.abc import Callable
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
    ("spelled", "texts"),
    [
        (format_number, {3.0: "3", 48000.0: "48,000", 1.23456: "1.235", 0.012345: "0.01235", 3e-7: "3e-07"}),
        (format_number, {math.nan: "nan", -math.inf: "-inf"}),
        (format_duration, {0: "0:00", 42.4: "0:42", 725: "12:05", 10800: "3:00:00", 187200: "2d 4:00:00"}),
        (format_count, {0: "0", 950: "950", 12345: "12.3 K", 124e6: "124 M", 7.24e9: "7.24 B", 2e12: "2 T"}),
        (format_bytes, {512: "512 B", 1536: "1.50 KiB", 2**40: "1.00 TiB"}),
    ],
)
def test_numbers_durations_counts_and_bytes_are_readable(
    spelled: Callable[[float], str], texts: dict[float, str]
) -> None:
    assert [spelled(value) for value in texts] == list(texts.values())
