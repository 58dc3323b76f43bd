"""The model and the data of `hf_trainer_before.py` and `hf_trainer_after.py`: neither has to change."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

PADDING = 256  # after the 256 bytes
LONGEST = 64


def small_llama() -> LlamaForCausalLM:
    """A language model of bytes with 37 thousand parameters."""
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LONGEST,
        pad_token_id=PADDING,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def texts(split: Literal["train", "val"]) -> list[dict[str, Any]]:
    """First lines of docstrings of the standard library, of unequal lengths: 192 to train on, 28 to validate."""
    found = dict[str, None]()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                line = (ast.get_docstring(node) or "").partition("\n")[0]
                if len(line) > 20:
                    found.setdefault(line)
        if len(found) >= 220:
            break
    chosen = list(found)[:192] if split == "train" else list(found)[192:220]
    return [{"input_ids": list(text.encode()[:LONGEST])} for text in chosen]


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pads to the longest text; padding is no label."""
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)
    is_text = input_ids != PADDING
    return {
        "input_ids": input_ids,
        "attention_mask": is_text.long(),
        "labels": input_ids.where(is_text, -100),
    }
