"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290): a policy, and the frozen model it began as.

    python examples/dpo.py
    torchrun --nproc-per-node=2 examples/dpo.py

The pairs: a prompt from Python's manual, the text that really follows, which is preferred, and text from elsewhere in
the manual. The policy begins as the small base of `examples/lora.py`. Its reference is the same model again, sharded as
the policy is, without gradients, optimizer state or a place in checkpoints, which name it by its digest instead. A
picture, `dpo.png`, shows how the policy comes to tell the two apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lora import LENGTH, pretrain, prose
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM

import dream_trainer as dt
from dream_trainer.callbacks import Progress
from dream_trainer.config.command_line import parse

PROMPT = LENGTH // 2  # bytes of a row that both answers follow


@dataclass(kw_only=True)
class Config(dt.DreamTrainerConfig):
    """A run of this example."""

    base: Path = Path("base")
    """Directory of a causal language model in Hugging Face's layout that reads bytes. A small one is trained first if
    none is there."""
    pretraining_steps: int = 150
    """Steps that the small base is trained for."""
    beta: float = 0.1
    """How dear it is to move away from the reference."""


def pairs() -> Tensor:
    """(rows, 2, LENGTH): each prompt with the text that follows it, and with that which follows another one."""
    rows = prose()
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))]
    strange = torch.cat([rows[:, :PROMPT], rows.roll(1, 0)[:, PROMPT:]], dim=1)
    return torch.stack([rows, strange], dim=1)


def log_probability(model: nn.Module, rows: Tensor) -> Tensor:
    """Of each row's answer, given its prompt; (rows,)."""
    logits = model(input_ids=rows).logits[:, PROMPT - 1 : -1].float()
    return -cross_entropy(logits.transpose(1, 2), rows[:, PROMPT:], reduction="none").sum(1)


class Prefer(dt.DreamTrainer):
    """A policy and its reference, both of them sharded, one of them trained."""

    config: Config

    def configure_models(self) -> None:
        settings = AutoConfig.from_pretrained(self.config.base)
        self.policy = AutoModelForCausalLM.from_config(settings)
        self.reference = AutoModelForCausalLM.from_config(settings).requires_grad_(False).eval()

    def load_pretrained(self) -> None:
        for model in (self.policy, self.reference):
            dt.load_weights(model, self.config.base)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-4, fused=True)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        sizes, rows = self.config.training_parameters, pairs()
        return (
            DataLoader(TensorDataset(rows[64:]), sizes.train_batch_size, shuffle=True, drop_last=True),
            DataLoader(TensorDataset(rows[:64]), sizes.val_batch_size),
        )

    def margins(self, batch: Tensor) -> Tensor:
        """By how much more than its reference the policy prefers what is preferred; (pairs,)."""
        rows = batch.flatten(0, 1)
        with torch.no_grad():
            before = log_probability(self.reference, rows)
        gained = (log_probability(self.policy, rows) - before).view(-1, 2)
        return self.config.beta * (gained[:, 0] - gained[:, 1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss = -logsigmoid(self.margins(batch[0])).mean()
        self.backward(loss)
        if not self.is_accumulating_gradients:
            self.step(self.policy, self.optimizer)
        return {"loss": loss}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        margins = self.margins(batch[0])
        return {"loss": -logsigmoid(margins).mean(), "accuracy": (margins > 0).float().mean()}


def default_config() -> Config:
    """What a run without arguments does."""
    return Config(
        project="examples",
        group="dpo",
        experiment="manual",
        training_parameters=dt.TrainingParameters(
            max_steps=60, global_batch_size=8, train_batch_size=4, val_batch_size=16, val_every_n_steps=20
        ),
        checkpoint_parameters=dt.CheckpointParameters(save_frozen=False),
        logger_parameters=dt.LoggerParameters(loggers=("jsonl",)),
        callbacks=dt.CallbackCollection([Progress(metrics=("train/loss", "val/accuracy"))]),
    )


def draw(curve: list[tuple[int, float]], file: str) -> None:
    """How often the policy prefers the right answer more than its reference does."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6, 4), layout="constrained")).subplots()
    axes.plot(*zip((0, 0.5), *curve, strict=True), marker="o")
    axes.set(xlabel="step", ylabel="pairs told apart better than before", ylim=(0.4, 1))
    figure.savefig(file)


def main() -> None:
    """Trains the base if need be, then the policy, and exports it."""
    config = parse(default_config())
    pretrain(config.base, config.pretraining_steps)
    with Prefer(config) as trainer:
        trainer.fit()
        trainer.export("policy", model="policy", overwrite=True)
        if trainer.world.is_main:
            curve = trainer.history_of("val/accuracy")
            draw(curve, "dpo.png")
            print(f"the policy tells {curve[-1][1]:.0%} of unseen pairs apart better; see dpo.png and policy/")


if __name__ == "__main__":
    main()
