"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290): a policy, and the frozen model it began as.

    python examples/dpo.py
    torchrun --nproc-per-node=2 examples/dpo.py

The small base of `examples/lora.py` has read source code alone, and goes on with code whatever it is given. A pair is a
prompt from Python's manual, how the manual goes on, which is preferred, and code. The reference is the base again,
sharded as the policy is, without gradients, optimizer state or a place in checkpoints, which name it by its digest. A
picture, `dpo.png`, shows what the policy prefers of pairs that it has not seen, and how its rewards part. The loss is
that of the recipe, dream_trainer/recipes/preferences.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lora import LENGTH, pretrain, rows
from pictures import curves
from torch import Tensor

import dream_trainer as dt

PROMPT = LENGTH // 2  # bytes of a row that both answers follow


@dataclass(kw_only=True)
class Config(dt.recipes.DPOConfig):
    """A run of this example."""

    pretraining_steps: int = 150
    """Steps that the small base is trained for."""


def pairs() -> Tensor:
    """(pairs, 2, LENGTH): each prompt with the prose that follows it, and with code."""
    order = torch.Generator().manual_seed(1)
    good, bad = (found[torch.randperm(len(found), generator=order)] for found in (rows("prose"), rows("code")))
    good = good[: len(bad)]
    return torch.stack([good, torch.cat([good[:, :PROMPT], bad[:, PROMPT:]], dim=1)], dim=1)


class Prefer(dt.recipes.DPO):
    """Pairs of bytes, which need no tokenizer."""

    config: Config

    def documents(self) -> tuple[Any, Any]:
        tokens = pairs()
        labels = tokens.clone()
        labels[:, :, :PROMPT] = -100
        samples = [{"tokens": [*pair], "labels": [*label]} for pair, label in zip(tokens, labels, strict=True)]
        return samples[64:], samples[:64]


def main() -> None:
    """Trains the base if need be, then the policy, and exports it."""
    config = Config(
        project="examples",
        group="dpo",
        experiment="manual",
        pretrained="base",
        beta=0.03,
        optimizer=dt.OptimizerParameters(lr=1e-4),
        schedule=dt.ScheduleParameters(name="constant"),
        training_parameters=dt.TrainingParameters(
            max_steps=60, global_batch_size=8, train_batch_size=4, val_batch_size=16, val_every_n_steps=20
        ),
        checkpoint_parameters=dt.CheckpointParameters(save_frozen=False),
        logger_parameters=dt.LoggerParameters(loggers=("jsonl",)),
        callbacks=[dt.Progress(metrics=("train/loss", "val/margin", "val/likelier"))],
    )
    config = dt.parse(config)
    pretrain(config.pretrained, config.pretraining_steps)
    with Prefer(config) as trainer:
        before = trainer.evaluate()
        trainer.fit()
        trainer.export("policy", model="model", overwrite=True)
        if trainer.world.is_main:
            names = ("likelier", "chosen", "rejected")
            found = {name: [(0, before[f"val/{name}"]), *trainer.history_of(f"val/{name}")] for name in names}
            curves(found, "share of pairs, and mean rewards")[0].savefig("dpo.png")
            shares = before["val/likelier"], found["likelier"][-1][1]
            print("prose is likelier for {:.0%} of unseen pairs before, {:.0%} after; see dpo.png".format(*shares))


if __name__ == "__main__":
    main()
