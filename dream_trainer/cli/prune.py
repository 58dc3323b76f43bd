"""`checkpoints prune`: retention by hand, on a run that no job is writing to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from dream_trainer import file_locks
from dream_trainer.best_value import mode_by_name
from dream_trainer.callbacks.tables import print_table
from dream_trainer.checkpoint.files import discard
from dream_trainer.checkpoint.lookup import checkpoints_root
from dream_trainer.checkpoint.retention import Retention, kept
from dream_trainer.checkpoint.run_directory import LOCK_NAME
from dream_trainer.cli.output import metrics_cell, print_json
from dream_trainer.cli.runs import Entry, entries
from dream_trainer.config.checkpoint_parameters import Mode
from dream_trainer.errors import CheckpointError, ConfigError
from dream_trainer.loggers.formatting import format_bytes
from dream_trainer.stores.ownership import is_owned
from dream_trainer.stores.store_path import StorePath


def prune(run: Path, retention: Retention, *, damaged: bool, aside: bool, dry_run: bool, as_json: bool) -> int:
    """Removes what no rule keeps; returns the exit code.

    Args:
        run: The run's directory or its `checkpoints` directory.
        retention: Which whole checkpoints stay.
        damaged: Whether damaged and unfinished ones go too.
        aside: Whether those go too that were set aside.
        dry_run: Remove nothing.
        as_json: Print JSON.

    Raises:
        ConfigError: Nothing was asked for.
        CheckpointError: A live job has the run.
    """
    if retention.keeps_all and not damaged and not aside:
        raise ConfigError(
            "no rule was given. Use --keep-last, --keep-every-n-steps, --keep-best, --damaged or --aside."
        )
    root = checkpoints_root(run)
    with nullcontext() if dry_run else _claimed(root):
        checkpoints = entries(root)
        going = _chosen(checkpoints, retention, damaged=damaged, aside=aside)
        sizes = [entry.size for entry in going]
        for entry in [] if dry_run else going:
            discard(entry.path)
    left = [entry for entry in checkpoints if entry not in going and entry.state != "whole"]
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "removed": [entry.path for entry in going],
                "kept": [entry.path for entry in checkpoints if entry.state == "whole" and entry not in going],
                "left_alone": [{"path": entry.path, "state": entry.state} for entry in left],
                "freed_bytes": sum(sizes),
            }
        )
        return 0
    _print(root, checkpoints, going, left, sizes, dry_run=dry_run)
    return 0


def mode_of_run(run: Path, metric: str | None, mode: Mode | None) -> Mode:
    """Whether the smallest or the largest value of a metric is best: as asked, or as the run and the name have it.

    Raises:
        ConfigError: Neither says, or one says the other than the other.
    """
    if mode is not None or metric is None:
        return mode or "min"
    manifests = [entry.manifest for entry in entries(checkpoints_root(run)) if entry.manifest]
    of_run = manifests[-1].config.get("checkpoint_parameters", {}) if manifests else {}
    by_run = of_run.get("best_mode") if of_run.get("best_metric") == metric else None
    by_name = mode_by_name(metric)
    if by_run and by_name and by_run != by_name:  # before it asked the metric, "min" was the default for all
        raise ConfigError(f"the run took {by_run} for best of {metric}, and its name says {by_name}. Set --mode.")
    known: Mode | None = by_run or by_name
    if known is None:
        raise ConfigError(f"--metric {metric} does not say whether lower or higher values are better. Set --mode.")
    return known


@contextmanager
def _claimed(root: Path) -> Iterator[None]:
    """Holds the run's locks, so that no job starts meanwhile; a directory without one has no job. Of a run in an object
    store it is only seen that no job has it."""
    if isinstance(root, StorePath):
        if is_owned(root.parent):
            raise CheckpointError(
                f"a live job writes to {root.parent}. Stop it first, or let its own retention remove checkpoints."
            )
        yield
        return
    # Checkpoints on another disk have a lock of their own, since `root` may be that place and not the link to it.
    directories = dict.fromkeys([root.absolute().parent, root.resolve().parent, root.resolve()])
    with ExitStack() as locks:
        for path in [directory / LOCK_NAME for directory in directories if (directory / LOCK_NAME).exists()]:
            is_held = file_locks.take(locks.enter_context(path.open("a")))
            if is_held is False:
                raise CheckpointError(
                    f"a live job writes to {path.parent}. Stop it first, or let its own retention remove checkpoints."
                )
            if is_held is None:
                file_locks.warn_of_no_locks(path.parent)
        yield


def _chosen(found: list[Entry], retention: Retention, *, damaged: bool, aside: bool) -> list[Entry]:
    stay = kept([entry.manifest for entry in found if entry.state == "whole" and entry.manifest], retention)
    asked = {"damaged": damaged, "unfinished": damaged, "aside": aside}
    return [
        entry
        for entry in found
        if (entry.step not in stay if entry.state == "whole" else asked.get(entry.state, False))
    ]


def _print(
    root: Path, found: list[Entry], going: list[Entry], left: list[Entry], sizes: list[int], *, dry_run: bool
) -> None:
    verb = "would remove" if dry_run else "removed"
    if going:
        rows = [
            [entry.path.name, entry.state, metrics_cell(entry.manifest.metrics) if entry.manifest else "-", size]
            for entry, size in zip(going, map(format_bytes, sizes), strict=True)
        ]
        print_table(f"{verb} from {root}", ["name", "state", "metrics", "size"], rows)
    whole = [str(entry.step) for entry in found if entry.state == "whole" and entry not in going]
    print(f"{verb} {len(going)} ({format_bytes(sum(sizes))}); kept steps: {', '.join(whole) or 'none'}")
    for entry in left:
        option = {"damaged": "--damaged", "unfinished": "--damaged", "aside": "--aside"}.get(entry.state)
        print(f"left alone: {entry.path.name} ({entry.state})" + (f"; {option} removes it" if option else ""))
