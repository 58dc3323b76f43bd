"""`dream-trainer data tokenize`: token files from text."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from dream_trainer.screen import show


@dataclass(frozen=True, kw_only=True)
class Data:
    """Write text into token files, for TokenFile. The same command again continues after a kill."""

    command: Positional[Literal["tokenize"]]
    """The command."""
    inputs: Annotated[Positional[tuple[str, ...]], arg(metavar="INPUT [INPUT ...]", help_behavior_hint="")]
    """Files or patterns of files: .jsonl and .jsonl.gz (a document per line), .parquet (per row), others (per file); or
    hf:NAME of a Hugging Face dataset, hf:DIRECTORY of a saved one."""
    output: Annotated[Path, arg(metavar="DIRECTORY")]
    """Directory for the token files."""
    tokenizer: Annotated[str, arg(metavar="NAME")] = "bytes"
    """bytes; a tokenizer.json file; or a name or directory for transformers."""
    end: Annotated[str | None, arg(metavar="TOKEN", help_behavior_hint="")] = None
    """Token at a document's end. By default the tokenizer's own, if it has one."""
    field: Annotated[str, arg(metavar="NAME")] = "text"
    """Field of a line, or column of a row, that has the text."""
    split: Annotated[str, arg(metavar="NAME")] = "train"
    """Split of a Hugging Face dataset."""
    workers: Annotated[int, arg(metavar="N")] = 1
    """Number of processes; each makes one shard at a time."""

    def run(self) -> None:
        import numpy as np

        from dream_trainer.checks import check_integer
        from dream_trainer.data.sources.token_file import TokenFile, plan_tasks, tokenize

        check_integer("workers", self.workers, minimum=1)
        tasks = plan_tasks(self.inputs, self.field, self.split)
        made: list[int] = []

        def done(tokens: int) -> None:
            made.append(tokens)
            show(f"{len(made)} of {len(tasks)} shards, {sum(made):,} tokens", sys.stderr)

        tokenize(tasks, self.output, self.tokenizer, end=self.end, workers=self.workers, done=done)
        tokens = TokenFile(self.output)
        print(
            f"{self.output}: {len(tokens):,} documents, {tokens.num_tokens:,} tokens; tokens of a document: mean "
            f"{tokens.lengths.mean():,.0f}, median {np.median(tokens.lengths):,.0f}, longest "
            f"{tokens.lengths.max():,}. Vocabulary: {tokens.vocabulary_size}"
        )
