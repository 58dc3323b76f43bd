"""A language model with the Trainer of transformers: accumulation, warm-up, weight decay, evaluation, checkpoints.

    python examples/coming_from/hf_trainer_before.py

`hf_trainer_after.py` is the same as a trainer of Dream Trainer.
"""

from texts import collate, small_llama, texts
from transformers import Trainer, TrainingArguments, set_seed


class Recorded(Trainer):
    """Keeps what the comparison reads: the loss of each optimizer step, which logs have in four digits."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.micro_batches = [*getattr(self, "micro_batches", []), loss.item()]
        return loss


def main():
    set_seed(42)
    model = small_llama()
    model.save_pretrained("initial")  # what the comparison starts from
    arguments = TrainingArguments(
        output_dir="hf_trainer",
        num_train_epochs=2,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=16,
        train_sampling_strategy="sequential",  # so that losses can be compared step by step
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=6,
        weight_decay=0.1,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        logging_steps=1,
        report_to="none",
    )
    trainer = Recorded(
        model=model,
        args=arguments,
        train_dataset=texts("train"),
        eval_dataset=texts("val"),
        data_collator=collate,
    )
    trainer.train()
    parts = trainer.micro_batches
    return {
        "train/loss": [sum(pair) for pair in zip(parts[::2], parts[1::2], strict=True)],
        "val/loss": [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line],
    }


if __name__ == "__main__":
    main()
