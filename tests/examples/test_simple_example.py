"""The example without a class, under torchrun and alone."""

import re
import runpy
from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401  # sets an environment variable, which the example's import would do inside a test

from tests.examples.launch import ROOT, run_script

EXAMPLE = ROOT / "examples" / "simple.py"


def check(said: str, first_line: str) -> None:
    assert said.count(first_line) == 1
    (accuracy,) = re.findall(r"the best epoch's accuracy: (0\.\d+)", said)
    assert float(accuracy) > 0.88


@pytest.mark.slow
def test_the_example_learns_on_two_ranks(tmp_path: Path) -> None:
    check(run_script(EXAMPLE, cwd=tmp_path, n_processes=2), "epoch 1/15  step 20/300  train/loss ")


def test_it_learns_alone_and_started_again_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    check(said, "epoch 1/15  step 40/600  train/loss ")
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out == said[said.index("the best epoch's") :]
