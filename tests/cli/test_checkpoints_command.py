"""`dream-trainer checkpoints` as one types it: tables for people, JSON for programs, one line and an exit code for
errors."""

import fcntl
import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.api import list_checkpoints, main
from tests.checkpoint.states import DESCRIPTION, flip, save

METRICS: Mapping[int, Any] = {1: 5.0, 2: 1.0, 3: 4.0, 4: math.nan, 5: None, 6: 2.0}


def tensors(step: int) -> dict[str, Tensor]:
    return {
        "models.net.weight": torch.full((3, 4), float(step)),
        "models.net.steps": torch.tensor(step),
        "models.net.fixed": torch.ones(5, dtype=torch.bfloat16),
        "optimizers.adam.net.weight.exp_avg": torch.zeros(3, 4),
        "callbacks.EMA.0.net.weight": torch.full((3, 4), -1.0),
    }


def save_step(run: Path, step: int, **changed: Any) -> Path:
    description = {
        **DESCRIPTION,
        "epoch": step // 2,
        "samples_seen": 64 * step,
        "mesh_shape": {"dp_replicate": 1, "dp_shard": 2},
        "config": {"seed": 0, "optimizer": {"lr": step / 10}},
        "metrics": {} if METRICS.get(step) is None else {"val/loss": METRICS[step]},
    }
    given: dict[str, Any] = {
        "tensors": tensors(step),
        "shared": {"extra_state": {"net": {}}, "optimizers": {"adam": {}}},
        "description": description,
    }
    return save(run / "checkpoints", step, **given | changed)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of six whole checkpoints."""
    run = tmp_path / "run"
    for step in METRICS:
        save_step(run, step)
    return run


def add_what_is_not_whole(run: Path) -> None:
    """A directory of each kind that is no whole checkpoint."""
    root = run / "checkpoints"
    paths = {step: save_step(run, step) for step in (7, 8, 9, 11)}  # first: a save tidies up what killed jobs left
    (paths[7] / "manifest.json").write_text("")
    paths[8].rename(root / ".aside-0123abcd-step_00000008")
    paths[9].rename(root / ".step_00000009.replaced-0123456789abcdef")
    (root / ".step_00000010.tmp-0123456789abcdef").mkdir()
    newer = paths[11] / "manifest.json"
    newer.write_text(newer.read_text().replace('"schema_version": 1', '"schema_version": 99'))
    (root / "notes").mkdir()


def names(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


def steps(run: Path) -> set[int]:
    return {manifest.step for manifest in list_checkpoints(run / "checkpoints")}


class Printed:
    """Runs a command and keeps what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object, code: int = 0) -> str:
        self._capsys.readouterr()
        assert main(["checkpoints", *map(str, arguments)]) == code
        printed = self._capsys.readouterr()
        if code:
            return printed.err or printed.out
        assert printed.err == ""
        return printed.out

    def json(self, *arguments: object, code: int = 0) -> Any:
        def refuse(constant: str) -> None:
            raise ValueError(f"{constant} is not JSON")

        return json.loads(self(*arguments, "--json", code=code), parse_constant=refuse)

    def error(self, *arguments: object, code: int = 1) -> str:
        """The one line of a failed command."""
        line = self(*arguments, code=code)
        assert line.startswith("error: ")
        assert line.count("\n") == 1
        return line


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Printed:
    return Printed(capsys)


def test_ls_shows_a_line_for_each_checkpoint(run: Path, command: Printed) -> None:
    lines = command("ls", run).splitlines()
    assert lines[0] == str(run / "checkpoints")
    assert lines[1].split() == "step epoch samples metrics size ranks mesh age state".split()
    assert len(lines) == 8
    assert re.fullmatch(r"  2 +1 +128 +val/loss 1 +[\d.]+ KiB +1 +dp_shard 2 +\d:\d\d +whole", lines[3])
    assert "val/loss nan" in lines[5]
    again = command("ls", run / "checkpoints").splitlines()
    assert [line.split()[:6] for line in again] == [line.split()[:6] for line in lines]  # the ages may differ


def test_ls_tells_whole_from_damaged_unfinished_and_aside(run: Path, command: Printed) -> None:
    add_what_is_not_whole(run)
    found = command.json("ls", run)
    assert found["root"] == str(run / "checkpoints")
    states = {entry["step"]: entry["state"] for entry in found["checkpoints"]}
    assert states == {
        **dict.fromkeys(range(1, 7), "whole"),
        7: "damaged",
        8: "aside",
        9: "replaced",
        10: "unfinished",
        11: "unreadable",
    }
    second, fourth = found["checkpoints"][1], found["checkpoints"][3]
    assert second["metrics"] == {"val/loss": 1.0}
    assert fourth["metrics"] == {"val/loss": "NaN"}
    assert (second["samples_seen"], second["epoch"], second["world_size"]) == (128, 1, 1)
    assert second["size"] == sum(file.stat().st_size for file in Path(second["path"]).iterdir())
    assert "manifest.json is damaged" in found["checkpoints"][6]["fault"]
    said = command("ls", run)
    assert "step_00000007: " in said
    assert "schema version 99" in said


