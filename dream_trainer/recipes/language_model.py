"""LanguageModel: a causal language model on packed documents, new or pretrained, with adapters if you want them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dream_trainer.config.trainer_config import DreamTrainerConfig
from dream_trainer.data import DistributedDataLoader, Mixture, PackedRows, TokenFile, packed_attention_mask
from dream_trainer.optim import OptimizerParameters, ScheduleParameters, build_optimizers, build_schedules
from dream_trainer.trainer.dream import DreamTrainer
from dream_trainer.weights.adapters import load_base_weights
from dream_trainer.weights.load import load_weights


@dataclass(kw_only=True)
class LanguageModelConfig(DreamTrainerConfig):
    """Config of LanguageModel."""

    pretrained: str = ""
    """Directory of a model in Hugging Face's layout, whose weights training starts from. "" builds a new model."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """Config of a new model: `model_type`, and other fields of its transformers config, such as `vocab_size`."""
    lora: dict[str, Any] | None = None
    """Arguments of peft's `LoraConfig`, such as `r` and `target_modules`. None trains every weight."""
    train_data: str = ""
    """Token files to train on: the directory that `dream-trainer data tokenize` wrote."""
    val_data: str | None = None
    """Token files to validate on. None validates nothing."""
    row_length: int = 1024
    """Tokens in a packed row, the longest context that the model sees."""
    optimizer: OptimizerParameters = field(
        default_factory=lambda: OptimizerParameters(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    )
    """Optimizer and its numbers."""
    schedule: ScheduleParameters = field(
        default_factory=lambda: ScheduleParameters(name="cosine", warmup_steps=0.02, min_lr_ratio=0.1)
    )
    """Learning rate schedule and its numbers."""


class LanguageModel(DreamTrainer):
    """Next-token prediction. Every label of a step counts by its weight, on all ranks and micro-batches."""

    if TYPE_CHECKING:
        config = cast(LanguageModelConfig, ...)  # a subclass may declare a narrower type
    else:
        config: LanguageModelConfig

    def configure_models(self) -> None:
        self.model = self.build_model(self.config.lora)

    def build_model(self, lora: dict[str, Any] | None) -> nn.Module:
        """A model of transformers without pretrained weights; with adapters if `lora` has their arguments."""
        from transformers import AutoConfig, AutoModelForCausalLM

        base = self.config.pretrained
        settings = AutoConfig.from_pretrained(base) if base else AutoConfig.for_model(**self.config.architecture)
        model: nn.Module = AutoModelForCausalLM.from_config(settings)
        if lora is not None:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(cast(Any, model), LoraConfig(task_type="CAUSAL_LM", **lora))
        return model

    def load_pretrained(self) -> None:
        if self.config.pretrained:
            load = load_weights if self.config.lora is None else load_base_weights
            load(self.model, self.config.pretrained)

    def source(self, path: str) -> Any:
        """The documents of `train_data` or `val_data`, which know their lengths."""
        return TokenFile(path)

    def documents(self) -> tuple[Any, Any]:
        """Training and validation documents in their order; None validates nothing. Override it for mixtures."""
        paths = {"train": self.config.train_data, "val": self.config.val_data}
        mixtures = {n: Mixture({n: self.source(p)}, max_epochs={n: 1}) for n, p in paths.items() if p is not None}
        return mixtures["train"], mixtures.get("val")

    def configure_dataloaders(self) -> tuple[Any, Any]:
        sizes, (train, val) = self.config.training_parameters, self.documents()
        train_loader = self.loader(train, self.micro_batch_size, is_train=True)
        return train_loader, None if val is None else self.loader(val, sizes.val_batch_size, is_train=False)

    def loader(self, documents: Any, batch_size: int, *, is_train: bool) -> Any:
        """A loader over one of the two that `documents` returned."""
        return DistributedDataLoader(PackedRows(documents, self.config.row_length), batch_size)

    def configure_optimizers(self) -> None:
        self.optimizers = build_optimizers(self.config.optimizer, self.model)

    def configure_schedulers(self) -> None:
        self.schedulers = build_schedules(self.config.schedule, self.optimizers, total_steps=self.total_steps)

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits [rows, row_length, vocabulary]; a token sees its own document only."""
        mask = packed_attention_mask(batch["documents"], "sdpa")
        output = self.model(batch["tokens"], attention_mask=mask, position_ids=batch["positions"], use_cache=False)
        return cast(Tensor, output.logits)

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean loss over the batch's labels by their weights, and the sum of these; 0 and 0 if there is no label."""
        logits, weights = self.logits(batch).float(), batch["weights"].flatten()
        losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        count = weights.sum()
        return (losses * weights).sum() / count.clamp(min=torch.finfo(count.dtype).tiny), count

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor | None]:
        loss, count = self.loss(batch)
        self.backward(loss, weight=count)
        return {"loss": loss, "grad_norm": self.step(self.model, self.optimizers, self.schedulers)}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss, count = self.loss(batch)
        return {"loss": loss}, count

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        if "val/loss" in metrics:
            self.log("val/perplexity", torch.tensor(metrics["val/loss"]).exp())

    @torch.no_grad()
    def generate(self, prompt: Sequence[int], length: int, *, temperature: float = 1.0, seed: int = 0) -> list[int]:
        """The token ids of `prompt`, and `length` that the model draws; for all ranks, which draw the same."""
        draw, was_training = torch.Generator().manual_seed(seed), self.model.training
        tokens = torch.tensor([[*prompt]], device=self.world.device)
        self.model.eval()
        for _ in range(length):
            row = tokens[:, -self.config.row_length :]
            positions = torch.arange(row.shape[1], device=row.device)[None]
            with self.autocast():
                logits = self.logits({"tokens": row, "documents": torch.zeros_like(row), "positions": positions})
            chances = torch.softmax(logits[0, -1].float().cpu() / temperature, dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=draw)[None].to(row.device)], dim=1)
        self.model.train(was_training)
        return [*map(int, tokens[0])]


if __name__ == "__main__":
    with LanguageModel.from_cli() as trainer:
        trainer.fit()
