"""Hugging Face's Llama weights into the model of this example and back: `config_from_hf`, `from_hf`, `to_hf`.

The layouts differ in names alone: nothing is transposed or permuted. Works on sharded models; every rank calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from model import Llama, LlamaConfig, RopeScaling

from dream_trainer import LoadReport, load_weights
from dream_trainer.errors import CheckpointError
from dream_trainer.weights.export import export_model

NAMES = {
    "model.embed_tokens": "embed",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "feed_forward_norm",
    "model.norm": "norm",
    "lm_head": "head",
}
"""Hugging Face's name of a module to ours."""


def _whole_words(name: str) -> str:
    return rf"(?<![^.]){re.escape(name)}(?![^.])"


FROM_HF = {
    r".*rotary_emb\.inv_freq": "",  # in files of early versions; computed here
    **{_whole_words(theirs): ours for theirs, ours in NAMES.items()},
    r"^model\.layers\.": "layers.",
}
"""For `load_weights(renames=...)` and `CheckpointParameters(init_renames=...)`."""

TO_HF = {
    r"^layers\.": "model.layers.",
    **{_whole_words(ours): theirs for theirs, ours in NAMES.items()},
}
"""For the `renames` of `export_model` and `dream-trainer checkpoints export`."""


def from_hf(model: Llama, path: str | Path, *, world: Any = None) -> LoadReport:
    """Fills `model` with the weights in a Hugging Face directory or file.

    Args:
        model: Real, sharded or not, of the shape that `config_from_hf` reads from the directory.
        path: What `load_weights` reads: a directory with safetensors, or one of its files.
        world: The ranks. Default: the process group's, or this process alone.

    Returns:
        What was loaded: everything.

    Raises:
        CheckpointError: The file is damaged, or its names or shapes are not the model's; nothing was written.
    """
    return load_weights(model, path, renames=FROM_HF, world=world)


def to_hf(
    model: Llama,
    out: str | Path,
    *,
    world: Any = None,
    dtype: torch.dtype | None = None,
    more_config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Writes weights and `config.json` that `AutoModelForCausalLM.from_pretrained(out)` reads.

    Args:
        model: Sharded or not; of a pipeline this rank's stage, and the whole model is written.
        out: A directory.
        world: The ranks, such as `trainer.world`. Default: the process group's, or this process alone.
        dtype: Cast weights to this, such as `torch.bfloat16`; None leaves them as they are.
        more_config: Further entries of `config.json`, which win: `{"eos_token_id": 128001}`. A model knows no tokens.
        overwrite: Replace an earlier export.

    Returns:
        The files written, on every rank.

    Raises:
        CheckpointError: The export cannot be written there; the same on every rank.
    """
    config = config_to_hf(model.config, dtype or next(model.parameters()).dtype) | dict(more_config or {})
    return export_model(model, Path(out), world=world, dtype=dtype, config=config, renames=TO_HF, overwrite=overwrite)


def config_to_hf(config: LlamaConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What a `config.json` says of this shape, in the keys that all versions of transformers read."""
    scaling = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        },
        "max_position_embeddings": config.max_seq_len,
        "tie_word_embeddings": config.tie_embeddings,
        # The default ids would be two of the bytes.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def config_from_hf(path: str | Path) -> LlamaConfig:
    """The shape of the model in a Hugging Face directory.

    Raises:
        CheckpointError: There is no `config.json`, or it is of a model that this one is not.
    """
    file = Path(path) / "config.json"
    try:
        theirs = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}. Name a directory of a Llama from Hugging Face."
        ) from error
    _refuse_other_models(file, theirs)
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    heads = theirs["num_attention_heads"]
    return LlamaConfig(
        vocab_size=theirs["vocab_size"],
        dim=theirs["hidden_size"],
        n_layers=theirs["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=theirs.get("num_key_value_heads") or heads,
        hidden_dim=theirs["intermediate_size"],
        rope_theta=rope.get("rope_theta", theirs.get("rope_theta", 10_000.0)),
        rope_scaling=_scaling(file, rope),
        norm_eps=theirs["rms_norm_eps"],
        max_seq_len=theirs["max_position_embeddings"],
        tie_embeddings=theirs.get("tie_word_embeddings", False),
    )


def _scaling(file: Path, rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise CheckpointError(f'{file} has rope_type "{kind}", which this model lacks. It has "default" and "llama3".')
    return RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_seq_len=rope["original_max_position_embeddings"],
    )


def _refuse_other_models(file: Path, theirs: Mapping[str, Any]) -> None:
    """Raises for a config that would load by name and shape, and yet compute something else."""
    wanted = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    found = {key: theirs.get(key, value) for key, value in wanted.items()}
    other = {key: value for key, value in found.items() if value != wanted[key]}
    head_dim = theirs.get("head_dim")
    if head_dim not in (None, theirs["hidden_size"] // theirs["num_attention_heads"]):
        other["head_dim"] = head_dim
    if other:
        raise CheckpointError(
            f"{file} is not of a plain Llama: {', '.join(f'{key}={value!r}' for key, value in other.items())}. "
            "Choose another model, or change examples/llama/model.py to be it."
        )
