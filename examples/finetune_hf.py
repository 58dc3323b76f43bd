"""Fine-tunes a text classifier from Hugging Face's transformers; offline, on text that comes with Python.

    python examples/finetune_hf.py
    python examples/finetune_hf.py --model path/to/all-MiniLM-L6-v2
    torchrun --nproc-per-node=2 examples/finetune_hf.py

The task: which package of the standard library does a docstring come from? Without `--model` a small BERT starts from
random weights; with it any encoder that `AutoModelForSequenceClassification` knows starts from its own. The model
computes its loss, a data collator pads, and what comes out is a directory that `transformers` loads.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BatchEncoding,
    BertConfig,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    get_constant_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from dream_trainer import (
    DreamTrainer,
    DreamTrainerConfig,
    EarlyStopping,
    LoggerParameters,
    Progress,
    TrainingParameters,
    load_weights,
    parse,
)

PACKAGES = ("asyncio", "email", "importlib", "logging", "multiprocessing", "tkinter", "unittest", "xml")
LEFT_OUT = {"test", "tests", "__pycache__"}
Example = tuple[str, int]


@dataclass(kw_only=True)
class FinetuneConfig(DreamTrainerConfig):
    """A run of this example; the defaults take about a minute on two CPU cores."""

    model: Path | None = None
    """Directory of a model from Hugging Face, with its tokenizer. None builds a small one, and a tokenizer of the words
    in the training text."""
    learning_rate: float | None = None
    """Peak learning rate of AdamW. None takes 1e-3 for new weights and 1e-4 for pretrained ones."""
    max_tokens: int = 64
    """Tokens of a text that the model sees."""
    export_to: Path = Path("finetuned")
    """Directory in which transformers find the trained model and its tokenizer."""


def read_examples() -> list[Example]:
    """First paragraphs of the docstrings in `PACKAGES`, each once, and the number of the package."""
    root, found = Path(os.__file__).parent, dict[str, int]()
    for label, package in enumerate(PACKAGES):
        for path in sorted((root / package).rglob("*.py")):
            if LEFT_OUT.isdisjoint(path.relative_to(root).parts):
                for node in ast.walk(ast.parse(path.read_bytes())):
                    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                        text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                        if len(text) > 20:
                            found.setdefault(text, label)
    return list(found.items())


def is_validation(text: str) -> bool:
    """Whether a text is held out; depends on it alone, so that every rank and machine agrees."""
    return hashlib.sha256(text.encode()).digest()[0] < 256 // 8


class Texts(Dataset[dict[str, Any]]):
    """Texts as token numbers; of lengths of their own, which the collator evens out."""

    def __init__(self, examples: Iterable[Example], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        self.examples, self.tokenizer, self.max_tokens = list(examples), tokenizer, max_tokens

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        text, label = self.examples[index]
        return {**self.tokenizer(text, truncation=True, max_length=self.max_tokens), "label": label}


def word_tokenizer(texts: Iterable[str], size: int = 4000) -> PreTrainedTokenizerBase:
    """A tokenizer of the most common words; the same on every rank, since ties go by the alphabet."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.normalizers import Lowercase
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing

    counts = Counter(word for text in texts for word in re.findall(r"\w+|[^\w\s]+", text.lower()))
    words = sorted(counts, key=lambda word: (-counts[word], word))
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", *words[: size - 3]])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = Lowercase(), Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", vocabulary["[CLS]"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", model_max_length=512
    )


