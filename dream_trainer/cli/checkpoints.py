"""`dream-trainer checkpoints ...`: the arguments of its commands. What they do is in the modules that `run` imports."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg, subcommand

from dream_trainer.stores.store_path import as_path

# Defaults of None and False say nothing in a help text.
Flag = Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")]
Json = Annotated[FlagCreatePairsOff[bool], arg(name="json", help_behavior_hint="")]
Count = Annotated[int | None, arg(metavar="N", help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class Ls:
    """List a run's checkpoints, whole ones and others."""

    run_path: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run's directory, or its `checkpoints` directory."""
    as_json: Json = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        """Prints the table."""
        from dream_trainer.cli.listing import ls

        return ls(as_path(self.run_path), as_json=self.as_json)


@dataclass(frozen=True, kw_only=True)
class Show:
    """Show what a checkpoint holds: counters, metrics, models, optimizers and config."""

    checkpoint: Annotated[Positional[Path], arg(metavar="CHECKPOINT")]
    """A checkpoint's directory; or a run's, whose newest whole checkpoint is meant."""
    step: Count = None
    """With a run's directory: the checkpoint of this step."""
    tensors: Flag = False
    """List every tensor with its shape and dtype."""
    as_json: Json = False
    """Print JSON, with every tensor and file."""

    def run(self) -> int:
        """Prints the tables."""
        from dream_trainer.cli.show import show

        return show(as_path(self.checkpoint), self.step, tensors=self.tensors, as_json=self.as_json)


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Read every file through and compare checksums; the exit code is 1 if anything is damaged."""

    path: Annotated[Positional[Path], arg(metavar="PATH")]
    """A checkpoint's directory, or a run's: then all its checkpoints."""
    as_json: Json = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        """Prints the verdicts."""
        from dream_trainer.cli.listing import verify

        return verify(as_path(self.path), as_json=self.as_json)


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Compare two checkpoints: counters, metrics, config, and tensors by name, shape, dtype and value."""

    a: Annotated[Positional[Path], arg(metavar="A")]
    """A checkpoint's directory; or a run's, whose newest whole checkpoint is meant."""
    b: Annotated[Positional[Path], arg(metavar="B")]
    """The other one."""
    values: bool = True
    """Read the tensors and compare their values, one at a time."""
    as_json: Json = False
    """Print JSON, with every tensor that differs."""

    def run(self) -> int:
        """Prints the differences."""
        from dream_trainer.cli.difference import diff

        return diff(as_path(self.a), as_path(self.b), values=self.values, as_json=self.as_json)


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Remove checkpoints that no rule keeps. The newest whole one stays; damaged and other directories stay too,
    unless they are asked for."""

    run_path: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run's directory, or its `checkpoints` directory. No job may be writing to it."""
    keep_last: Count = None
    """Number of newest checkpoints to keep."""
    keep_every_n_steps: Count = None
    """Keep steps divisible by this."""
    keep_best: Count = None
    """Number of best checkpoints by --metric to keep."""
    metric: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """Name of a validation metric, such as val/loss."""
    mode: Annotated[Literal["min", "max"] | None, arg(help_behavior_hint="")] = None
    """Whether its smallest or its largest value is best; by default as the run and the name say."""
    damaged: Flag = False
    """Also remove checkpoints that are damaged, and what killed jobs left unfinished."""
    aside: Flag = False
    """Also remove checkpoints that were set aside when the run went on from an older one."""
    dry_run: Flag = False
    """Print what would be removed, and remove nothing."""
    as_json: Json = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        """Removes, and prints what was removed."""
        from dream_trainer.checkpoint.retention import Retention
        from dream_trainer.cli.prune import mode_of_run, prune

        retention = Retention(
            keep_last=self.keep_last,
            keep_every_n_steps=self.keep_every_n_steps,
            keep_best=self.keep_best,
            metric=self.metric,
            mode=mode_of_run(as_path(self.run_path), self.metric, self.mode),
        )
        return prune(
            as_path(self.run_path),
            retention,
            damaged=self.damaged,
            aside=self.aside,
            dry_run=self.dry_run,
            as_json=self.as_json,
        )


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a model's weights as safetensors in Hugging Face's layout, or as one .safetensors, .pt or .pth file."""

    checkpoint: Annotated[Positional[Path], arg(metavar="CHECKPOINT")]
    """A checkpoint's directory; or a run's, whose newest whole checkpoint is meant."""
    out: Annotated[Positional[Path], arg(metavar="OUT")]
    """A directory, or a file that ends in .safetensors, .pt or .pth."""
    step: Count = None
    """With a run's directory: the checkpoint of this step."""
    model: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """Name of the model, if there are several."""
    weights: Annotated[str, arg(metavar="WHICH")] = "model"
    """"model" as trained, "ema" or "swa" as averaged; "ema.1" by the second EMA callback."""
    dtype: Annotated[Literal["fp32", "bf16", "fp16"] | None, arg(metavar="{fp32,bf16,fp16}", help_behavior_hint="")] = (
        None
    )
    """Cast floating-point tensors to this. By default each stays as it is."""
    max_shard_size: Annotated[str, arg(metavar="SIZE")] = "5GB"
    """Largest file of a directory, such as 2GB (10^9 bytes each) or 500MiB."""
    renames: Annotated[
        dict[str, str], arg(metavar="PATTERN REPLACEMENT [PATTERN REPLACEMENT ...]", help_behavior_hint="")
    ] = field(default_factory=dict)
    """Regular expressions and what takes their place in tensor names; a name that becomes empty is left out."""
    merge_adapters: Flag = False
    """Of a model with peft's adapters: write the base with the adapters added, and not the adapters alone."""
    base: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Where the frozen weights that the checkpoint left out are, if not where the run loaded them from."""
    overwrite: Flag = False
    """Replace an earlier export."""
    as_json: Json = False
    """Print JSON: the files and their sizes."""

    def run(self) -> int:
        """Exports, and prints the files."""
        from dream_trainer.cli.export_command import export

        return export(self)


@dataclass(frozen=True, kw_only=True)
class Push:
    """Export a model's weights and upload them to the Hugging Face Hub, with a model card drawn from the checkpoint."""

    checkpoint: Annotated[Positional[Path], arg(metavar="CHECKPOINT")]
    """A checkpoint's directory; or a run's, whose newest whole checkpoint is meant."""
    repo: Annotated[str, arg(metavar="OWNER/NAME")]
    """The repository; created if there is none. Log in before: hf auth login."""
    step: Count = None
    """With a run's directory: the checkpoint of this step."""
    model: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """Name of the model, if there are several."""
    weights: Annotated[str, arg(metavar="WHICH")] = "model"
    """"model" as trained, "ema" or "swa" as averaged; "ema.1" by the second EMA callback."""
    merge_adapters: Flag = False
    """Of a model with peft's adapters: push the base with the adapters added, and not the adapters alone."""
    base: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Where the frozen weights that the checkpoint left out are, if not where the run loaded them from."""
    base_model: Annotated[str | None, arg(metavar="OWNER/NAME", help_behavior_hint="")] = None
    """The base's name on the hub, for the card and the adapters' config."""
    beside: Annotated[Path | None, arg(metavar="DIRECTORY", help_behavior_hint="")] = None
    """A directory whose files go along, such as a tokenizer's; a README.md there is taken as the card."""
    public: Flag = False
    """Create a repository that everybody can read."""
    as_json: Json = False
    """Print JSON: the repository and the commit."""

    def run(self) -> int:
        """Pushes, and prints the commit's address."""
        from dream_trainer.cli.push_command import push

        return push(self)


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """List, check, compare, prune, export and push a run's checkpoints."""

    command: (
        Annotated[Ls, subcommand("ls")]
        | Annotated[Show, subcommand("show")]
        | Annotated[Verify, subcommand("verify")]
        | Annotated[Diff, subcommand("diff")]
        | Annotated[Prune, subcommand("prune")]
        | Annotated[Export, subcommand("export")]
        | Annotated[Push, subcommand("push")]
    )

    def run(self) -> int:
        """Runs the command."""
        return self.command.run()
