"""The GPT example as the demo runs it, with a tiny model: shows its way, resumes, and does not depend on the ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.examples.launch import ROOT, run_script

TRAIN = ROOT / "examples" / "gpt" / "train.py"
TINY = (
    "--model.n-layers 2 --model.n-heads 2 --model.dim 16 --model.window 32 --sample-bytes 8 --warmup-steps 2 "
    "--training-parameters.val-steps-per-epoch 2 --training-parameters.val-every-n-steps 4 "
    "--checkpoint-parameters.save-every-n-steps 4 --logger-parameters.log-every-n-steps 1 --device-parameters.device cpu"
).split()
RUN = Path("runs/examples/gpt/stdlib")


def train(cwd: Path, max_steps: int, n_processes: int) -> str:
    cwd.mkdir(exist_ok=True)
    return run_script(TRAIN, *TINY, "--training-parameters.max-steps", str(max_steps), cwd=cwd, n_processes=n_processes)


def metric(cwd: Path, name: str) -> dict[int, float]:
    records = [json.loads(line) for line in (cwd / RUN / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record[name] for record in records if name in record}


def test_two_ranks_train_show_resume_and_draw(tmp_path: Path) -> None:
    first = train(tmp_path, 6, 2)
    for shown in (
        "## Setup order",
        "| 1 | configure_models |",
        "model: ",
        "32 samples = 16 micro-batch x 1 accumulated x 2 data-parallel",
        "tokens/s",
        "eta",
        "validation | step 4 | val/loss",
        f"checkpoint | step 4 | {RUN}/checkpoints/step_00000004",
        "The model writes:",
        "byte-unigram entropy of the validation text",
        f"loss curve: {RUN}/loss.png",
        "finished at step 6",
    ):
        assert first.count(shown) == 1 or (shown in first and shown in {"tokens/s", "eta", "model: "}), shown
    assert "\x1b" not in first
    assert "\r" not in first
    assert (tmp_path / RUN / "loss.png").read_bytes().startswith(b"\x89PNG")
    again = train(tmp_path, 6, 2)
    assert "resumed at step 6" in again
    assert "finished at step 6" in again
    assert "step 7" not in again
    longer = train(tmp_path, 9, 2)
    assert "resumed at step 6" in longer
    assert "finished at step 9" in longer
    assert list(metric(tmp_path, "train/loss")) == list(range(1, 10))


def test_the_ranks_do_not_change_what_is_learned(tmp_path: Path) -> None:
    one = train(tmp_path / "one", 6, 1)
    train(tmp_path / "two", 6, 2)
    assert "32 samples = 16 micro-batch x 2 accumulated x 1 data-parallel" in one
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        alone, together = metric(tmp_path / "one", name), metric(tmp_path / "two", name)
        assert together == pytest.approx(alone, rel=1e-5)


def test_a_batch_that_does_not_divide_is_named_before_training(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="global_batch_size=30 is not a multiple"):
        run_script(TRAIN, *TINY, "--training-parameters.global-batch-size", "30", cwd=tmp_path)
