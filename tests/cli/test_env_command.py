"""`dream-trainer env`: what is there, and no secret."""

import json

import pytest
import torch

from tests.api import __version__, main


def test_it_says_settings_and_no_secret(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")  # which PyTorch's report sets, and leaves set
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    for name in ("WANDB_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_URI", "DATABASE_PASSWORD"):
        monkeypatch.setenv(name, "hush-hush")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert main(["env", "--json"]) == 0
    facts = json.loads(out := capsys.readouterr().out)
    assert (facts["packages"]["dream_trainer"], facts["machine"]["torch_version"]) == (__version__, torch.__version__)
    assert facts["variables"]["NCCL_DEBUG"] == "WARN"
    assert "hush" not in out + text
    assert f"PyTorch version: {torch.__version__}" in text
    for name, value in (facts["packages"] | facts["variables"]).items():
        assert any(line.split() == [name, value] for line in text.splitlines())
