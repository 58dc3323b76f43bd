"""The search example: killed in the middle of a trial, resumed on two ranks, and gone on with alone."""

import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401  # sets an environment variable, which the example's import would do inside a test

from tests.api import read_jsonl
from tests.examples.launch import EXAMPLES, ROOT, modules_of, run_script

optuna = pytest.importorskip("optuna")
EXAMPLE = EXAMPLES / "search_optuna.py"


@pytest.mark.slow
def test_a_search_that_is_killed_goes_on_with_the_trial_that_was_running_on_other_ranks_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--epochs", "12", "--trials")
    first = tmp_path / "runs/examples/search_optuna/trial_0000"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, str(EXAMPLE), *options, "2"], cwd=tmp_path, env=environment) as process:
        deadline = time.monotonic() + 100
        while not [*first.glob("checkpoints/step_*")] and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
    assert [*first.glob("checkpoints/step_*")]

    said = run_script(EXAMPLE, *options, "2", cwd=tmp_path, n_processes=2)
    assert said.count("trial_0000  complete") == said.count("best of 2: accuracy 0.") == 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *options, "3"])
    with modules_of(EXAMPLES):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out.count("best of 3: accuracy 0.") == 1

    storage = f"sqlite:///{first.parent / 'study.db'}"
    killed, resumed, *others = optuna.load_study(study_name="digits", storage=storage).get_trials()
    assert killed.state.name == "FAIL"
    assert (resumed.params, resumed.user_attrs["run"], resumed.user_attrs["starts"]) == (killed.params, "trial_0000", 2)
    assert [trial.state.is_finished() for trial in others] == [True, True]
    assert sorted(resumed.intermediate_values) == list(range(12))  # with those that were reported before the kill
    steps = [line["step"] for line in read_jsonl(first / "metrics.jsonl") if "val/accuracy" in line]
    assert steps == [20 * epoch for epoch in range(1, 13)]  # none is lost, and none trained twice
