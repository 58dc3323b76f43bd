"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290): a policy, and the frozen model it began as.

    python examples/dpo.py
    torchrun --nproc-per-node=2 examples/dpo.py

The small base of `examples/lora.py` has read source code alone, and goes on with code whatever it is given. A pair is a
prompt from Python's manual, how the manual goes on, which is preferred, and code. The reference is the base again,
sharded as the policy is, without gradients, optimizer state or a place in checkpoints, which name it by its digest. A
picture, `dpo.png`, shows what the policy prefers of pairs that it has not seen, and how its rewards part.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lora import LENGTH, code, pretrain, prose
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM

import dream_trainer as dt
from dream_trainer import Progress, parse

PROMPT = LENGTH // 2  # bytes of a row that both answers follow


@dataclass(kw_only=True)
class Config(dt.DreamTrainerConfig):
    """A run of this example."""

    base: Path = Path("base")
    """A causal language model in Hugging Face's layout that reads bytes; a small one is trained if none is there."""
    pretraining_steps: int = 150
    """Steps that the small base is trained for."""
    beta: float = 0.03
    """How dear it is to move away from the reference."""
    label_smoothing: float = 0.0
    """Share of the pairs that are taken to be labelled the wrong way round."""


def pairs() -> Tensor:
    """(pairs, 2, LENGTH): each prompt with the prose that follows it, and with code."""
    order = torch.Generator().manual_seed(1)
    good, bad = (rows[torch.randperm(len(rows), generator=order)] for rows in (prose(), code()))
    good = good[: len(bad)]
    return torch.stack([good, torch.cat([good[:, :PROMPT], bad[:, PROMPT:]], dim=1)], dim=1)


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

    def loss(self, batch: Tensor) -> dict[str, Tensor]:
        """The loss, and what to watch: rewards, and how often the better answer has the higher one, or is likelier."""
        rows = batch.flatten(0, 1)
        with torch.no_grad():
            before = log_probability(self.reference, rows).view(-1, 2)
        now = log_probability(self.policy, rows).view(-1, 2)
        chosen, rejected = (self.config.beta * (now - before)).unbind(1)
        margin, flipped = chosen - rejected, self.config.label_smoothing
        loss = -(1 - flipped) * logsigmoid(margin) - flipped * logsigmoid(-margin)
        shares = {"accuracy": margin > 0, "likelier": now[:, 0] > now[:, 1]}
        watched = {"loss": loss, "chosen": chosen, "rejected": rejected, "margin": margin} | shares
        return {name: value.float().mean() for name, value in watched.items()}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        found = self.loss(batch[0])
        self.backward(found["loss"])
        self.step(self.policy, self.optimizer)
        return found

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        return self.loss(batch[0])


def draw(before: dict[str, float], trainer: Prefer, file: str) -> None:
    """Of pairs that it has not seen: how often the policy has the prose ahead, and the mean reward of both answers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, name in ((left, "likelier"), (right, "chosen"), (right, "rejected")):
        curve = [(0, before[f"val/{name}"]), *trainer.history_of(f"val/{name}")]
        axes.plot(*zip(*curve, strict=True), marker="o", label=name)
    left.set(xlabel="step", ylabel="pairs of which the prose is likelier", ylim=(0, 1))
    right.set(xlabel="step", ylabel="mean reward")
    right.legend()
    figure.savefig(file, dpi=90)


def main() -> None:
    """Trains the base if need be, then the policy, and exports it."""
    config = Config(
        project="examples",
        group="dpo",
        experiment="manual",
        training_parameters=dt.TrainingParameters(
            max_steps=60, global_batch_size=8, train_batch_size=4, val_batch_size=16, val_every_n_steps=20
        ),
        checkpoint_parameters=dt.CheckpointParameters(save_frozen=False),
        logger_parameters=dt.LoggerParameters(loggers=("jsonl",)),
        callbacks=[Progress(metrics=("train/loss", "val/margin", "val/likelier"))],
    )
    config = parse(config)
    pretrain(config.base, config.pretraining_steps)
    with Prefer(config) as trainer:
        before = trainer.evaluate()
        trainer.fit()
        trainer.export("policy", model="policy", overwrite=True)
        if trainer.world.is_main:
            draw(before, trainer, "dpo.png")
            shares = before["val/likelier"], trainer.history_of("val/likelier")[-1][1]
            print("prose is likelier for {:.0%} of unseen pairs before, {:.0%} after; see dpo.png".format(*shares))


if __name__ == "__main__":
    main()
