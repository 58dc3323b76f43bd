"""`hf_trainer_before.py` as a recipe of Dream Trainer.

    python examples/coming_from/hf_trainer_after.py
    torchrun --nproc-per-node=2 examples/coming_from/hf_trainer_after.py

From the weights that `hf_trainer_before.py` started from, its losses: add `--checkpoint.init-from initial`.
"""

from texts import collate, small_llama, texts
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

import dream_trainer as dt


class LanguageModel(dt.recipes.LanguageModel):
    def configure_models(self):
        self.model = small_llama()

    def documents(self):
        return texts("train"), texts("val")

    def loader(self, documents, batch_size, *, is_train):
        return DataLoader(documents, batch_size, collate_fn=collate)  # in their order

    def configure_schedulers(self):
        self.schedulers = [get_cosine_schedule_with_warmup(self.optimizers[0], 6, self.total_steps)]

    def loss(self, batch):
        return self.model(**batch).loss, (batch["labels"][:, 1:] != -100).sum()  # so that each token counts the same

    def validation_step(self, batch, batch_idx):
        loss, tokens = self.loss(batch)
        self.log("loss_per_token", loss, weight=tokens)  # whatever the batches are
        return {"loss": loss}  # by samples, as their eval_loss: it depends on what is in one batch


def main(arguments=None):
    config = dt.recipes.LanguageModelConfig(
        experiment="hf_trainer",
        optimizer=dt.OptimizerParameters(lr=3e-3, weight_decay=0.1),  # biases and norms do not decay
        training_parameters=dt.TrainingParameters(
            n_epochs=2, train_batch_size=8, global_batch_size=16, val_batch_size=16, gradient_clip_norm=1.0
        ),
        checkpoint_parameters=dt.CheckpointParameters(keep_last=2),
        logger_parameters=dt.LoggerParameters(log_every_n_steps=1),
    )
    with LanguageModel.from_cli(config, arguments) as trainer:
        trainer.fit()
    names = ("train/loss", "val/loss", "val/loss_per_token")
    return {name: [value for _, value in trainer.history_of(name)] for name in names}


if __name__ == "__main__":
    main()
