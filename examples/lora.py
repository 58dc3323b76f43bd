"""Adapts a language model with LoRA, peft's: adapters are trained, and the frozen base is never saved again. Offline.

    python examples/lora.py
    torchrun --nproc-per-node=2 examples/lora.py
    python examples/lora.py --base path/to/a/llama

A small Llama learns to read Python's source code, byte by byte, which makes a base where none is given. Then adapters
teach it the prose of Python's manual: `adapters/` for peft, `merged/` for transformers, a picture, `lora.png`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from matplotlib.figure import Figure
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import dream_trainer as dt
from dream_trainer import parse

LENGTH = 96  # bytes of a row


def rows_of(text: str) -> Tensor:
    """The text as rows of bytes; (rows, LENGTH)."""
    tokens = torch.tensor(list(text.encode("ascii", "ignore")), dtype=torch.int64)
    return tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)


def code() -> Tensor:
    """Rows of source code that comes with Python."""
    return rows_of("".join(path.read_text() for path in sorted(Path(json.__file__).parent.parent.glob("a*.py"))))


def prose() -> Tensor:
    """Rows of Python's manual."""
    return rows_of("".join(topics[name] for name in sorted(topics)))


@dataclass(kw_only=True)
class Config(dt.DreamTrainerConfig):
    """A run of this example."""

    base: Path = Path("base")
    """A causal language model in Hugging Face's layout that reads bytes; a small one is trained if none is there."""
    pretraining_steps: int = 150
    """Steps that the small base is trained for."""


class Language(dt.DreamTrainer):
    """A causal language model, trained from nothing on code."""

    config: Config
    read, learning_rate = staticmethod(code), 1e-3

    def configure_models(self) -> None:
        sizes = LlamaConfig(
            vocab_size=128, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4
        )
        self.model = AutoModelForCausalLM.from_config(sizes)

    def configure_optimizers(self) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=self.learning_rate, fused=True)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        rows, sizes = self.read(), self.config.training_parameters
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
        return (
            DataLoader(TensorDataset(rows[64:]), sizes.train_batch_size, shuffle=True, drop_last=True),
            DataLoader(TensorDataset(rows[:64]), sizes.val_batch_size),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.backward(loss)
        self.step(self.model, self.optimizer)
        return {"loss": loss}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> tuple[dict[str, Tensor], int]:
        return {"loss": self.model(input_ids=batch[0], labels=batch[0]).loss}, batch[0][:, 1:].numel()


class Adapt(Language):
    """Adapters on a frozen base, trained on prose."""

    read, learning_rate = staticmethod(prose), 1e-2

    def configure_models(self) -> None:
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.config.base))
        wanted = LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=8, target_modules=["v_proj"])
        self.model = get_peft_model(base, wanted)

    def load_pretrained(self) -> None:
        dt.load_base_weights(self.model, self.config.base)


def settings(experiment: str, steps: int) -> Config:
    """What the two parts of this example have in common."""
    return Config(
        project="examples",
        group="lora",
        experiment=experiment,
        training_parameters=dt.TrainingParameters(
            max_steps=steps, global_batch_size=16, train_batch_size=8, val_batch_size=32, val_every_n_steps=20
        ),
        checkpoint_parameters=dt.CheckpointParameters(save_frozen=False),  # the base stays where it is
    )


def pretrain(directory: Path, steps: int) -> None:
    """Trains a small base and exports it to `directory`, if nothing is there yet; called by every rank."""
    if not (directory / "model.safetensors").exists():
        with Language(settings("base", steps)) as trainer:
            trainer.fit()
            trainer.export(directory, overwrite=True)


def draw(history: list[tuple[int, float]], before: float, file: str) -> None:
    """The loss on prose, over the steps of the adapters."""
    axes = (figure := Figure(figsize=(6, 4), layout="constrained")).subplots()
    axes.plot(*zip(*history, strict=True), marker="o", label="with adapters")
    axes.axhline(before, color="gray", linestyle="--", label="the base alone")
    axes.set(xlabel="step", ylabel="loss on prose, nats per byte")
    axes.legend()
    figure.savefig(file)


def main() -> None:
    """Trains the base if need be, then the adapters, and writes them alone and merged."""
    config = parse(settings("adapters", 120))
    pretrain(config.base, config.pretraining_steps)
    with Adapt(config) as trainer:
        before = trainer.evaluate()["val/loss"]
        trainer.fit()
        trainer.export("adapters", overwrite=True)
        trainer.export("merged", merge_adapters=True, overwrite=True)
        if trainer.world.is_main:
            curve = trainer.history_of("val/loss")
            draw(curve, before, "lora.png")
            print(f"loss on prose: {before:.3f} before, {curve[-1][1]:.3f} after; see lora.png, adapters/ and merged/")


if __name__ == "__main__":
    main()
