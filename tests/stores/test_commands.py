"""`dream-trainer checkpoints` on a run in an object store."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.api import StorePath, main
from tests.stores.jobs import train
from tests.trainer.arithmetic import same_bits
from tests.trainer.small import weights


def test_the_commands_read_a_run_in_a_store(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = train(url, 6)
    address = f"{url}/p/g/e"

    def shown(*arguments: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert main(["checkpoints", *arguments, "--json"]) == code
        return json.loads(capsys.readouterr().out)

    listed = shown("ls", address)["checkpoints"]
    assert [(entry["step"], entry["state"]) for entry in listed] == [(2, "whole"), (4, "whole"), (6, "whole")]
    assert listed[0]["path"] == f"{address}/checkpoints/step_00000002"
    assert shown("show", address, "--step", "4")["step"] == 4
    assert shown("verify", address)["whole"]
    steps = (f"{address}/checkpoints/step_00000002", f"{address}/checkpoints/step_00000004")
    assert shown("diff", *steps, code=1)["manifest"]["step"] == [2, 4]
    assert main(["checkpoints", "export", address, str(tmp_path / "out")]) == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert same_bits(exported, weights(run.model))

    shard = StorePath(address) / "checkpoints/step_00000004/__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.put(bytes(content))
    reports = shown("verify", address, code=1)["checkpoints"]
    assert [report["whole"] for report in reports] == [True, False, True]
    (StorePath(address) / "checkpoints/step_00000006/manifest.json").remove()
    assert [entry["state"] for entry in shown("ls", address)["checkpoints"]] == ["whole", "whole", "unfinished"]
    capsys.readouterr()
    assert main(["checkpoints", "prune", address, "--keep-last", "1", "--damaged"]) == 0
    assert re.findall(r"^  (step_\d+) ", capsys.readouterr().out, re.MULTILINE) == ["step_00000002", "step_00000006"]
    assert (StorePath(address) / "run.json").is_file()
