"""`dream-trainer describe`: the trainer's own words, with nothing built and nothing left behind."""

import sys
from pathlib import Path

import pytest

from tests.api import main

PROGRAM = """
from __future__ import annotations
from dataclasses import dataclass
import dream_trainer as dt
import described_beside

@dataclass(kw_only=True)
class Config(dt.DreamTrainerConfig):
    width: int = 3

class Trainer(dt.DreamTrainer):
    config: Config

    def configure_models(self):
        raise RuntimeError("built")

    def configure_optimizers(self): ...
    def configure_dataloaders(self): ...
    def training_step(self, batch, batch_idx): ...

def default_config():
    callbacks = dt.CallbackCollection([dt.EMA()])
    return Config(project="p", group="g", experiment="e", callbacks=callbacks)

def make():
    return Trainer(default_config())

if __name__ == "__main__":
    raise RuntimeError("trained")
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    (tmp_path / "described_beside.py").write_text("")
    (tmp_path / "described.py").write_text(PROGRAM)
    return "described.py"


@pytest.mark.parametrize("name", ["Trainer", "make"])
def test_it_prints_the_setup(name: str, program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", f"{program}:{name}"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# Trainer\n\n## Setup order")
    assert "EMA" in text.split("## Events")[1]
    assert {path.name for path in tmp_path.iterdir()} <= {"described.py", "described_beside.py", "__pycache__"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["described.py"], "Use PROGRAM:NAME"),
        (["no_such_module:Trainer"], "there is no program 'no_such_module'"),
        (["described.py:Trainr"], "described.py has ['Trainer']"),
        (["described.py:Trainer", "--function", "other"], "described.py has no function 'other'"),
    ],
)
def test_what_names_no_trainer_is_one_line(
    arguments: list[str], message: str, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["describe", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
