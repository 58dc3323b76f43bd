"""The command for a GPU keeps what it has when a part fails, and its rehearsal takes the same ways."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.launch import ROOT, imported


def test_a_failed_part_is_named_and_others_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write = "import pathlib, sys; print('said'); pathlib.Path(sys.argv[1]).write_text('{\"rate\": 2.5}')"
    with imported("tools.gpu") as gpu:
        chosen = [
            gpu.Part("good", ["-c", write, "{json}"], 60),
            gpu.Part("bad", ["-c", "raise SystemExit('broken')"], 60),
            gpu.Part("late", ["-c", f"{write}; import time; time.sleep(600)", "{json}"], 5),
        ]
        assert gpu.run_all(chosen, tmp_path, is_dry=True) == 2
        assert gpu.run_all(chosen[:1], tmp_path / "none", is_dry=True, seconds=0) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["is_rehearsal"]
    assert [part["failure"] for part in found["parts"]] == [None, "exit status 1", "not done after 5 s"]
    assert [part["figures"] for part in found["parts"]] == [{"rate": 2.5}, None, {"rate": 2.5}]
    page = (tmp_path / "gpu.md").read_text()
    assert "| good | done |" in page
    assert "broken" in page
    assert "no time was left" in (tmp_path / "none/gpu.md").read_text()
    assert "late: not done after 5 s" in capsys.readouterr().out


def test_all_parts_together_take_at_most_nine_minutes_and_a_rehearsal_runs_the_same_programs() -> None:
    with imported("tools.gpu") as gpu:
        real, dry = gpu.parts(is_dry=False), gpu.parts(is_dry=True)
        assert sum(part.seconds for part in real) <= gpu.SECONDS == 540
    assert [part.name for part in real] == [part.name for part in dry]
    for one, other in zip(real, dry, strict=True):
        programs = [[word for word in part.arguments if word.endswith((".py", "pytest"))] for part in (one, other)]
        assert programs[0] == programs[1]
        options = [{word for word in part.arguments if word.startswith("--")} for part in (one, other)]
        assert {word.replace("--no-", "--") for word in options[1]} - {"--on-cpu"} == options[0]


def test_the_rehearsal_of_saves_runs_to_its_end(tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "tools/gpu.sh"), "--dry", "--only", "saves", "--out", str(tmp_path)]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (part,) = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert len(part["figures"]["held_seconds"]) == 2
    assert part["figures"]["step_seconds"] > 0
