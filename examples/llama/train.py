"""Trains a Llama on the Python standard library's own source, byte by byte.

    python examples/llama/train.py --model tiny --training.max-steps 50
    torchrun --nproc-per-node=2 examples/llama/train.py --model debug --model.n-layers 8

`--model` is a preset (tiny, debug, 1b, 8b) or the directory of a Llama from Hugging Face, whose shape and weights it
then starts from; `--model.n-layers` and the like change a part. `--help-all` lists all. The file stays as it is
from one CPU to many GPUs: how ranks divide the work is in `--device-parameters`, and what is learned does not depend on
it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from model import PRESETS, Llama, LlamaConfig, generate
from parallel import check_length, check_split, parallelize, whole_logits
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from weights import FROM_HF, config_from_hf, to_hf

from dream_trainer import (
    CheckpointParameters,
    DreamTrainer,
    DreamTrainerConfig,
    LoggerParameters,
    TrainingParameters,
    parse,
)
from dream_trainer.callbacks import ModelSummary, Progress, TrainerSummary
from dream_trainer.errors import ConfigError

# The text is that of examples/gpt. Its folder comes last, so that `model` stays the one beside this file.
sys.path.append(str(Path(__file__).parent.parent / "gpt"))
from corpus import load_corpus

PROMPT = b"def "
Batch = tuple[Tensor, Tensor, Tensor]
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(kw_only=True)
class LlamaTrainerConfig(DreamTrainerConfig):
    """A run of this example. `--model` with a preset (tiny, debug, 1b, 8b) or a directory from Hugging Face sets the
    defaults shown here."""

    model: LlamaConfig = field(default_factory=LlamaConfig)
    """Shape of the model."""
    seq_len: int = 128
    """Tokens of one sample."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of the parameters; float64 shows that two ways to run differ by rounding alone."""
    learning_rate: float = 3e-3
    """Peak learning rate of AdamW; small models bear a high one."""
    weight_decay: float = 0.1
    """Decay of matrices; norms have none."""
    warmup_steps: int = 10
    """Optimizer steps until the learning rate peaks; it then follows a cosine to a tenth of it."""
    sample_tokens: int = 0
    """Tokens of text to generate at the end."""
    export_to: str | None = None
    """Directory in which Hugging Face's transformers find the trained model at the end; None writes none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.seq_len <= self.model.max_seq_len:
            raise ConfigError(
                f"seq_len={self.seq_len} is not between 1 and model.max_seq_len={self.model.max_seq_len}. "
                "Use shorter samples, or raise model.max_seq_len."
            )
        if self.model.vocab_size < 256:
            raise ConfigError(f"model.vocab_size={self.model.vocab_size} is too small for bytes. Use 256 or more.")
        n_ranks = self.device_parameters.tensor_parallel
        try:
            check_split(self.model, n_ranks)
            if self.tensor_parallel_parameters.sequence_parallel:
                check_length(self.seq_len, n_ranks)
        except ValueError as error:
            raise ConfigError(str(error)) from error


class LlamaTrainer(DreamTrainer):
    """Next-token prediction."""

    config: LlamaTrainerConfig

    def configure_models(self) -> None:
        self.model = Llama(self.config.model).to(DTYPES[self.config.dtype])

    def model_blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return list(self.model.layers)

    def apply_tensor_parallel(self, mesh: DeviceMesh) -> None:
        wanted = self.config.tensor_parallel_parameters
        parallelize(self.model, mesh, sequence_parallel=wanted.sequence_parallel, loss_parallel=wanted.loss_parallel)

    def init_weights(self) -> None:
        self.model.init_weights()

    def configure_dataloaders(self) -> tuple[DataLoader[Tensor], DataLoader[Tensor]]:
        corpus = load_corpus(self.config.seq_len)
        parameters = self.config.training_parameters
        micro_batch = parameters.train_batch_size
        if parameters.global_batch_size is not None:
            micro_batch = max(1, min(micro_batch, parameters.global_batch_size // self.world.dp_size))
        return (
            DataLoader(corpus.train, batch_size=micro_batch, shuffle=True, drop_last=True),
            DataLoader(corpus.validation, batch_size=parameters.val_batch_size),
        )

    def configure_optimizers(self) -> None:
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.model.parameters() if parameter.ndim == 1]
        groups = [
            {"params": matrices, "weight_decay": self.config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=self.config.learning_rate, betas=(0.9, 0.95), fused=True)

    def configure_schedulers(self) -> None:
        warmup, total = self.config.warmup_steps, self.total_steps

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            done = min(1.0, (step - warmup) / max(1, total - warmup)) if total else 0.0
            return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))

        self.scheduler = LambdaLR(self.optimizer, factor)

    def cut_batch(self, batch: Tensor, cut: Callable[..., Tensor]) -> Batch:
        """Tokens, targets and positions of samples [batch, seq_len + 1], uint8: those that this rank has of them."""
        tokens, positions = batch.long(), torch.arange(batch.shape[1] - 1, device=batch.device)
        return cut(tokens[:, :-1]), cut(tokens[:, 1:]), cut(positions, dim=0)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor | None]:
        loss = self.loss(batch)
        return {"loss": loss, "grad_norm": self.step(self.model, self.optimizer, self.scheduler)}

    def validation_step(self, batch: Batch, batch_idx: int) -> tuple[dict[str, Tensor], int]:
        return {"loss": self.loss(batch)}, self.n_labels(batch[1])

    def loss(self, batch: Batch) -> Tensor:
        """Mean nats per token; in training its gradients too."""
        tokens, targets, positions = batch
        # Only ranks that share sequences begin elsewhere than at 0; a pipeline cuts its inputs by samples.
        begins_elsewhere = self.config.device_parameters.context_parallel > 1
        inputs = (tokens, positions.expand_as(tokens)) if begins_elsewhere else (tokens,)
        return self.forward_backward(self.model, inputs, targets, self.mean_loss, weight=self.n_labels)

    def mean_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean nats per token."""
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def n_labels(self, targets: Tensor) -> int:
        """Over how many tokens that is the mean."""
        return targets.numel()

    def sample(self) -> str:
        """Text that the model writes; every rank calls it, since a sharded model needs all of them."""
        self.model.eval()
        prompt = torch.tensor(list(PROMPT), device=self.world.device)
        is_cut_in_time = self.config.tensor_parallel_parameters.sequence_parallel
        multiple = self.config.device_parameters.tensor_parallel if is_cut_in_time else 1
        model = partial(whole_logits, self.model, multiple_of=multiple)
        with self.autocast():
            tokens = generate(model, prompt, self.config.sample_tokens, window=self.config.seq_len)
        # A vocabulary beyond bytes has tokens that no text taught it.
        return bytes(min(token, 255) for token in tokens.tolist()).decode(errors="replace")


