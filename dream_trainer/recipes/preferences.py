"""DPO: direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290) of a pretrained language model.

python -m dream_trainer.recipes.preferences --config run.yaml
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dream_trainer.data import DistributedDataLoader, JsonLines
from dream_trainer.optim import OptimizerParameters
from dream_trainer.recipes.fine_tuning import SupervisedFineTuning, SupervisedFineTuningConfig
from dream_trainer.weights.load import load_weights

IGNORED = -100  # the label of a token that predicts nothing


@dataclass(kw_only=True)
class DPOConfig(SupervisedFineTuningConfig):
    """Config of DPO."""

    train_data: str = ""
    """Files of JSON lines with "prompt", "chosen" and "rejected" to train on."""
    beta: float = 0.1
    """How strongly the policy is held to the reference."""
    label_smoothing: float = 0.0
    """Share of the pairs that are assumed to be labelled the wrong way round."""
    row_length: int = 1024
    """Tokens of the longest prompt with its answer. Longer ones are cut off at the end, with a warning."""
    optimizer: OptimizerParameters = field(default_factory=lambda: OptimizerParameters(lr=1e-5, weight_decay=0.0))
    """Optimizer and its numbers."""


class DPO(SupervisedFineTuning):
    """A policy, `model`, and the frozen `reference` that it started as; both are sharded, one is trained."""

    if TYPE_CHECKING:
        config = cast(DPOConfig, ...)  # a subclass may declare a narrower type
    else:
        config: DPOConfig

    def configure_models(self) -> None:
        super().configure_models()
        self.reference = self.build_model(None).requires_grad_(False)

    def load_pretrained(self) -> None:
        super().load_pretrained()
        load_weights(self.reference, self.config.pretrained)

    def encode(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """The tokens and labels of both answers, the preferred one first."""
        pair: dict[str, list[Tensor]] = {"tokens": [], "labels": []}
        for name in ("chosen", "rejected"):
            encoded = super().encode({"prompt": line["prompt"], "answer": line[name]})
            most = self.config.row_length
            if (length := len(encoded["tokens"])) > most:
                self.warn_once("cut", f"row_length={most} cuts off an answer that ends at token {length}. Raise it.")
            tokens, learned = (torch.tensor(encoded[key][:most]) for key in ("tokens", "weights"))
            pair["tokens"].append(tokens)
            pair["labels"].append(tokens.masked_fill(learned == 0, IGNORED))
        return pair

    def documents(self) -> tuple[Any, Any]:
        paths = self.config.train_data, self.config.val_data
        lines = [None if path is None else JsonLines(path) for path in paths]
        train, val = (None if one is None else [self.encode(one[i]) for i in range(len(one))] for one in lines)
        return train, val

    def loader(self, documents: Any, batch_size: int, *, is_train: bool) -> Any:
        return DistributedDataLoader(documents, batch_size, shuffle=is_train, drop_last=is_train, collate_fn=collate)

    def answer_log_probability(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Of both answers, given the prompt: [pairs, 2]."""
        tokens, labels = (batch[name].flatten(0, 1) for name in ("tokens", "labels"))
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
        losses = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORED, reduction="none")
        return -losses.sum(1).view(-1, 2)

    def preferences(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The loss, the rewards, and how often the preferred answer has the higher one, or is likelier."""
        self.reference.eval()
        with torch.no_grad():
            before = self.answer_log_probability(self.reference, batch)
        now = self.answer_log_probability(self.model, batch)
        chosen, rejected = (self.config.beta * (now - before)).unbind(1)
        margin, flipped = chosen - rejected, self.config.label_smoothing
        loss = -(1 - flipped) * F.logsigmoid(margin) - flipped * F.logsigmoid(-margin)
        shares = {"accuracy": margin > 0, "likelier": now[:, 0] > now[:, 1]}
        watched = {"loss": loss, "chosen": chosen, "rejected": rejected, "margin": margin} | shares
        return {name: value.float().mean() for name, value in watched.items()}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor | None]:
        found = self.preferences(batch)
        self.backward(found["loss"])
        return {**found, "grad_norm": self.step(self.model, self.optimizers, self.schedulers)}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return self.preferences(batch)

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        """Logs no perplexity: the loss is not of tokens."""


def collate(pairs: Sequence[Mapping[str, Sequence[Tensor]]]) -> dict[str, Tensor]:
    """Pairs as tokens and labels [pairs, 2, longest]; padding at the end, which no real token sees."""
    fill = {"tokens": 0, "labels": IGNORED}
    padded = {
        name: pad_sequence([row for pair in pairs for row in pair[name]], batch_first=True, padding_value=value)
        for name, value in fill.items()
    }
    return {name: rows.view(len(pairs), 2, -1) for name, rows in padded.items()}


if __name__ == "__main__":
    with DPO.from_cli() as trainer:
        trainer.fit()
