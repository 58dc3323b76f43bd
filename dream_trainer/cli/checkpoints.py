"""`dream-trainer checkpoints ls`, `verify` and `prune`: a run's checkpoints. checkpoint_contents.py has the others."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg, subcommand

from dream_trainer.callbacks.tables import print_table
from dream_trainer.checkpoint.files import discard
from dream_trainer.cli.checkpoint_contents import Diff, Export, Push, Show
from dream_trainer.cli.output import Count, Flag, Json, Name, age_cell, mesh_cell, metrics_cell, print_json
from dream_trainer.errors import CheckpointError, ConfigError
from dream_trainer.loggers.formatting import format_bytes
from dream_trainer.stores.store_path import as_path

if TYPE_CHECKING:
    from dream_trainer.checkpoint.lookup import Entry


@dataclass(frozen=True, kw_only=True)
class Ls:
    """List a run's checkpoints with their states."""

    run_path: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run's directory, or its `checkpoints` directory."""
    as_json: Json = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        from dream_trainer.checkpoint.lookup import checkpoints_root, entries

        root = checkpoints_root(as_path(self.run_path))
        found = entries(root)
        if self.as_json:
            print_json({"root": root, "checkpoints": [_facts(entry) for entry in found]})
        elif not found:
            print(f"{root} has no checkpoints yet.")
        else:
            header = ["step", "epoch", "samples", "metrics", "size", "ranks", "mesh", "age", "state"]
            print_table(str(root), header, [_row(entry) for entry in found])
            for entry in found:
                if entry.fault:
                    print(f"{entry.path.name}: {entry.fault}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Read every file and compare checksums; the exit code is 1 if anything is damaged."""

    path: Annotated[Positional[Path], arg(metavar="PATH")]
    """A checkpoint's directory, or a run's for all of its checkpoints."""
    as_json: Json = False
    """Print JSON instead of lines."""

    def run(self) -> int:
        from dream_trainer.checkpoint.lookup import checkpoints_root, entries, is_checkpoint
        from dream_trainer.checkpoint.manifest import faults

        path = as_path(self.path)
        paths = [path] if is_checkpoint(path) else []
        for entry in [] if paths else entries(checkpoints_root(path)):
            paths += [entry.path] if not entry.path.name.startswith(".") and entry.state != "unfinished" else []
        if not paths:
            raise CheckpointError(f"{path} has no checkpoints to verify.")
        found = {path: faults(path) for path in paths}
        if self.as_json:
            reports = [{"path": path, "whole": not errors, "faults": errors} for path, errors in found.items()]
            print_json({"whole": not any(found.values()), "checkpoints": reports})
        else:
            for path, errors in found.items():
                print(f"{path}: {'; '.join(errors) or 'whole'}")
        return 1 if any(found.values()) else 0


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Remove checkpoints that no rule keeps. The newest whole one stays; damaged and other ones stay without --damaged
    or --aside."""

    run_path: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run's directory, or its `checkpoints` directory. No job may be writing to it."""
    keep_last: Count = None
    """Number of newest checkpoints to keep."""
    keep_every_n_steps: Count = None
    """Keep steps divisible by this."""
    keep_best: Count = None
    """Number of best checkpoints by --metric to keep."""
    metric: Name = None
    """A validation metric, such as val/loss."""
    mode: Annotated[Literal["min", "max"] | None, arg(help_behavior_hint="")] = None
    """Whether its smallest or largest value is best. Default: as the run's config and the metric's name say."""
    damaged: Flag = False
    """Also remove damaged checkpoints, and unfinished ones of killed jobs."""
    aside: Flag = False
    """Also remove checkpoints that were set aside when the run resumed from an older one."""
    dry_run: Flag = False
    """Print what would be removed, and remove nothing."""
    as_json: Json = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        from dream_trainer.checkpoint.lookup import checkpoints_root, entries
        from dream_trainer.checkpoint.retention import Retention, kept, mode_of_run
        from dream_trainer.checkpoint.run_directory import without_jobs

        root = checkpoints_root(as_path(self.run_path))
        mode = self.mode
        if mode is None and self.metric is not None:
            mode = mode_of_run([entry.manifest for entry in entries(root) if entry.manifest], self.metric)
        rules = {name: vars(self)[name] for name in ("keep_last", "keep_every_n_steps", "keep_best", "metric")}
        retention = Retention(**rules, mode=mode or "min")
        if retention.keeps_all and not self.damaged and not self.aside:
            raise ConfigError(
                "no rule was given. Use --keep-last, --keep-every-n-steps, --keep-best, --damaged or --aside."
            )
        asked = {"damaged": self.damaged, "unfinished": self.damaged, "aside": self.aside}
        with nullcontext() if self.dry_run else without_jobs(root):
            found = entries(root)
            stay = kept([entry.manifest for entry in found if entry.state == "whole" and entry.manifest], retention)
            going = [e for e in found if (e.step not in stay if e.state == "whole" else asked.get(e.state, False))]
            sizes = [entry.size for entry in going]
            for entry in [] if self.dry_run else going:
                discard(entry.path)
        self._print(root, [entry for entry in found if entry not in going], going, sizes)
        return 0

    def _print(self, root: Path, staying: list[Entry], going: list[Entry], sizes: list[int]) -> None:
        whole = [entry for entry in staying if entry.state == "whole"]
        left = [entry for entry in staying if entry.state != "whole"]
        if self.as_json:
            paths = {"removed": [entry.path for entry in going], "kept": [entry.path for entry in whole]}
            others = [{"path": entry.path, "state": entry.state} for entry in left]
            print_json({"dry_run": self.dry_run, **paths, "left_alone": others, "freed_bytes": sum(sizes)})
            return
        verb = "would remove" if self.dry_run else "removed"
        if going:
            facts_of = [(e.path.name, e.state, metrics_cell(e.manifest.metrics if e.manifest else {})) for e in going]
            rows = [[*facts, format_bytes(size)] for facts, size in zip(facts_of, sizes, strict=True)]
            print_table(f"{verb} from {root}", ["name", "state", "metrics", "size"], rows)
        kept = ", ".join(str(entry.step) for entry in whole) or "none"
        print(f"{verb} {len(going)} ({format_bytes(sum(sizes))}); kept steps: {kept}")
        options = {"damaged": "; --damaged removes it", "unfinished": "; --damaged removes it"}
        options["aside"] = "; --aside removes it"
        for entry in left:
            print(f"left alone: {entry.path.name} ({entry.state}){options.get(entry.state, '')}")


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
        return self.command.run()


def _row(entry: Entry) -> list[str]:
    step, size, known = str(entry.step), format_bytes(entry.size), entry.manifest
    if known is None:
        return [step, "-", "-", "-", size, "-", "-", "-", entry.state]
    counts = [step, str(known.epoch), f"{known.samples_seen:,}", metrics_cell(known.metrics), size]
    return [*counts, str(known.world_size), mesh_cell(known.mesh_shape), age_cell(known.wall_time), entry.state]


def _facts(entry: Entry) -> dict[str, Any]:
    facts = {"step": entry.step, "path": entry.path, "state": entry.state, "fault": entry.fault, "size": entry.size}
    return facts | (entry.manifest.facts() if entry.manifest else {})
