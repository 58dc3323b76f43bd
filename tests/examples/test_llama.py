"""examples/llama: a model that is a Llama, weights that are Hugging Face's, and a trainer that ranks do not change."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.api import CheckpointError
from tests.examples.launch import EXAMPLES, metric, modules_of, run_script

EXAMPLE = EXAMPLES / "llama"


@pytest.fixture(autouse=True)
def example_modules() -> Iterator[None]:
    with modules_of(EXAMPLE):
        yield


@pytest.mark.parametrize(("preset", "published"), [("1b", 1_235_814_400), ("8b", 8_030_261_248)])
def test_presets_have_as_many_parameters_as_published(preset: str, published: int) -> None:
    from model import PRESETS, Llama

    with torch.device("meta"):
        model = Llama(PRESETS[preset])
    assert sum(parameter.numel() for parameter in model.parameters()) == published


LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def theirs(**changes: Any) -> Any:
    """A small model of transformers with random weights."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        **changes,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("tied", "rope"), [(True, {"rope_type": "default", "rope_theta": 10_000.0}), (False, LLAMA_3_ROPE)]
)
@torch.no_grad()
def test_weights_from_transformers_and_back_give_the_logits(tied: bool, rope: dict[str, Any], tmp_path: Path) -> None:
    import transformers
    from model import Llama
    from weights import config_from_hf, from_hf, to_hf

    reference = theirs(tie_word_embeddings=tied, rope_parameters=rope)
    reference.save_pretrained(tmp_path / "theirs")
    model = Llama(config_from_hf(tmp_path / "theirs"))
    assert from_hf(model, tmp_path / "theirs").is_complete
    assert (model.head.weight is model.embed.weight) == tied
    tokens = torch.randint(99, (2, 300))
    expected = reference(tokens).logits
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-5)

    to_hf(model, tmp_path / "ours")
    back, report = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(back(tokens).logits, expected)
    assert config_from_hf(tmp_path / "ours") == model.config


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "qwen3"}, "model_type='qwen3'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"head_dim": 99}, "head_dim=99"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 'rope_type "yarn"'),
    ],
)
def test_a_model_that_is_no_plain_llama_is_refused(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    from model import PRESETS
    from weights import config_from_hf, config_to_hf

    with pytest.raises(CheckpointError, match="cannot be read"):
        config_from_hf(tmp_path)
    config = config_to_hf(PRESETS["tiny"], torch.float32)
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=told):
        config_from_hf(tmp_path)


def train(cwd: Path, max_steps: int, *arguments: str, n_processes: int = 1) -> dict[int, float]:
    """Losses by step of a run with the tiny model."""
    common = (
        "--seq-len 32 --training-parameters.val-every-n-steps 1000 --logger-parameters.log-every-n-steps 1 "
        f"--training-parameters.max-steps {max_steps} --device-parameters.device cpu"
    ).split()
    run_script(EXAMPLE / "train.py", *common, *arguments, cwd=cwd, n_processes=n_processes)
    (run,) = cwd.glob("runs/examples/llama/*")
    return metric(run, "train/loss")


def test_a_run_starts_from_weights_that_a_sharded_one_exported(tmp_path: Path) -> None:
    import transformers

    sharded, again = tmp_path / "sharded", tmp_path / "again"
    sharded.mkdir()
    again.mkdir()
    losses = train(sharded, 30, "--model", "tiny", "--export-to", "learned", n_processes=2)
    assert losses[30] < 0.7 * losses[1]
    assert train(again, 1, "--model", str(sharded / "learned"))[1] == pytest.approx(losses[30], rel=0.1)

    model = transformers.LlamaForCausalLM.from_pretrained(sharded / "learned")
    text = torch.tensor(list(b"def __init__(self, *args, **kwargs):"))
    loss = F.cross_entropy(model(text.unsqueeze(0)).logits[0, :-1], text[1:])
    assert loss.item() < 0.8 * math.log(256)
