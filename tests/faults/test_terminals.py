"""Terminals that go away or cannot show a name: a run saves and ends by the signal, or goes on to its end."""

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.trainer.small import ROOT

PROGRAM = """
import signal, sys, time, torch, torch.nn as nn
from torch.utils.data import TensorDataset
import dream_trainer as dt
from dream_trainer.simple import Trainer

x = torch.randn(64, 3)
lives = sys.argv[1] == "lives"
if lives:  # nohup
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

def step(model, batch):
    time.sleep(0.01)
    return {"loss": model(batch[0]).square().mean(), "pr\u00e9cision": torch.ones(())}

def tell(trainer, epoch, metrics):
    open(f"epoch {epoch}", "w").close()

trainer = Trainer(
    nn.Linear(3, 1), step=step, train=TensorDataset(x), val=TensorDataset(x), batch_size=8, epochs=int(sys.argv[2]),
    name="caf\u00e9", device="cpu", loggers=dt.LoggerParameters(), progress=True,
    callbacks=[tell, dt.callbacks.Progress(["train/pr\u00e9cision"], refresh_seconds=0.0)],
)
trainer.fit()
print("still here")
"""


def started(directory: Path, *arguments: str, encoding: str = "utf-8") -> tuple[subprocess.Popen[bytes], int]:
    """The program in a terminal that is its own, and the other end of it."""
    ours, theirs = pty.openpty()
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYTHONIOENCODING": encoding,
        "TERM": "xterm",
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=directory,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    return process, ours


def read_until(terminal: int, is_over: object, seconds: float = 60.0) -> str:
    """What is shown until `is_over()`, or the program has ended."""
    text, deadline = b"", time.monotonic() + seconds
    while time.monotonic() < deadline and not is_over():  # type: ignore[operator]
        if select.select([terminal], [], [], 0.05)[0]:
            try:
                text += os.read(terminal, 65536)
            except OSError:  # the other end is closed
                break
    return text.decode()


@pytest.mark.pitfall(101)
@pytest.mark.parametrize("lives", [False, True])
def test_a_closed_terminal_saves_and_ends_a_run_and_under_nohup_it_trains_to_its_end(
    lives: bool, tmp_path: Path
) -> None:
    process, terminal = started(tmp_path, "lives" if lives else "ends", "12" if lives else "10000")
    try:
        shown = read_until(terminal, (tmp_path / "epoch 1").exists)
        assert (tmp_path / "epoch 1").exists(), shown
        os.close(terminal)
        code = process.wait(60)
    finally:
        process.kill()
        process.wait()
    assert sorted((tmp_path / "runs").glob("*/*/*/checkpoints/step_*"))
    if lives:
        assert code == 0
        assert (tmp_path / "epoch 11").exists()
    else:
        assert code == 128 + signal.SIGTERM


@pytest.mark.pitfall(101)
def test_a_terminal_that_cannot_encode_a_name_shows_it_escaped(tmp_path: Path) -> None:
    process, terminal = started(tmp_path, "ends", "2", encoding="ascii")
    try:
        shown = read_until(terminal, lambda: process.poll() is not None)
        os.close(terminal)
        assert process.wait(60) == 0, shown
    finally:
        process.kill()
        process.wait()
    assert "pr\\xe9cision" in shown
    assert "still here" in shown
