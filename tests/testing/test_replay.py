"""`checkpoints replay`: recorded steps come out again to the bit, and a changed program is found at its first step."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.api import main

ROOT = Path(__file__).parents[2]
PROGRAM = """
import dream_trainer as dt
from tests.testing.programs.common import Small

class Trained(Small):
    def loss(self, batch):
        return super().loss(batch)

if __name__ == "__main__":
    trainer = Trained(
        dt.DreamTrainerConfig(
            project="p", group="g", experiment="e", callbacks=[dt.EMA()],
            training_parameters=dt.TrainingParameters(n_epochs=4, train_batch_size=8, global_batch_size=16),
            checkpoint_parameters=dt.CheckpointParameters(save_every_n_steps=4),
            logger_parameters=dt.LoggerParameters(log_every_n_steps=1),
        )
    )
    trainer.fit()
    trainer.close()
"""


def train(ranks: int, program: str = PROGRAM) -> Path:
    Path("train.py").write_text(program)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    subprocess.run([sys.executable, *torchrun, "train.py"], check=True, capture_output=True)
    return Path("runs/p/g/e")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.parametrize("ranks", [1, 2])
def test_recorded_steps_come_out_again_and_the_run_stays_as_it_is(
    ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(ranks)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["checkpoints", "replay", str(run), "--from", "4", "--to", "14"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"steps 5 to 14 of {run}" in lines[0]
    assert lines[1] == "logged values: 12 of 12 are equal"  # of training, and of the validations after steps 5 and 10
    assert [line.split(":")[0] for line in lines[2:4]] == ["step 8", "step 12"]
    assert lines[-1] == "all is as recorded"
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert not list(Path().glob("dream-trainer-replay-*"))


def test_a_changed_program_is_found_at_its_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    run = train(1)
    changed = PROGRAM.replace("super().loss(batch)", "super().loss(batch) * (2 if self.global_step == 9 else 1)")
    Path("train.py").write_text(changed)
    assert main(["checkpoints", "replay", str(run), "--from", "4", "--to", "12"]) == 1
    told = capsys.readouterr().out
    assert "step 10: train/loss was " in told
    assert "changed since: train.py" in told
    assert "step 8: 12 of 12 tensors are equal bit for bit" in told
    assert "step 12: 12 of 12" not in told
    # Of the two newest checkpoints there is nothing else to say: the change was before them.
    assert main(["checkpoints", "replay", str(run)]) == 0
    capsys.readouterr()


def test_what_cannot_be_replayed_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    run = train(1, PROGRAM.replace("log_every_n_steps=1", "log_every_n_steps=100"))
    for words, told in {
        "--from 5": "no whole checkpoint of step 5. There are steps [4, 8, 12, 16, 20]",
        "--from 8 --to 8": "--to 8 is not among the steps 9 to 20",
        "--from 8 --to 9": "steps 9 to 9 have no checkpoint and no logged value",
        "--program other.py": "there is no program 'other.py'",
        f"--program {ROOT}/tests/programs.py": "programs.py trained nothing of it",
    }.items():
        assert main(["checkpoints", "replay", str(run), *words.split()]) > 0
        assert told in capsys.readouterr().err
