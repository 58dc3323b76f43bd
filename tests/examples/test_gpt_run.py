"""The GPT example as the demo runs it, with a tiny model: shows its way, and does not depend on the ranks."""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.examples.launch import ROOT, metric, run_script

TRAIN = ROOT / "examples" / "gpt" / "train.py"
TINY = (
    "--model.n-layers 2 --model.n-heads 2 --model.dim 16 --model.window 32 --sample-bytes 8 --schedule.warmup-steps 2 "
    "--training-parameters.val-every-n-steps 4 --checkpoint-parameters.save-every-n-steps 4 "
    "--logger-parameters.log-every-n-steps 1 --device-parameters.device cpu"
).split()
RUN = Path("runs/examples/gpt/stdlib")


def train(cwd: Path, max_steps: int, n_processes: int) -> str:
    arguments = [*TINY, "--training-parameters.max-steps", str(max_steps)]
    return run_script(TRAIN, *arguments, cwd=cwd, n_processes=n_processes)


class Run(NamedTuple):
    """A finished run: where, and what it printed."""

    directory: Path
    said: str


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Five steps on two ranks."""
    directory = tmp_path_factory.mktemp("two")
    return Run(directory, train(directory, 5, 2))


def test_a_run_shows_its_way_in_plain_text_and_draws_its_curve(two_ranks: Run) -> None:
    said = two_ranks.said
    for once in (
        "## Setup order",
        "| 1 | configure_models |",
        "32 samples = 16 micro-batch x 1 accumulated x 2 data-parallel",
        "validation | step 4 | val/loss",
        f"checkpoint | {RUN}/checkpoints/step_00000004",
        "The model writes:",
        "byte-unigram entropy of the validation text",
        f"loss curve: {RUN}/loss.png",
        "finished at step 5",
    ):
        assert said.count(once) == 1, once
    for shown in ("step 5/5 | train/loss", "tokens/s", "eta", "parameters"):
        assert shown in said
    assert "\x1b" not in said
    assert "\r" not in said
    assert (two_ranks.directory / RUN / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_ranks_do_not_change_what_is_learned(two_ranks: Run, tmp_path: Path) -> None:
    assert "32 samples = 16 micro-batch x 2 accumulated x 1 data-parallel" in train(tmp_path, 5, 1)
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        assert metric(two_ranks.directory / RUN, name) == pytest.approx(metric(tmp_path / RUN, name), rel=1e-5)
