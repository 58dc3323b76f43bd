"""`from_pretrained` inside `configure_models` gives what it gives outside, tables that no file has included."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
)

from tests.api import Tape
from tests.meta.building import deferred

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
    model = deferred(lambda: AutoModelForCausalLM.from_pretrained(tmp_path), seed=1)
    for (name, expected), (_, found) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(found, expected), name
    tokens = torch.arange(16).view(2, 8)
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=tokens).logits, plain(input_ids=tokens).logits)


def test_a_head_that_the_file_lacks_is_drawn_by_the_seed(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIGS[2]).save_pretrained(tmp_path)

    def head(seed: int) -> torch.Tensor:
        make = AutoModelForSequenceClassification.from_pretrained
        model: Any = deferred(lambda: make(tmp_path, num_labels=3), seed)
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


def zeroed_head(model: torch.nn.Module) -> torch.nn.Module:
    torch.nn.init.zeros_(model.lm_head.weight)
    return model


def adapted(model: torch.nn.Module) -> torch.nn.Module:
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    return get_peft_model(model, lora)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["from_config", "from_pretrained"])
@pytest.mark.parametrize(("change", "name"), [(zeroed_head, "lm_head.weight"), (adapted, "lora_B")])
def test_what_is_put_on_a_model_afterwards_stands(
    way: str, change: Callable[[torch.nn.Module], torch.nn.Module], name: str, tmp_path: Path
) -> None:
    untied = LlamaConfig.from_dict(CONFIGS[0].to_dict() | {"tie_word_embeddings": False})
    AutoModelForCausalLM.from_config(untied).save_pretrained(tmp_path)
    given = untied if way == "from_config" else tmp_path
    model = deferred(lambda: change(getattr(AutoModelForCausalLM, way)(given)), seed=1)
    found = [value for key, value in model.named_parameters() if name in key]
    assert found
    assert not any(value.any() for value in found)
    others = [value for key, value in model.named_parameters() if "up_proj" in key]
    assert all(0.01 < value.detach().std().item() < 0.03 for value in others)


class Own(torch.nn.Module):
    """Initialises itself, as timm's models do."""

    def __init__(self, in_constructor: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        if in_constructor:
            self.init_weights()

    def init_weights(self) -> None:
        torch.nn.init.ones_(self.layer.weight)


def test_a_constructor_that_has_called_init_weights_has_had_its_word() -> None:
    def make(in_constructor: bool) -> torch.nn.Module:
        model = Own(in_constructor)
        torch.nn.init.zeros_(model.layer.weight)
        return model

    for in_constructor in (True, False):
        model: Any = deferred(lambda: make(in_constructor), seed=1)  # noqa: B023 (called at once)
        assert torch.equal(model.layer.weight, torch.full((4, 4), 0.0 if in_constructor else 1.0))