def test_show_tells_what_a_checkpoint_holds(run: Path, command: Printed) -> None:
    said = command("show", run / "checkpoints" / "step_00000002")
    for line in (
        r"step +2",
        r"samples +128",
        r"val/loss +1",
        r"model net +3 +18 +66 B",
        r"optimizer adam +1 +12 +48 B",
        r"callback EMA 0 +1 +12 +48 B",
        r"optimizer\.lr +0\.2",
        rf"torch +{re.escape(torch.__version__)}",
    ):
        assert re.search(rf"^  {line}$", said, re.MULTILINE), line
    assert "exp_avg" not in said
    assert re.search(r"models\.net\.weight +\[3, 4\] +float32", command("show", run, "--tensors"))


def test_show_takes_a_runs_newest_whole_checkpoint_or_a_step(run: Path, command: Printed) -> None:
    add_what_is_not_whole(run)
    assert command.json("show", run)["step"] == 6
    shown = command.json("show", run, "--step", 4)
    assert shown["step"] == 4
    assert shown["metrics"] == {"val/loss": "NaN"}
    assert shown["tensors"]["models.net.fixed"] == {"shape": [5], "dtype": "bfloat16"}
    assert shown["config"] == {"seed": 0, "optimizer": {"lr": 0.4}}
    assert shown["holds"]["model net"] == {"tensors": 3, "bytes": 66, "elements": 18}
    assert set(shown["files"]) == {path.name for path in Path(shown["path"]).iterdir()} - {"manifest.json"}


def test_verify_reads_every_file_and_its_exit_code_tells(run: Path, command: Printed) -> None:
    assert command("verify", run).count(": whole\n") == 6
    assert command.json("verify", run)["whole"] is True
    third = run / "checkpoints" / "step_00000003"
    flip(third / "__0_0.distcp")
    flip(third / "shared.json")
    assert "step_00000003  " not in command("ls", run)  # sizes fit: listing does not read contents
    said = command("verify", run, code=1)
    assert said.count(": whole\n") == 5
    assert f"{third / '__0_0.distcp'} is damaged" in said
    assert f"{third / 'shared.json'} is damaged" in said
    found = command.json("verify", third, code=1)
    assert found["whole"] is False
    assert [len(checkpoint["faults"]) for checkpoint in found["checkpoints"]] == [2]
    assert command("verify", run / "checkpoints" / "step_00000004").endswith("whole\n")
    (third / "manifest.json").unlink()
    assert "manifest.json is missing" in command("verify", third, code=1)


def test_diff_tells_counters_metrics_config_and_values(run: Path, command: Printed) -> None:
    root = run / "checkpoints"
    found = command.json("diff", root / "step_00000001", root / "step_00000003", code=1)
    assert found["manifest"] == {"step": [1, 3], "epoch": [0, 1], "samples_seen": [64, 192]}
    assert found["metrics"] == {"val/loss": [5.0, 4.0]}
    assert found["config"] == ["optimizer.lr: 0.1 -> 0.3"]
    assert found["tensors"] == {
        "only_in_a": [],
        "only_in_b": [],
        "other_kind": {},
        "same_kind": 5,
        "equal": 3,
        "max_difference": {"models.net.weight": 2.0, "models.net.steps": 2.0},
    }
    said = command("diff", root / "step_00000001", run, code=1)
    assert re.search(r"models\.net\.weight +5$", said, re.MULTILINE)
    assert "3 of 5 tensors in both are equal bit for bit" in said
    assert command.json("diff", run, run)["tensors"]["max_difference"] == {}


def test_diff_without_values_reads_no_shard(run: Path, command: Printed) -> None:
    root = run / "checkpoints"
    flip(root / "step_00000001/__0_0.distcp")
    found = command.json("diff", root / "step_00000001", run, "--no-values", code=1)
    assert found["tensors"]["equal"] is None
    assert "values were not compared" in command("diff", root / "step_00000001", run, "--no-values", code=1)
    assert "__0_0.distcp is damaged" in command.error("diff", root / "step_00000001", run)


RULES = ("--keep-last", 1, "--keep-best", 1, "--metric", "val/loss")


@pytest.mark.pitfall(30)
def test_prune_keeps_what_the_rules_name_and_tells_what_it_leaves_alone(run: Path, command: Printed) -> None:
    add_what_is_not_whole(run)
    before = names(run)
    dry = command("prune", run, *RULES, "--dry-run")
    assert names(run) == before
    said = command("prune", run, *RULES)
    assert steps(run) == {2, 6}
    gone = {f"step_{step:08d}" for step in (1, 3, 4, 5)}
    assert before - names(run) == gone
    assert dry.replace("would remove", "removed") == said
    assert set(re.findall(r"^  (step_\d+) ", said, re.MULTILINE)) == gone
    assert "removed 4" in said
    assert "kept steps: 2, 6" in said
    assert "left alone: step_00000007 (damaged); --damaged removes it" in said
    assert "left alone: .aside-0123abcd-step_00000008 (aside); --aside removes it" in said
    assert "left alone: step_00000011 (unreadable)\n" in said


