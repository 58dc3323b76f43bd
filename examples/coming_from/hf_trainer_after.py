"""`hf_trainer_before.py` as a trainer.

    python examples/coming_from/hf_trainer_after.py
    torchrun --nproc-per-node=2 examples/coming_from/hf_trainer_after.py

From the weights that `hf_trainer_before.py` started from, its losses:

    python examples/coming_from/hf_trainer_after.py --checkpoint.init-from initial
"""

from dataclasses import dataclass, field

from texts import collate, small_llama, texts
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

from dream_trainer import (
    CheckpointParameters,
    DreamTrainer,
    DreamTrainerConfig,
    LoggerParameters,
    TrainingParameters,
    parse,
)
from dream_trainer.optim import OptimizerParameters, build_optimizer


@dataclass(kw_only=True)
class LanguageConfig(DreamTrainerConfig):
    optimizer: OptimizerParameters = field(default_factory=lambda: OptimizerParameters(lr=3e-3, weight_decay=0.1))
    warmup_steps: int = 6


def tokens(batch):
    return (batch["labels"][:, 1:] != -100).sum()


class LanguageModel(DreamTrainer):
    config: LanguageConfig

    def configure_models(self):
        self.model = small_llama()

    def configure_dataloaders(self):
        sizes = self.config.training_parameters
        return (
            DataLoader(texts("train"), sizes.train_batch_size, collate_fn=collate),
            DataLoader(texts("val"), sizes.val_batch_size, collate_fn=collate),
        )

    def configure_optimizers(self):
        self.optimizer = build_optimizer(self.config.optimizer, self.model)  # biases and norms do not decay

    def configure_schedulers(self):
        steps = self.config.warmup_steps, self.total_steps
        self.scheduler = get_cosine_schedule_with_warmup(self.optimizer, *steps)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.backward(loss, weight=tokens(batch))  # so that each token counts the same
        self.step(self.model, self.optimizer, self.scheduler)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss_per_token", loss, weight=tokens(batch))  # whatever the batches are
        return {"loss": loss}  # by samples, as their eval_loss: it depends on what is in one batch


def main(arguments=None):
    config = LanguageConfig(
        project="examples",
        group="coming_from",
        experiment="hf_trainer",
        training_parameters=TrainingParameters(
            n_epochs=2, train_batch_size=8, global_batch_size=16, val_batch_size=16, gradient_clip_norm=1.0
        ),
        checkpoint_parameters=CheckpointParameters(keep_last=2),
        logger_parameters=LoggerParameters(log_every_n_steps=1),
    )
    with LanguageModel(parse(config, arguments)) as trainer:
        trainer.fit()
    names = ("train/loss", "val/loss", "val/loss_per_token")
    return {name: [value for _, value in trainer.history_of(name)] for name in names}


if __name__ == "__main__":
    main()
