"""examples/lora.py and examples/dpo.py: what they write, and that nothing frozen is saved again."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from tests.examples.launch import ROOT, run_script

FEW = ("--pretraining-steps", "2", "--training-parameters.max-steps", "3", "--training-parameters.val-every-n-steps")


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def saved_models(run: Path) -> set[str]:
    (metadata,) = run.rglob(".metadata")
    names = FileSystemReader(metadata.parent).read_metadata().state_dict_metadata
    return {name.removeprefix("models.") for name in names if name.startswith("models.")}


def run_here(name: str, *arguments: str, cwd: Path) -> None:
    """Runs an example in this process, which has imported what it needs."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.syspath_prepend(str(ROOT / "examples"))
        patch.setattr(sys, "argv", [name, *arguments])
        importlib.import_module(name).main()
    for module in {"lora", "dpo"} - before:
        sys.modules.pop(module, None)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example ran alone, and left its base."""
    directory = tmp_path_factory.mktemp("lora")
    run_here("lora", *FEW, "2", cwd=directory)
    return directory


def test_lora_saves_less_than_a_hundredth_of_its_base(base: Path) -> None:
    (checkpoint,) = (base / "runs/examples/lora/adapters/checkpoints").glob("step_*")
    assert size(checkpoint) < size(base / "base") / 100
    assert all(".lora_" in name for name in saved_models(base / "runs/examples/lora/adapters"))
    assert (base / "lora.png").read_bytes().startswith(b"\x89PNG")


def test_peft_and_transformers_load_what_lora_wrote(base: Path) -> None:
    tokens = torch.arange(40).view(2, 20)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base / "base"), base / "adapters")
    merged = AutoModelForCausalLM.from_pretrained(base / "merged")
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, rtol=0, atol=1e-5)


def test_dpo_saves_its_policy_and_not_its_reference(base: Path, tmp_path: Path) -> None:
    run_here("dpo", "--base", str(base / "base"), *FEW[2:], "3", cwd=tmp_path)
    assert {name.split(".")[0] for name in saved_models(tmp_path / "runs/examples/dpo/manual")} == {"policy"}
    assert (tmp_path / "policy/config.json").exists()
    assert (tmp_path / "dpo.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "dpo"])
def test_two_ranks_do_the_same(name: str, base: Path, tmp_path: Path) -> None:
    shutil.copytree(base / "base", tmp_path / "base")
    run_script(ROOT / f"examples/{name}.py", *FEW, "3", cwd=tmp_path, n_processes=2, timeout=300)
    assert (tmp_path / f"{name}.png").exists()
