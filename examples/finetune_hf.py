"""Fine-tunes a text classifier from Hugging Face's transformers; offline, on text that comes with Python.

    python examples/finetune_hf.py
    python examples/finetune_hf.py --pretrained path/to/all-MiniLM-L6-v2 --optimizer.lr 1e-4
    torchrun --nproc-per-node=2 examples/finetune_hf.py

The task: which package of the standard library does a docstring come from? Without `--pretrained` a small BERT starts
from random weights; with it any encoder that `AutoModelForSequenceClassification` knows starts from its own. A data
collator pads, and what comes out is a directory that `transformers` loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import packages
import transformers as hf
from torch import Tensor

import dream_trainer as dt

PACKAGES = ("asyncio", "email", "importlib", "logging", "multiprocessing", "tkinter", "unittest", "xml")
BERT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}


@dataclass(kw_only=True)
class FinetuneConfig(dt.recipes.ClassifierConfig):
    """A run of this example; the defaults take about a minute on two CPU cores."""

    pretrained: str = ""
    """Directory of a model with its tokenizer. "" builds a small one, and a tokenizer of the words in the texts."""
    max_tokens: int = 64
    """Tokens of a text that the model sees."""


class Finetune(dt.recipes.Classifier):
    """Text classification with a model of hf."""

    config: FinetuneConfig

    def pre_configure(self) -> None:
        base, words = self.config.pretrained, packages.common_words(PACKAGES, 4000)
        self.tokenizer = hf.AutoTokenizer.from_pretrained(base) if base else hf.BertTokenizer(vocab=words)

    def configure_models(self) -> None:
        labels = {name: number for number, name in enumerate(PACKAGES)}
        named: dict[str, Any] = {"label2id": labels, "id2label": dict(enumerate(PACKAGES))}
        base, sizes, auto = self.config.pretrained, {**BERT, "vocab_size": len(self.tokenizer)}, hf.AutoConfig
        config = auto.from_pretrained(base, **named) if base else auto.for_model("bert", **sizes, **named)
        # From the config and not from_pretrained: so no rank ever holds more than its own shard.
        self.model: Any = hf.AutoModelForSequenceClassification.from_config(config)
        self.model.config.architectures = [type(self.model).__name__]

    def load_pretrained(self) -> None:
        if self.config.pretrained:
            # Files of a model without a head name its parts from within. The new head is missing, and keeps its values.
            names = {rf"^(?!{self.model.base_model_prefix}\.|classifier\.)": f"{self.model.base_model_prefix}."}
            dt.load_weights(self.model, self.config.pretrained, renames=names, strict=False)

    def datasets(self) -> tuple[Any, Any]:
        return self.samples(held_out=False), self.samples(held_out=True)

    def samples(self, *, held_out: bool) -> list[dict[str, Any]]:
        """Texts as token numbers; of lengths of their own, which the collator evens out."""
        texts, longest = packages.docstrings(PACKAGES, held_out=held_out), self.config.max_tokens
        return [{**self.tokenizer(text, truncation=True, max_length=longest), "label": label} for text, label in texts]

    def collate(self, samples: list[Any]) -> Any:
        return hf.DataCollatorWithPadding(self.tokenizer)(samples)

    def logits_and_labels(self, batch: hf.BatchEncoding) -> tuple[Tensor, Tensor]:
        return self.model(**batch).logits, batch["labels"]


def default_config() -> FinetuneConfig:
    """What a run without arguments does."""
    return FinetuneConfig(
        project="examples",
        group="finetune_hf",
        experiment="docstrings",
        schedule=dt.ScheduleParameters(name="linear", warmup_steps=0.1),
        training_parameters=dt.TrainingParameters(n_epochs=10, global_batch_size=32, train_batch_size=16),
        callbacks=[dt.EarlyStopping("val/accuracy", patience=3)],
    )


def main() -> None:
    """Trains from the command line, exports, and asks the export."""
    with Finetune.from_cli(default_config()) as trainer:
        trainer.fit()
        trainer.export("finetuned", overwrite=True)
        if trainer.world.is_main:
            trainer.tokenizer.save_pretrained("finetuned")
            for text in ("Close the window and destroy its children.", "Wait until the coroutine is done."):
                print(hf.pipeline("text-classification", "finetuned")(text)[0]["label"], text)


if __name__ == "__main__":
    main()