def default_config(model: str) -> LlamaTrainerConfig:
    """What a run of a preset, or of a Hugging Face directory, does without further arguments."""
    pretrained = None if model in PRESETS else model
    return LlamaTrainerConfig(
        project="examples",
        group="llama",
        experiment=Path(model).resolve().name if pretrained else model,
        model=config_from_hf(model) if pretrained else PRESETS[model],
        training_parameters=TrainingParameters(
            max_steps=200,
            global_batch_size=32,
            train_batch_size=16,
            val_batch_size=32,
            gradient_clip_norm=1.0,
            val_every_n_steps=50,
        ),
        checkpoint_parameters=CheckpointParameters(
            save_every_n_steps=50, keep_last=2, init_from=pretrained, init_renames=FROM_HF if pretrained else {}
        ),
        # The progress display shows the numbers; the console logger would show them again.
        logger_parameters=LoggerParameters(loggers=("jsonl",)),
        callbacks=[ModelSummary(depth=1), TrainerSummary(), Progress()],
    )


def command_line() -> LlamaTrainerConfig:
    """The config that the arguments ask for: `--model` chooses the defaults of all others."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", default="debug")
    chosen, others = parser.parse_known_args()
    if chosen.model not in PRESETS and not Path(chosen.model).is_dir():
        parser.error(f"--model {chosen.model} is not a directory, and no preset: those are {', '.join(PRESETS)}.")
    config = parse(default_config(chosen.model), others)
    config.callbacks.get(Progress).tokens_per_sample = config.seq_len
    return config


def main() -> None:
    """Trains from the command line, then shows or writes what was asked for."""
    config = command_line()
    with LlamaTrainer(config) as trainer:
        trainer.fit()
        text = trainer.sample() if config.sample_tokens else None
        if text is not None and trainer.world.is_main:
            print(f"\nThe model writes:\n\n{text}\n")
        if config.export_to is not None:
            to_hf(trainer.model, Path(config.export_to), world=trainer.world, overwrite=True)


if __name__ == "__main__":
    main()
