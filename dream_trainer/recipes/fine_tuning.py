"""SupervisedFineTuning: a pretrained language model learns the answers to prompts, whole or by adapters.

python -m dream_trainer.recipes.fine_tuning --config run.yaml
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from dream_trainer.data import JsonLines, WithLengths
from dream_trainer.optim import OptimizerParameters
from dream_trainer.recipes.language_model import LanguageModel, LanguageModelConfig


@dataclass(kw_only=True)
class SupervisedFineTuningConfig(LanguageModelConfig):
    """Config of SupervisedFineTuning."""

    pretrained: str = field()
    """Directory of a model in Hugging Face's layout, whose weights training starts from."""
    train_data: str = ""
    """Files of JSON lines with "prompt" and "answer" to train on."""
    val_data: str | None = None
    """Files of JSON lines to validate on. None validates nothing."""
    tokenizer: str | None = None
    """Directory or name of the tokenizer for transformers. None takes the one in `pretrained`."""
    optimizer: OptimizerParameters = field(default_factory=lambda: OptimizerParameters(lr=1e-4, weight_decay=0.0))
    """Optimizer and its numbers."""


class SupervisedFineTuning(LanguageModel):
    """The tokens of answers are learned; those of prompts are only read."""

    if TYPE_CHECKING:
        config = cast(SupervisedFineTuningConfig, ...)  # a subclass may declare a narrower type
    else:
        config: SupervisedFineTuningConfig

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the data, for transformers."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.config.tokenizer or self.config.pretrained)

    def encode(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Tokens of a line's prompt and answer, and how much predicting each counts.

        If the tokenizer has a chat template, the prompt is the user's turn.
        """
        if self.tokenizer.chat_template is None:
            prompt = self.tokenizer(line["prompt"], add_special_tokens=False)["input_ids"]
        else:
            turns = [{"role": "user", "content": line["prompt"]}]
            prompt = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        answer = [*self.tokenizer(line["answer"], add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        return {"tokens": [*prompt, *answer], "weights": [0.0] * len(prompt) + [1.0] * len(answer)}

    def source(self, path: str) -> Any:
        lines = JsonLines(path)
        try:
            samples = [self.encode(lines[number]) for number in range(len(lines))]
        except KeyError as error:
            raise ValueError(f"{path}: a line has no {error}, but {sorted(lines[0])}. Override encode.") from error
        return WithLengths(samples, [len(sample["tokens"]) for sample in samples])


if __name__ == "__main__":
    with SupervisedFineTuning.from_cli() as trainer:
        trainer.fit()
