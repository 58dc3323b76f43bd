"""examples/coming_from: a script of another framework and its port report the same numbers, step for step.

Both begin with the weights that the original saved, and take the samples in the dataset's order.
"""

import contextlib
import importlib
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sklearn.datasets  # noqa: F401  # sets an environment variable, which an example's import would do inside a test

from tests.examples.launch import ROOT, modules_of, run_script
from tests.worlds import run_world

EXAMPLES = ROOT / "examples" / "coming_from"
INITIAL = {"pytorch": "initial.pt", "lightning": "initial.pt", "accelerate": "initial.pt", "hf_trainer": "initial"}
PAGES = {name: ROOT / "docs" / "coming-from" / f"{name.replace('_', '-')}.md" for name in INITIAL}
Numbers = dict[str, list[float]]


def run_ports(names: Sequence[str], directory: Path, initial: Path) -> dict[str, Numbers]:
    """What each port reports, from the weights of its original, which ran in `initial`."""
    found: dict[str, Numbers] = {}
    with modules_of(EXAMPLES), contextlib.chdir(directory), contextlib.redirect_stdout(io.StringIO()):
        for name in names:
            module: Any = importlib.import_module(f"{name}_after")
            found[name] = module.main(["--checkpoint-parameters.init-from", str(initial / name / INITIAL[name])])
    return found


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Numbers]]:
    """Where the originals ran, and what they report."""
    directory = tmp_path_factory.mktemp("originals")
    run_script(Path(__file__).parent / "originals.py", str(directory / "found.json"), *INITIAL, cwd=directory)
    return directory, json.loads((directory / "found.json").read_text())


@pytest.fixture(scope="module")
def ported(original: tuple[Path, dict[str, Numbers]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Numbers]:
    return run_ports(list(INITIAL), tmp_path_factory.mktemp("ported"), original[0])


@pytest.mark.parametrize("name", INITIAL)
def test_a_port_learns_alike(name: str, original: tuple[Path, dict[str, Numbers]], ported: dict[str, Numbers]) -> None:
    theirs, ours = original[1][name], ported[name]
    assert len(theirs["train/loss"]) == (24 if name == "hf_trainer" else 32)
    assert theirs["train/loss"][-1] < 0.8 * theirs["train/loss"][0]
    if name != "hf_trainer":
        # The same operations in the same order; a loss that is halved before its backward loses no bit.
        assert ours["train/loss"] == theirs["train/loss"]
    for metric, values in theirs.items():
        # They sum over batches in float32 (and transformers divides by the window's tokens before its backward), we in
        # float64: units in the last place, which the steps after them carry on.
        assert ours[metric] == pytest.approx(values, rel=2e-6), metric


@pytest.mark.parametrize("name", PAGES)
def test_the_table_of_a_page_quotes_both_scripts(name: str) -> None:
    table = PAGES[name].read_text().split("## Line by line")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) > 10
    for row in rows:
        for side, cell in zip(("before", "after"), row, strict=False):  # the second cell may be empty
            script = " ".join((EXAMPLES / f"{name}_{side}.py").read_text().split())
            for quoted in re.findall(r"`([^`]+)`", cell):
                assert quoted in script, f"{name}_{side}.py"


@pytest.mark.slow
def test_two_ranks_have_the_numbers_of_one(
    original: tuple[Path, dict[str, Numbers]], ported: dict[str, Numbers], tmp_path: Path, all_cases: bool
) -> None:
    names = list(INITIAL) if all_cases else ["lightning", "hf_trainer"]
    together = run_world(run_ports, 2, names, tmp_path, original[0])[0]
    for name in names:
        for metric, values in ported[name].items():
            if (name, metric) != ("hf_trainer", "val/loss"):  # which is a mean of means over whatever batches are
                # Gradients of float32 are summed in another order, and AdamW enlarges that where they are small.
                assert together[name][metric] == pytest.approx(values, rel=1e-4), (name, metric)
