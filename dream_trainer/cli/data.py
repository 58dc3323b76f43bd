"""`dream-trainer data ...`: the arguments of its commands. What they do is in the modules that `run` imports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg, subcommand


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

    def run(self) -> int:
        """Prints it."""
        from dream_trainer.cli.tokenize_text import describe_tokens

        describe_tokens(self.path)
        return 0


@dataclass(frozen=True, kw_only=True)
class Data:
    """Training data: from text to token files, and what is in them."""

    command: Annotated[Tokenize, subcommand("tokenize")] | Annotated[Describe, subcommand("describe")]
    """What to do."""

    def run(self) -> int:
        """Runs the command."""
        return self.command.run()
