"""examples/finetune_hf.py: it learns, and what it exports is what transformers load."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.examples.launch import EXAMPLES, imported, metric, run_script

SCRIPT = EXAMPLES / "finetune_hf.py"


@pytest.fixture
def example() -> Iterator[ModuleType]:
    with imported("finetune_hf", EXAMPLES) as module:
        yield module


def test_it_exports_for_transformers(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "PACKAGES", ("asyncio", "logging", "xml"))
    config = example.default_config()
    config.training_parameters = type(config.training_parameters)(n_epochs=3, global_batch_size=16, train_batch_size=16)
    with example.Finetune(config) as trainer:
        trainer.fit()
        for _ in range(2):  # the second time over the first, and the tokenizer beside it
            trainer.export("out", overwrite=True)
            trainer.tokenizer.save_pretrained("out")
        batch = next(iter(trainer.configure_dataloaders()[1]))
        with torch.no_grad():
            ours = trainer.model.eval()(**batch).logits
    losses = list(metric(trainer.run_dir, "train/loss").values())
    assert losses[0] == pytest.approx(torch.tensor(3.0).log().item(), abs=0.15)
    assert list(metric(trainer.run_dir, "val/loss").values())[-1] < 0.8 * losses[0]
    found = (example.packages.docstrings(example.PACKAGES, held_out=held_out) for held_out in (False, True))
    train, val = ({text for text, _ in part} for part in found)
    assert len(train) > 5 * len(val) > 50
    assert not train & val

    model, report = AutoModelForSequenceClassification.from_pretrained("out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(model.eval()(**batch).logits, ours)
    assert model.config.id2label == {0: "asyncio", 1: "logging", 2: "xml"}
    tokenizer, text = AutoTokenizer.from_pretrained("out"), "Return the handler, or unheardofword."
    assert tokenizer(text)["input_ids"] == trainer.tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])[:3] == ["[CLS]", "return", "the"]

    # What it exported is a pretrained model like any other: encoder and head start from it.
    again = example.default_config()
    again.experiment, again.pretrained = "again", str(tmp_path / "out")
    again.training_parameters = type(again.training_parameters)(max_steps=0, train_batch_size=16)
    with example.Finetune(again) as trainer:
        trainer.fit()
        with torch.no_grad():
            assert torch.equal(trainer.model.eval()(**batch).logits, ours)


@pytest.mark.slow
def test_two_ranks_shard_the_model_and_export_it(tmp_path: Path) -> None:
    output = run_script(SCRIPT, "--training-parameters.max-steps", "30", cwd=tmp_path, n_processes=2)
    assert "Close the window" in output
    losses = list(metric(tmp_path / "runs/examples/finetune_hf/docstrings", "train/loss").values())
    assert losses[-1] < losses[0]
    model, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "finetuned", output_loading_info=True)
    assert not report["missing_keys"]
    assert model.config.architectures == ["BertForSequenceClassification"]
