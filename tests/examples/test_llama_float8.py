"""Float8 trains the llama example as float32 does, and a stopped run goes on to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.examples.launch import ROOT, run_script

STEPS = 50
RUN = (
    "--model tiny --seq-len 64 --training-parameters.global-batch-size 16 --learning-rate 3e-4 "
    f"--training-parameters.max-steps {STEPS} --training-parameters.val-every-n-steps 1000 "
    "--checkpoint-parameters.save-every-n-steps 20 --checkpoint-parameters.keep-last 3 --export-to learned "
    "--logger-parameters.log-every-n-steps 1 --device-parameters.device cpu"
)


def losses(directory: Path, options: str = "", n_processes: int = 1) -> list[float]:
    """By step."""
    directory.mkdir(exist_ok=True)
    script = ROOT / "examples/llama/train.py"
    run_script(script, *f"{RUN} {options}".split(), cwd=directory, n_processes=n_processes, timeout=400)
    records = map(json.loads, (directory / "runs/examples/llama/tiny/metrics.jsonl").read_text().splitlines())
    by_step = {record["step"]: record["train/loss"] for record in records if "train/loss" in record}
    return [by_step[step] for step in range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def float32(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("float32"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("recipe", "n_processes", "options"),
    [("tensorwise", 1, ""), ("rowwise", 1, ""), ("tensorwise", 2, "--float8-parameters.all-gather")],
)
def test_fifty_steps_are_within_two_thousandths_of_float32(
    float32: list[float], recipe: str, n_processes: int, options: str, tmp_path: Path
) -> None:
    pytest.importorskip("torchao")
    wanted = f"--device-parameters.float8 {recipe} --float8-parameters.emulate {options}"
    whole = losses(tmp_path / "whole", wanted, n_processes)
    assert float32[0] - float32[-1] > 0.8
    assert whole != float32
    assert whole == pytest.approx(float32, rel=0, abs=2e-3)

    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    for step in (40, 50):
        shutil.rmtree(tmp_path / f"stopped/runs/examples/llama/tiny/checkpoints/step_{step:08}")
    shutil.rmtree(tmp_path / "stopped/learned")
    assert losses(tmp_path / "stopped", wanted, n_processes) == whole
    learned = [(tmp_path / name / "learned/model.safetensors").read_bytes() for name in ("whole", "stopped")]
    assert learned[0] == learned[1]
