"""`from_pretrained` inside `configure_models` gives what it gives outside, tables that no file has included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
)

from dream_trainer.meta.realize import materialize, remember
from dream_trainer.meta.tape import Tape

CONFIGS = [
    LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2),
    GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2),
    BertConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, is_decoder=True
    ),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_it_has_the_same_values_and_logits(config: PretrainedConfig, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tape = Tape(seed=1)
    with tape.recording():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    materialize({"model": model}, remember({"model": model}, tape), "cpu")
    for (name, expected), (_, found) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(found, expected), name
    tokens = torch.arange(16).view(2, 8)
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=tokens).logits, plain(input_ids=tokens).logits)


def test_a_head_that_the_file_lacks_is_drawn_by_the_seed(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIGS[2]).save_pretrained(tmp_path)

    def head(seed: int) -> torch.Tensor:
        tape = Tape(seed)
        with tape.recording():
            model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
        materialize({"model": model}, remember({"model": model}, tape), "cpu")
        return model.classifier.weight.detach()

    assert head(1).std() == pytest.approx(CONFIGS[2].initializer_range, rel=0.5)
    assert torch.equal(head(1), head(1))
    assert not torch.equal(head(1), head(2))


def test_code_that_asks_for_meta_is_told_that_it_is_on() -> None:
    with Tape(seed=1).recording():
        assert torch.tensor([]).device.type == "cpu"
        with torch.device("meta"):
            assert torch.tensor([]).device.type == "meta"
            made = torch.nn.Linear(2, 2)
        assert made.weight.device.type == "cpu"
