"""`dream-trainer env`: what is there, and no secret."""

import json
import platform

import pytest
import torch

from tests.api import __version__, main


def test_it_says_settings_and_no_secret(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    for name in ("WANDB_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_URI", "DATABASE_PASSWORD"):
        monkeypatch.setenv(name, "hush-hush")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert main(["env", "--json"]) == 0
    out = capsys.readouterr().out
    facts = json.loads(out)
    assert facts["machine"]["dream_trainer"] == __version__
    assert facts["machine"]["python"] == platform.python_version()
    assert facts["pytorch"]["torch"] == torch.__version__
    assert facts["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert facts["variables"]["NCCL_DEBUG"] == "WARN"
    assert "hush" not in out + text
    for group in facts.values():
        for name, value in group.items():
            assert any(line.split() == [name, *str(value).split()] for line in text.splitlines())
