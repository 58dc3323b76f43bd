"""Trains a byte-level GPT on the Python standard library's own source and documentation strings, packed into rows.

    python examples/gpt/train.py
    torchrun --nproc-per-node=2 examples/gpt/train.py --training.max-steps 600

The same file runs on one CPU and on many GPUs, and learns the same on each: the global batch is fixed, ranks only
divide it. Started again under the same name it resumes; `--help` lists everything that the command line can change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from model import GPT, GPTConfig, generate
from plot import plot_loss, read_metrics
from texts import END, load_corpora
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from dream_trainer import (
    CheckpointParameters,
    DreamTrainer,
    DreamTrainerConfig,
    LoggerParameters,
    TrainingParameters,
    parse,
)
from dream_trainer.callbacks import ModelSummary, Progress, TrainerSummary
from dream_trainer.data import DistributedDataLoader, Mixture, PackedRows, packed_attention_mask

PROMPT = b"def "


@dataclass(kw_only=True)
class GPTTrainerConfig(DreamTrainerConfig):
    """A run of this example; the defaults take about two minutes on two CPU cores."""

    model: GPTConfig = field(default_factory=GPTConfig)
    """Shape of the model."""
    learning_rate: float = 3e-3
    """Peak learning rate of AdamW; a model this small bears a high one."""
    warmup_steps: int = 15
    """Optimizer steps until the learning rate peaks; it then follows a cosine to 2% of it."""
    code_share: float = 0.75
    """Share of the bytes trained on that are source; the rest is documentation."""
    sample_bytes: int = 400
    """Bytes of text to generate at the end; 0 generates none."""


class GPTTrainer(DreamTrainer):
    """Next-byte prediction."""

    config: GPTTrainerConfig

    def configure_models(self) -> None:
        self.model = GPT(self.config.model)

    def init_weights(self) -> None:
        self.model.init_weights()

    def configure_dataloaders(self) -> tuple[DistributedDataLoader, DistributedDataLoader]:
        corpora = load_corpora()
        self.unigram_entropy = corpora.unigram_entropy()
        share, window = self.config.code_share, self.config.model.window
        # Endless: "code" and "docs" are each gone through as often as their share of the bytes asks for.
        train = Mixture(corpora.train, weights={"code": share, "docs": 1 - share}, unit="tokens")
        # Each held-out text once.
        validation = Mixture(corpora.validation, max_epochs={"code": 1, "docs": 1})
        parameters = self.config.training_parameters
        micro_batch = parameters.train_batch_size
        if parameters.global_batch_size is not None:
            micro_batch = max(1, min(micro_batch, parameters.global_batch_size // self.world.dp_size))
        pad = END[0]
        return (
            DistributedDataLoader(PackedRows(train, window, pad_id=pad), micro_batch),
            DistributedDataLoader(PackedRows(validation, window, pad_id=pad), parameters.val_batch_size),
        )

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.config.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def configure_schedulers(self) -> None:
        warmup, total = self.config.warmup_steps, self.total_steps

        def factor(step: int) -> float:
            warm = min(1.0, (step + 1) / max(1, warmup))
            done = min(1.0, step / total) if total else 0.0
            return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))

        self.scheduler = LambdaLR(self.optimizer, factor)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor | None]:
        loss = self.loss(batch)
        self.backward(loss, weight=batch["weights"].sum())
        return {"loss": loss, "grad_norm": self.step(self.model, self.optimizer, self.scheduler)}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        self.log("val/loss", self.loss(batch), weight=batch["weights"].sum())
        return {}

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean nats per byte of packed rows [batch, window]: each byte predicts the next of its document."""
        logits = self.model(batch["tokens"], packed_attention_mask(batch["documents"], "sdpa"))
        total = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        return total / batch["weights"].sum().clamp(min=1)  # the last rows of validation may end no more than a text

    def sample(self) -> str:
        """Text that the model writes; every rank calls it, since a sharded model needs all of them."""
        self.model.eval()
        length = self.config.sample_bytes
        with self.autocast():
            text = generate(self.model, PROMPT, length, window=self.config.model.window, device=self.world.device)
        return text.decode(errors="replace")

    def post_launch(self) -> None:
        if self.world.is_main:
            self.describe()


def report(trainer: GPTTrainer, text: str) -> None:
    """Prints what was learned, and draws it; for one rank to call."""
    metrics_file, picture = trainer.run_dir / "metrics.jsonl", trainer.run_dir / "loss.png"
    if text:
        print(f"\nThe model writes:\n\n{text}\n")
    steps, losses = read_metrics(metrics_file, "val/loss")
    print(f"byte-unigram entropy of the validation text: {trainer.unigram_entropy:.3f} nats per byte")
    if losses:
        ratio = losses[-1] / trainer.unigram_entropy
        print(f"validation loss at step {steps[-1]}: {losses[-1]:.3f} nats per byte, {ratio:.0%} of that")
    print(f"checkpoints: {', '.join(str(found.step) for found in trainer.checkpoints())} in {trainer.checkpoint_dir}")
    plot_loss(metrics_file, picture, trainer.unigram_entropy)
    print(f"loss curve: {picture}")
    step = trainer.global_step
    print(f"finished at step {step}; to go on, add --training.max-steps {2 * step} to the same command")


def default_config() -> GPTTrainerConfig:
    """What a run without arguments does."""
    return GPTTrainerConfig(
        project="examples",
        group="gpt",
        experiment="stdlib",
        training_parameters=TrainingParameters(
            max_steps=250,
            global_batch_size=32,
            train_batch_size=16,
            val_batch_size=32,
            gradient_clip_norm=1.0,
            val_every_n_steps=50,
        ),
        checkpoint_parameters=CheckpointParameters(save_every_n_steps=50),
        # The progress display shows the numbers; the console logger would show them again.
        logger_parameters=LoggerParameters(loggers=("jsonl",)),
        callbacks=[ModelSummary(depth=1), TrainerSummary(), Progress()],
    )


def main() -> None:
    """Trains from the command line, then shows what came of it."""
    config = parse(default_config())
    # Rows are samples and bytes are tokens, as many of them as the command line says.
    config.callbacks.get(Progress).tokens_per_sample = config.model.window
    with GPTTrainer(config) as trainer:
        trainer.fit()
        text = trainer.sample() if config.sample_bytes else ""
        if trainer.world.is_main:
            report(trainer, text)


if __name__ == "__main__":
    main()
