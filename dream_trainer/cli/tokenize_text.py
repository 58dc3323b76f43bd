"""What `dream-trainer data tokenize` does: the shards, with a bar on stderr."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dream_trainer.checks import check_integer
from dream_trainer.cli.output import print_json
from dream_trainer.data.sources.token_file import TokenFile
from dream_trainer.data.sources.tokenizing import plan_tasks, tokenize

if TYPE_CHECKING:
    from dream_trainer.cli.data import Tokenize


def tokenize_text(options: Tokenize) -> None:
    """Makes the token files, and prints how much is in them."""
    check_integer("workers", options.workers, minimum=1)
    tasks = plan_tasks(options.inputs, options.field, options.split)
    columns = (
        TextColumn("tokenize"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("shards, {task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(tasks), tokens=0)
        tokens = 0

        def done(more: int) -> None:
            nonlocal tokens
            tokens += more
            progress.update(bar, advance=1, tokens=tokens)

        tokenize(tasks, options.output, options.tokenizer, end=options.end, workers=options.workers, done=done)
    describe_tokens(options.output)


def describe_tokens(path: Path, *, as_json: bool = False) -> None:
    """Prints how many documents and tokens there are, and how long documents are."""
    tokens = TokenFile(path)
    lengths = np.sort(tokens.lengths)
    middle, longest = int(lengths[len(lengths) // 2]), int(lengths[-1])
    if as_json:
        lengths_of = {"mean": float(lengths.mean()), "median": middle, "max": longest}
        print_json(
            {
                "path": path,
                "documents": len(tokens),
                "tokens": tokens.num_tokens,
                "document_tokens": lengths_of,
                "vocabulary_size": tokens.vocabulary_size,
            }
        )
        return
    print(
        f"{path}: {len(tokens):,} documents, {tokens.num_tokens:,} tokens; a document has {lengths.mean():,.0f} on "
        f"average, half of them {middle:,} or more, the longest {longest:,}. Vocabulary: {tokens.vocabulary_size}"
    )
