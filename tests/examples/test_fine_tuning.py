"""examples/lora.py and examples/dpo.py: what they write, and that nothing frozen is saved again."""

import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from tests.examples.launch import EXAMPLES, imported, metric, run_script

FEW = ("--pretraining-steps", "2", "--training-parameters.max-steps", "3", "--training-parameters.val-every-n-steps")


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def saved_models(run: Path) -> set[str]:
    (metadata,) = run.rglob(".metadata")
    names = FileSystemReader(metadata.parent).read_metadata().state_dict_metadata
    return {name.removeprefix("models.") for name in names if name.startswith("models.")}


def run_here(name: str, *arguments: str, cwd: Path) -> None:
    """Runs an example in this process, which has imported what it needs."""
    with pytest.MonkeyPatch.context() as patch, imported(name, EXAMPLES) as example:
        patch.chdir(cwd)
        patch.setattr(sys, "argv", [name, *arguments])
        example.main()


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
    run_here("dpo", "--pretrained", str(base / "base"), *FEW[2:], "3", cwd=tmp_path)
    assert {name.split(".")[0] for name in saved_models(tmp_path / "runs/examples/dpo/manual")} == {"model"}
    assert (tmp_path / "policy/config.json").exists()
    assert (tmp_path / "dpo.png").exists()


@pytest.fixture
def dpo() -> Iterator[ModuleType]:
    with imported("dpo", EXAMPLES) as module:
        yield module


def test_the_dpo_loss_is_the_papers(base: Path, dpo: ModuleType) -> None:
    """Equation 7 of Rafailov et al. 2023; with smoothed labels, equation 3 of Mitchell's note of 2023."""
    policy, reference = (AutoModelForCausalLM.from_pretrained(base / "base") for _ in range(2))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    batch = dpo.pairs()[:3]
    labels = batch.clone()
    labels[:, :, :48] = -100
    trainer = SimpleNamespace(model=policy, reference=reference, config=SimpleNamespace(beta=0.3, label_smoothing=0.2))
    trainer.answer_log_probability = partial(dpo.Prefer.answer_log_probability, trainer)
    found = dpo.Prefer.preferences(trainer, {"tokens": batch, "labels": labels})

    def likelihood(model: Any, row: Tensor) -> Tensor:
        logs = model(input_ids=row[None]).logits[0].double().log_softmax(-1)
        return sum(logs[place - 1, row[place]] for place in range(len(row) // 2, len(row)))

    losses, right = [], []
    for better, worse in batch:
        ratios = [likelihood(policy, row) - likelihood(reference, row) for row in (better, worse)]
        odds = torch.sigmoid(0.3 * (ratios[0] - ratios[1]))
        losses.append(-0.8 * odds.log() - 0.2 * (1 - odds).log())
        right.append(float(odds > 0.5))
    assert found["loss"].item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)
    assert found["accuracy"].item() == pytest.approx(sum(right) / 3)
    assert torch.equal(batch[:, 0, :48], batch[:, 1, :48])


@pytest.mark.slow
def test_dpo_learns_what_the_gallery_shows(tmp_path: Path) -> None:
    run_script(EXAMPLES / "dpo.py", cwd=tmp_path, timeout=600)
    for name, least in (("val/likelier", 0.8), ("val/accuracy", 0.85), ("val/margin", 2)):
        assert list(metric(tmp_path / "runs/examples/dpo/manual", name).values())[-1] > least


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "dpo"])
def test_two_ranks_do_the_same(name: str, base: Path, tmp_path: Path) -> None:
    shutil.copytree(base / "base", tmp_path / "base")
    run_script(EXAMPLES / f"{name}.py", *FEW, "3", cwd=tmp_path, n_processes=2, timeout=300)
    assert (tmp_path / f"{name}.png").exists()