def test_prune_removes_damaged_and_aside_ones_on_demand_and_never_others(run: Path, command: Printed) -> None:
    add_what_is_not_whole(run)
    before = names(run)
    command("prune", run, "--damaged")
    assert before - names(run) == {"step_00000007", ".step_00000010.tmp-0123456789abcdef"}
    command("prune", run / "checkpoints", "--aside")
    assert {".step_00000009.replaced-0123456789abcdef", "notes", "step_00000011"} < names(run)
    assert ".aside-0123abcd-step_00000008" not in names(run)
    assert steps(run) == set(METRICS)
    assert "removed 0 (" in command("prune", run, "--damaged", "--aside")


def test_prune_asks_the_run_and_the_name_which_values_are_better(tmp_path: Path, command: Printed) -> None:
    def run_of(name: str, **parameters: Any) -> Path:
        for step, value in ((1, 0.5), (2, 0.9), (3, 0.7)):
            metrics = {"val/accuracy": value, "val/score": value}
            described = {**DESCRIPTION, "metrics": metrics, "config": {"checkpoint_parameters": parameters}}
            save_step(tmp_path / name, step, description=described)
        return tmp_path / name

    def kept(path: Path, metric: str, *arguments: Any) -> list[int]:
        said = command("prune", path, "--dry-run", "--keep-best", 1, "--metric", metric, *arguments)
        return [int(step) for step in re.findall(r"\d+", said.rpartition("kept steps:")[2])]

    plain = run_of("plain")
    assert kept(plain, "val/accuracy") == [2, 3]
    assert kept(plain, "val/accuracy", "--mode", "min") == [1, 3]
    assert "--metric='val/score' does not say" in command.error(
        "prune", plain, "--keep-best", 1, "--metric", "val/score", code=2
    )
    assert kept(run_of("said", best_metric="val/score", best_mode="max"), "val/score") == [2, 3]
    old = run_of("old", best_metric="val/accuracy", best_mode="min")
    arguments = ("--keep-best", 1, "--metric", "val/accuracy")
    assert "took min for best of val/accuracy, and its name says max" in command.error("prune", old, *arguments, code=2)


def test_prune_refuses_while_a_job_holds_the_run(run: Path, command: Printed) -> None:
    with (run / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "a live job writes to" in command.error("prune", run / "checkpoints", "--keep-last", 1)
        command("prune", run, "--keep-last", 1, "--dry-run")
        assert steps(run) == set(METRICS)


def test_export_writes_weights_and_tells_the_files(run: Path, tmp_path: Path, command: Printed) -> None:
    out = tmp_path / "out"
    said = command("export", run, out, "--dtype", "bf16", "--max-shard-size", "20B")
    assert str(out / "model-00001-of-00002.safetensors") in said
    assert (out / "model.safetensors.index.json").exists()
    assert load_file(out / "model-00001-of-00002.safetensors")["weight"].dtype == torch.bfloat16
    lines = command("export", run, out, "--step", 3, "--overwrite").splitlines()
    assert [line.split()[0] for line in lines[2:]] == [str(out / "model.safetensors")]
    assert (load_file(out / "model.safetensors")["weight"] == 3).all()
    command("export", run / "checkpoints" / "step_00000002", out / "ema.safetensors", "--weights", "ema")
    assert (load_file(out / "ema.safetensors")["weight"] == -1).all()
    command("export", run, tmp_path / "w.pt", "--renames", "^", "net.", "fixed", "free", "--model", "net")
    assert set(torch.load(tmp_path / "w.pt", weights_only=True)) == {"net.weight", "net.steps", "net.free"}


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ("export {run} empty", 1, "exists already"),
        ("export {run} {run}/checkpoints/hf", 1, "belongs to a run's checkpoints"),
        ("export {run} b --model other", 1, "has no model 'other'. It has 'net'"),
        ("export {run} b --max-shard-size big", 2, "is not a size"),
        ("prune {run}", 2, "no rule was given"),
        ("prune {run} --keep-best 1", 2, "needs a metric"),
        ("ls absent", 1, "is not a directory"),
        ("verify none", 1, "has no checkpoints"),
        ("show {run} --step 99", 1, "no whole checkpoint of step 99. There are steps [1, 2, 4"),
        ("show {third}", 1, "manifest.json is damaged"),
        ("show empty", 1, "no whole checkpoint"),
    ],
)
def test_a_mistake_is_one_line(
    run: Path, tmp_path: Path, command: Printed, arguments: str, code: int, told: str
) -> None:
    third = run / "checkpoints" / "step_00000003"
    (third / "manifest.json").write_text("{")
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    (tmp_path / "none").mkdir()
    before = names(run)
    assert told in command.error(*arguments.format(run=run, third=third).split(), code=code)
    assert names(run) == before
    assert not (tmp_path / "b").exists()


def test_help_waits_for_no_torch() -> None:
    program = (
        "import sys; from dream_trainer.cli.main import main; code = main(['checkpoints', 'prune', '--help'])\n"
        "assert code == 0 and 'torch' not in sys.modules, sorted(name for name in sys.modules if 'torch' in name)[:5]"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