class Finetune(DreamTrainer):
    """Text classification with a model that computes its own loss."""

    config: FinetuneConfig

    def pre_configure(self) -> None:
        examples = read_examples()
        train = [example for example in examples if not is_validation(example[0])]
        validation = [example for example in examples if is_validation(example[0])]
        if self.config.model is None:
            self.tokenizer = word_tokenizer(text for text, _ in train)
        else:
            self.tokenizer = AutoTokenizer.from_pretrained(self.config.model, local_files_only=True)
        self.train_texts, self.validation_texts = (
            Texts(part, self.tokenizer, self.config.max_tokens) for part in (train, validation)
        )

    def configure_models(self) -> None:
        id2label: dict[int, str] = dict(enumerate(PACKAGES))
        label2id = {name: number for number, name in id2label.items()}
        if self.config.model is None:
            config = BertConfig(
                vocab_size=len(self.tokenizer),
                max_position_embeddings=512,
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=256,
                id2label=id2label,
                label2id=label2id,
            )
        else:
            config = AutoConfig.from_pretrained(
                self.config.model, local_files_only=True, id2label=id2label, label2id=label2id
            )
        # From the config and not from_pretrained: so no rank ever holds more than its own shard.
        self.model = AutoModelForSequenceClassification.from_config(config)
        self.model.config.architectures = [type(self.model).__name__]

    def load_pretrained(self) -> None:
        if self.config.model is not None:
            # Files of a model without a head name its parts from within. The new head is missing, and keeps its values.
            part = self.model.base_model_prefix
            load_weights(
                self.model, self.config.model, renames={rf"^(?!{part}\.|classifier\.)": f"{part}."}, strict=False
            )

    def configure_dataloaders(self) -> tuple[DataLoader[Any], DataLoader[Any]]:
        collate, sizes = DataCollatorWithPadding(self.tokenizer), self.config.training_parameters
        return (
            DataLoader(self.train_texts, sizes.train_batch_size, shuffle=True, drop_last=True, collate_fn=collate),
            DataLoader(self.validation_texts, sizes.val_batch_size, collate_fn=collate),
        )

    def configure_optimizers(self) -> None:
        rate = self.config.learning_rate or (1e-3 if self.config.model is None else 1e-4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=0.01, fused=True)

    def configure_schedulers(self) -> None:
        if self.total_steps is None:  # there is no end to fall towards
            self.scheduler = get_constant_schedule_with_warmup(self.optimizer, 100)
        else:
            self.scheduler = get_linear_schedule_with_warmup(self.optimizer, self.total_steps // 10, self.total_steps)

    def training_step(self, batch: BatchEncoding, batch_idx: int) -> dict[str, Tensor]:
        output = self.model(**batch)
        self.backward(output.loss)
        self.step(self.model, self.optimizer, self.scheduler)
        return {"loss": output.loss}

    def validation_step(self, batch: BatchEncoding, batch_idx: int) -> dict[str, Tensor]:
        output = self.model(**batch)
        return {"loss": output.loss, "accuracy": (output.logits.argmax(-1) == batch["labels"]).float().mean()}

    def export_for_transformers(self, directory: Path) -> None:
        """Writes weights, config and tokenizer; called by every rank."""
        self.export(directory, overwrite=True)
        if self.world.is_main:
            self.tokenizer.save_pretrained(directory)


def show(directory: Path, texts: Iterable[str]) -> None:
    """What the exported model says of texts, as anybody who has the directory would ask it."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    for text in texts:
        with torch.no_grad():
            logits = model(**tokenizer(text, return_tensors="pt")).logits[0]
        print(f"{model.config.id2label[int(logits.argmax())]:>16}  {text}")


def default_config() -> FinetuneConfig:
    """What a run without arguments does."""
    return FinetuneConfig(
        project="examples",
        group="finetune_hf",
        experiment="docstrings",
        training_parameters=TrainingParameters(
            n_epochs=10, global_batch_size=32, train_batch_size=16, val_batch_size=64
        ),
        logger_parameters=LoggerParameters(loggers=("jsonl",)),
        callbacks=[
            Progress(metrics=("train/loss", "val/accuracy")),
            EarlyStopping("val/accuracy", mode="max", patience=3),
        ],
    )


def main() -> None:
    """Trains from the command line, exports, and asks the export."""
    config = parse(default_config())
    with Finetune(config) as trainer:
        trainer.fit()
        trainer.export_for_transformers(config.export_to)
        if trainer.world.is_main:
            print(f"exported to {config.export_to}; it says:")
            show(config.export_to, ["Close the window and destroy its children.", "Wait until the coroutine is done."])


if __name__ == "__main__":
    main()
