"""`dream-trainer data bench`: what it counts is what the loaders give; times it only shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dream_trainer.cli.main import main

PROGRAM = """
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset
from dream_trainer.data import DistributedDataLoader, Mixture, PackedRows

def plain():
    return DataLoader(TensorDataset(torch.arange(400)), batch_size=4, shuffle=True), None

class Source(list):
    lengths = np.full(50, 4)

def packed():
    sources = {name: Source([list(range(4))] * 50) for name in ("code", "docs")}
    rows = PackedRows(Mixture(sources, {"code": 1, "docs": 1}, seed=1), 10, block_size=20)
    return DistributedDataLoader(rows, 2)

def several():
    return {"text": packed(), "images": [{"x": torch.zeros(3, 2)}] * 5}

def empty():
    return []
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "loaders.py"
    path.write_text(PROGRAM)
    return str(path)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[str]]:
    """The cells of the table, by row."""
    assert main(["data", "bench", *arguments, "--batches", "20"]) == 0
    rows = [re.split(r"\s*[│┃]\s*", line)[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    return {name: cells for name, *cells in rows}


def number(cell: str) -> float:
    return float(re.sub(r"[^\d.]", "", cell))


def test_a_plain_loader_is_read_beside_another_one(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = shown(capsys, f"{program}:plain")
    ours, plain = map(number, rows["batches per second"])
    assert ours > 0
    assert plain > 0
    assert number(rows["samples per second"][0]) == pytest.approx(4 * ours, rel=0.01)
    assert "tokens per second" not in rows


def test_packing_and_sources_are_counted(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = shown(capsys, f"{program}:packed")
    # Two whole documents of 4 tokens fit into a row of 10.
    assert rows["share of real tokens"][0] == "80.00%"
    tokens, samples = (number(rows[f"{unit} per second"][0]) for unit in ("tokens", "samples"))
    assert tokens == pytest.approx(8 * samples, rel=0.01)
    # Thirty batches of two rows of two documents.
    drawn = [number(rows[f"{name}/samples drawn"][0]) for name in ("code", "docs")]
    assert 100 <= sum(drawn) <= 140
    assert "documents drawn" not in rows


def test_waits_are_told_by_loader(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = shown(capsys, f"{program}:several")
    assert {"waited for text, in all", "waited for images, in all"} <= rows.keys()
    assert len(rows["batches per second"]) == 1, "a group has no one dataset to read beside it"


def test_token_files_are_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index in range(30):
        (tmp_path / f"{index}.txt").write_text("some words " * (index + 1))
    assert main(["data", "tokenize", str(tmp_path / "*.txt"), "--output", str(tmp_path / "tokens")]) == 0
    capsys.readouterr()
    rows = shown(capsys, str(tmp_path / "tokens"), "--row-length", "64", "--batch-size", "2", "--workers", "2")
    assert number(rows["share of real tokens"][0]) > 90
    shares = [number(rows[f"waited for worker {worker}"][0]) for worker in range(2)]
    assert sum(shares) == pytest.approx(100, abs=1)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("{program}:missing", "has no function 'missing'"),
        ("{program}:empty", "0 batches"),
        ("nowhere.bin", "nowhere.bin"),
        ("nowhere.py:loader", "nowhere.py"),
        ("no_such_module:loader", "no_such_module"),
    ],
)
def test_what_cannot_be_read_is_named(
    target: str, message: str, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "bench", target.format(program=program)]) in (1, 2)
    assert message in capsys.readouterr().err
