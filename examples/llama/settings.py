"""The config of train.py, and the command line: `--model` chooses the defaults of all other arguments."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from model import PRESETS, LlamaConfig
from parallel import check_length, check_split
from weights import FROM_HF, config_from_hf

import dream_trainer as dt
from dream_trainer.errors import ConfigError


@dataclass(kw_only=True)
class LlamaTrainerConfig(dt.DreamTrainerConfig):
    """A run of this example. `--model` with a preset (tiny, debug, 1b, 8b) or a directory from Hugging Face sets the
    defaults shown here."""

    model: LlamaConfig = field(default_factory=LlamaConfig)
    """Shape of the model."""
    seq_len: int = 128
    """Tokens of one sample."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of the parameters; float64 shows that two ways to run differ by rounding alone."""
    optimizer: dt.OptimizerParameters = field(
        default_factory=lambda: dt.OptimizerParameters(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    )
    """Optimizer by name; small models bear a high rate."""
    schedule: dt.ScheduleParameters = field(
        default_factory=lambda: dt.ScheduleParameters(name="cosine", warmup_steps=9, min_lr_ratio=0.1)
    )
    """Learning rate schedule by name, with its numbers."""
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


def default_config(model: str) -> LlamaTrainerConfig:
    """What a run of a preset, or of a Hugging Face directory, does without further arguments."""
    pretrained = None if model in PRESETS else model
    return LlamaTrainerConfig(
        project="examples",
        group="llama",
        experiment=Path(model).resolve().name if pretrained else model,
        model=config_from_hf(model) if pretrained else PRESETS[model],
        training_parameters=dt.TrainingParameters(
            max_steps=200,
            global_batch_size=32,
            train_batch_size=16,
            val_batch_size=32,
            gradient_clip_norm=1.0,
            val_every_n_steps=50,
        ),
        checkpoint_parameters=dt.CheckpointParameters(
            save_every_n_steps=50, keep_last=2, init_from=pretrained, init_renames=FROM_HF if pretrained else {}
        ),
        # The progress display shows the numbers; the console logger would show them again.
        logger_parameters=dt.LoggerParameters(loggers=("jsonl",)),
        callbacks=[dt.callbacks.ModelSummary(depth=1), dt.callbacks.TrainerSummary(), dt.Progress()],
    )


def command_line() -> LlamaTrainerConfig:
    """The config that the arguments ask for."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", default="debug")
    chosen, others = parser.parse_known_args()
    if chosen.model not in PRESETS and not Path(chosen.model).is_dir():
        parser.error(f"--model {chosen.model} is not a directory, and no preset: those are {', '.join(PRESETS)}.")
    config = dt.parse(default_config(chosen.model), others)
    config.callbacks.get(dt.Progress).tokens_per_sample = config.seq_len
    return config
