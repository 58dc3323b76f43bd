"""`dream-trainer data ...`: the arguments of its commands. What they do is in the modules that `run` imports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg, subcommand

Json = Annotated[FlagCreatePairsOff[bool], arg(name="json", help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class Tokenize:
    """Write text into token files, for TokenFile; begun anew, it goes on where it was."""

    inputs: Annotated[Positional[tuple[str, ...]], arg(metavar="INPUT [INPUT ...]", help_behavior_hint="")]
    """Files or patterns of files: .jsonl and .jsonl.gz (a document is a line's field), .parquet (a row's), others (a
    document is a file); or hf:NAME of a Hugging Face dataset, or hf:DIRECTORY of one that was saved."""
    output: Annotated[Path, arg(metavar="DIRECTORY")]
    """Where the token files go."""
    tokenizer: Annotated[str, arg(metavar="NAME")] = "bytes"
    """bytes; a tokenizer.json file; or a name or directory that transformers knows."""
    end: Annotated[str | None, arg(metavar="TOKEN", help_behavior_hint="")] = None
    """The token at a document's end; the tokenizer's own, if it has one, unless given."""
    field: Annotated[str, arg(metavar="NAME")] = "text"
    """Where lines and rows have their text."""
    split: Annotated[str, arg(metavar="NAME")] = "train"
    """Split of a Hugging Face dataset."""
    workers: Annotated[int, arg(metavar="N")] = 1
    """Processes; each makes a shard at a time."""

    def run(self) -> int:
        """Tokenizes, with a bar, and prints what there is."""
        from dream_trainer.cli.tokenize_text import tokenize_text

        tokenize_text(self)
        return 0


@dataclass(frozen=True, kw_only=True)
class Describe:
    """Say what is in token files: documents, tokens, lengths."""

    path: Annotated[Positional[Path], arg(metavar="PATH")]
    """A token file, or a directory of them."""
    as_json: Json = False
    """Print JSON."""

    def run(self) -> int:
        """Prints it."""
        from dream_trainer.cli.tokenize_text import describe_tokens

        describe_tokens(self.path, as_json=self.as_json)
        return 0


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Read training data without training: samples and tokens per second, packing, waiting, beside a plain DataLoader
    of the same samples."""

    target: Annotated[Positional[str], arg(metavar="TARGET")]
    """A token file or a directory of them, whose documents are packed into rows; or PROGRAM:FUNCTION, a Python file or
    a module and a function in it, which without arguments returns a training loader, or (train, val) as
    configure_dataloaders does."""
    batches: Annotated[int, arg(metavar="N")] = 200
    """Batches to read, after the first 10, which are not counted."""
    seed: Annotated[int, arg(metavar="N")] = 0
    """The seed of the order."""
    row_length: Annotated[int, arg(metavar="N")] = 1024
    """Of token files: tokens of a row."""
    batch_size: Annotated[int, arg(metavar="N")] = 8
    """Of token files: rows of a batch."""
    workers: Annotated[int, arg(metavar="N")] = 0
    """Of token files: processes that load."""

    def run(self) -> int:
        """Reads, with a bar, and prints what was measured."""
        from dream_trainer.cli.data_bench import bench

        bench(self)
        return 0


@dataclass(frozen=True, kw_only=True)
class Data:
    """Training data: from text to token files, what is in them, and how fast they are read."""

    command: (
        Annotated[Tokenize, subcommand("tokenize")]
        | Annotated[Describe, subcommand("describe")]
        | Annotated[Bench, subcommand("bench")]
    )
    """What to do."""

    def run(self) -> int:
        """Runs the command."""
        return self.command.run()
