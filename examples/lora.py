"""Adapts a language model with LoRA, peft's: adapters are trained, and the frozen base is never saved again. Offline.

    python examples/lora.py
    torchrun --nproc-per-node=2 examples/lora.py
    python examples/lora.py --pretrained path/to/a/llama

A small Llama learns to read Python's source code, byte by byte, which makes a base where none is given. Then adapters
teach it the prose of Python's manual: `adapters/` for peft, `merged/` for transformers, a picture, `lora.png`. Both are
the recipe, dream_trainer/recipes/language_model.py, on other documents.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from pictures import curves
from torch import Tensor

import dream_trainer as dt

LENGTH = 96  # bytes of a row
SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}


def rows(text: str) -> Tensor:
    """Rows of bytes [rows, LENGTH] of "code", source that comes with Python, or "prose", of Python's manual."""
    files = sorted(Path(json.__file__).parent.parent.glob("a*.py"))
    parts = [path.read_text() for path in files] if text == "code" else [topics[name] for name in sorted(topics)]
    tokens = torch.tensor(list("".join(parts).encode("ascii", "ignore")), dtype=torch.int64)
    return tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)


@dataclass(kw_only=True)
class Config(dt.recipes.LanguageModelConfig):
    """A run of this example: `train_data` is "code" or "prose"."""

    row_length: int = LENGTH
    pretraining_steps: int = 150
    """Steps that the small base is trained for."""


class Language(dt.recipes.LanguageModel):
    """A causal language model; each row is a document."""

    config: Config

    def documents(self) -> tuple[Any, Any]:
        found = rows(self.config.train_data)
        found = found[torch.randperm(len(found), generator=torch.Generator().manual_seed(0))]
        train, val = (dt.data.WithLengths(part, [LENGTH] * len(part)) for part in (found[64:], found[:64]))
        return dt.data.Mixture({"train": train}), dt.data.Mixture({"val": val}, max_epochs={"val": 1})


def settings(experiment: str, steps: int, lr: float, **fields: Any) -> Config:
    """What the two parts of this example have in common."""
    sizes = dt.TrainingParameters(max_steps=steps, global_batch_size=16, train_batch_size=8, val_every_n_steps=20)
    return Config(
        project="examples",
        group="lora",
        experiment=experiment,
        optimizer=dt.OptimizerParameters(lr=lr),
        schedule=dt.ScheduleParameters(name="constant"),
        training_parameters=sizes,
        checkpoint_parameters=dt.CheckpointParameters(save_frozen=False),  # the base stays where it is
        **fields,
    )


def pretrain(directory: str, steps: int) -> None:
    """Trains a small base and exports it to `directory`, if nothing is there yet; called by every rank."""
    if not (Path(directory) / "model.safetensors").exists():
        llama = {"model_type": "llama", "vocab_size": 128, **SHAPE}
        with Language(settings("base", steps, 1e-3, architecture=llama, train_data="code")) as trainer:
            trainer.fit()
            trainer.export(directory, overwrite=True)


def main() -> None:
    """Trains the base if need be, then the adapters, and writes them alone and merged."""
    lora = {"r": 2, "lora_alpha": 8, "target_modules": ["v_proj"]}
    config = dt.parse(settings("adapters", 120, 1e-2, pretrained="base", lora=lora, train_data="prose"))
    pretrain(config.pretrained, config.pretraining_steps)
    with Language(config) as trainer:
        before = trainer.evaluate()["val/loss"]
        trainer.fit()
        trainer.export("adapters", overwrite=True)
        trainer.export("merged", merge_adapters=True, overwrite=True)
        if trainer.world.is_main:
            curve = [(0, before), *trainer.history_of("val/loss")]
            curves({"with adapters": curve}, "loss on prose, nats per byte")[0].savefig("lora.png")
            print(f"loss on prose: {before:.3f} before, {curve[-1][1]:.3f} after; see lora.png, adapters/ and merged/")


if __name__ == "__main__":
    main()
