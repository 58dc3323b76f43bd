"""What version 0.1.0 wrote: a run goes on from it as 0.1.0 itself went on, and the commands read it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dream_trainer as dt
from tests.api import main
from tests.checkpoint.states import assert_same_bits
from tests.checkpoint.written_by_0_1.run import LAST_STEP, STOP_AFTER, Network, arithmetic, expected, put_run, train
from tests.worlds import run_world

NAMES = ["one_rank", "two_ranks", "two_replicas"]
RANKS = {"one_rank": 1, "two_ranks": 2, "two_replicas": 2}


def go_on(name: str, directory: str, replicated: bool) -> dict[str, Any]:
    """On each rank: resumes the copy in `directory`, replicated or sharded, and trains to the end."""
    os.chdir(directory)
    return train(name, replicated=replicated)


def assert_same_end(result: dict[str, Any], end: dict[str, Tensor], told: dict[str, Any]) -> None:
    """Bit for bit where sums are made as they were made then; another processor or PyTorch rounds otherwise."""
    found = json.loads(json.dumps(result["told"]))
    made_by = told.pop("arithmetic")
    if made_by == arithmetic():
        assert_same_bits(result["tensors"], end)
        assert found == told
        return
    assert result["tensors"].keys() == end.keys()
    for name, value in end.items():
        torch.testing.assert_close(result["tensors"][name], value, rtol=1e-7, atol=1e-9)
    assert_close(found, told)


def assert_close(found: Any, before: Any) -> None:
    """As `==`, but for the last digits of numbers. Metrics of torchmetrics are float32."""
    if isinstance(before, dict):
        assert found.keys() == before.keys()
        for name, value in before.items():
            assert_close(found[name], value)
    elif isinstance(before, list):
        assert len(found) == len(before)
        for one, other in zip(found, before, strict=True):
            assert_close(one, other)
    else:
        assert found == pytest.approx(before, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_as_the_version_that_wrote_it_went_on(name: str, tmp_path: Path) -> None:
    run_dir = put_run(name, tmp_path, name)
    loaded, end, told = expected(name)
    results = run_world(go_on, RANKS[name], name, str(tmp_path), name == "two_replicas")
    assert results[0]["told"]["global_step"] == LAST_STEP
    assert_same_bits(results[0]["loaded"], loaded)
    assert_same_end(results[0], end, told)
    assert [path.name for path in sorted((run_dir / "checkpoints").iterdir())] == [
        f"step_{step:08d}" for step in (STOP_AFTER, 8, LAST_STEP)
    ]


@pytest.mark.parametrize(
    ("name", "ranks", "replicated"),
    [
        ("one_rank", 2, False),
        pytest.param("one_rank", 2, True, marks=pytest.mark.slow),
        ("two_ranks", 1, False),
        pytest.param("two_ranks", 2, True, marks=pytest.mark.slow),
        ("two_replicas", 1, False),
        pytest.param("two_replicas", 2, False, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_in_another_layout(name: str, ranks: int, replicated: bool, tmp_path: Path) -> None:
    put_run(name, tmp_path, name)
    loaded, _, told = expected(name)
    results = run_world(go_on, ranks, name, str(tmp_path), replicated)
    assert_same_bits(results[0]["loaded"], loaded)
    found = results[0]["told"]
    assert found["batches_trained"] == told["batches_trained"]
    assert found["rates"] == told["rates"]
    # What was logged before the restart stays; after it, other ranks draw other dropout.
    then = [line for line in told["lines"] if line["step"] <= STOP_AFTER]
    assert found["lines"][: len(then)] == then
    assert [line["step"] for line in found["lines"]] == [line["step"] for line in told["lines"]]


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_read_it(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(put_run(name, tmp_path, name))
    assert main(["checkpoints", "ls", run, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (row["step"], row["state"], row["world_size"]) == (STOP_AFTER, "whole", RANKS[name])
    assert main(["checkpoints", "verify", run]) == 0
    assert "whole" in capsys.readouterr().out
    assert main(["checkpoints", "show", run, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["versions"]["dream_trainer"] == "0.1.0"
    assert shown["config"]["training_parameters"]["n_epochs"] == 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("which", ["model", "ema"])
def test_its_weights_are_exported_as_they_are(name: str, which: str, tmp_path: Path) -> None:
    run, out = str(put_run(name, tmp_path, name)), tmp_path / "weights.safetensors"
    assert main(["checkpoints", "export", run, str(out), "--weights", which]) == 0
    loaded = expected(name)[0]
    own = {key.removeprefix("model."): value for key, value in loaded.items() if key.startswith("model.")}
    averages = {key.removeprefix("ema."): value for key, value in loaded.items() if key.startswith("ema.")}
    assert_same_bits(load_file(out), own | averages if which == "ema" else own)


@pytest.mark.parametrize("name", NAMES)
def test_its_weights_load_into_a_model(name: str, tmp_path: Path) -> None:
    run_dir = put_run(name, tmp_path, name)
    model = Network().double()
    dt.load_weights(model, run_dir / "checkpoints" / f"step_{STOP_AFTER:08d}")
    loaded = expected(name)[0]
    assert_same_bits(
        {f"model.{key}": value for key, value in model.state_dict().items()},
        {key: value for key, value in loaded.items() if key.startswith("model.")},
    )
