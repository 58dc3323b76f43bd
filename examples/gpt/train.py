"""Trains a byte-level GPT on the Python standard library's own source and documentation strings, packed into rows.

    python examples/gpt/train.py
    torchrun --nproc-per-node=2 examples/gpt/train.py --training.max-steps 600

The same file runs on one CPU and on many GPUs, and learns the same on each: the global batch is fixed, ranks only
divide it. Started again under the same name it resumes; `--help` lists everything that the command line can change.
Loss, packing and sampling are those of the recipe, dream_trainer/recipes/language_model.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from model import GPT, GPTConfig
from plot import plot_loss, read_metrics
from texts import load_corpora
from torch import Tensor

import dream_trainer as dt


@dataclass(kw_only=True)
class GPTTrainerConfig(dt.recipes.LanguageModelConfig):
    """A run of this example; the defaults take about two minutes on two CPU cores."""

    model: GPTConfig = field(default_factory=GPTConfig)
    """Shape of the model."""
    code_share: float = 0.75
    """Share of the bytes trained on that are source; the rest is documentation."""
    sample_bytes: int = 400
    """Bytes of text to generate at the end; 0 generates none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.row_length = self.model.window


class GPTTrainer(dt.recipes.LanguageModel):
    """Next-byte prediction."""

    config: GPTTrainerConfig
    model: GPT

    def configure_models(self) -> None:
        self.model = GPT(self.config.model)

    def init_weights(self) -> None:
        self.model.init_weights()

    def documents(self) -> tuple[dt.data.Mixture, dt.data.Mixture]:
        corpora, share = load_corpora(), self.config.code_share
        self.unigram_entropy = corpora.unigram_entropy()
        return (
            # Endless: "code" and "docs" are each gone through as often as their share of the bytes asks for.
            dt.data.Mixture(corpora.train, weights={"code": share, "docs": 1 - share}, unit="tokens"),
            # Each held-out text once.
            dt.data.Mixture(corpora.validation, max_epochs={"code": 1, "docs": 1}),
        )

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        mask = dt.data.packed_attention_mask(batch["documents"], "sdpa")
        scores: Tensor = self.model(batch["tokens"], mask)
        return scores

    def post_launch(self) -> None:
        if self.world.is_main:
            self.describe()


def report(trainer: GPTTrainer, text: str) -> None:
    """Prints what was learned, and draws it; for one rank to call."""
    metrics_file, picture = trainer.run_dir / "metrics.jsonl", trainer.run_dir / "loss.png"
    print(f"\nThe model writes:\n\n{text}\n")
    steps, losses = read_metrics(metrics_file, "val/loss")
    print(f"byte-unigram entropy of the validation text: {trainer.unigram_entropy:.3f} nats per byte")
    if losses:
        ratio = losses[-1] / trainer.unigram_entropy
        print(f"validation loss at step {steps[-1]}: {losses[-1]:.3f} nats per byte, {ratio:.0%} of that")
    print(f"checkpoints: {', '.join(str(found.step) for found in trainer.checkpoints())} in {trainer.checkpoint_dir}")
    plot_loss(metrics_file, picture, trainer.unigram_entropy)
    step = trainer.global_step
    print(f"loss curve: {picture}")
    print(f"finished at step {step}; to go on, add --training.max-steps {2 * step} to the same command")


def main() -> None:
    """Trains from the command line, then shows what came of it."""
    config = GPTTrainerConfig(
        project="examples",
        group="gpt",
        experiment="stdlib",
        optimizer=dt.OptimizerParameters(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
        schedule=dt.ScheduleParameters(name="cosine", warmup_steps=15, min_lr_ratio=0.02),
        training_parameters=dt.TrainingParameters(
            max_steps=250, global_batch_size=32, train_batch_size=16, gradient_clip_norm=1.0, val_every_n_steps=50
        ),
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_steps=50),
        logger_parameters=dt.LoggerParameters(loggers=("jsonl",)),  # dt.Progress shows the numbers
        callbacks=[dt.callbacks.ModelSummary(depth=1), dt.callbacks.TrainerSummary(), dt.Progress()],
    )
    with GPTTrainer.from_cli(config) as trainer:
        trainer.fit()
        tokens = trainer.generate(b"def ", trainer.config.sample_bytes, temperature=0.8)  # on every rank
        if trainer.world.is_main:
            report(trainer, bytes(tokens).decode(errors="replace"))


if __name__ == "__main__":
    main()
