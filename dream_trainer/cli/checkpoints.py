"""`dream-trainer checkpoints`: a run's checkpoints, and the contents of one."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg, subcommand

from dream_trainer.checkpoint.files import discard
from dream_trainer.checks import refuse
from dream_trainer.cli.output import (
    Count,
    Flag,
    Name,
    Shows,
    age_cell,
    mesh_cell,
    metrics_cell,
    number_cell,
    print_json,
    value_cell,
)
from dream_trainer.errors import CheckpointError, ConfigError
from dream_trainer.screen import format_bytes, format_count, print_table
from dream_trainer.stores.store_path import as_path

if TYPE_CHECKING:
    from dream_trainer.checkpoint.manifest import Entry


@dataclass(frozen=True, kw_only=True)
class Ls(Shows):
    """List a run's checkpoints with their states."""

    run_path: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run's directory, or its `checkpoints` directory."""

    def run(self) -> None:
        from dream_trainer.checkpoint.manifest import checkpoints_root, entries

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


@dataclass(frozen=True, kw_only=True)
class Verify(Shows):
    """Read every file and compare checksums; the exit code is 1 if anything is damaged."""

    path: Annotated[Positional[Path], arg(metavar="PATH")]
    """A checkpoint's directory, or a run's for all of its checkpoints."""

    def run(self) -> int:
        from dream_trainer.checkpoint.manifest import checkpoints_root, entries, faults, is_checkpoint

        path = as_path(self.path)
        paths = [path] if is_checkpoint(path) else []
        for entry in [] if paths else entries(checkpoints_root(path)):
            paths += [entry.path] if not entry.path.name.startswith(".") and entry.state != "unfinished" else []
        refuse(not paths, f"{path} has no checkpoints to verify.", CheckpointError)
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

    def run(self) -> None:
        from dream_trainer.checkpoint.manifest import checkpoints_root, entries, kept, mode_of_run
        from dream_trainer.checkpoint.run_directory import without_jobs
        from dream_trainer.config.checkpoint_parameters import CheckpointParameters

        root = checkpoints_root(as_path(self.run_path))
        refuse(
            self.keep_best is not None and self.metric is None,
            f"--keep-best {self.keep_best} needs a metric. Set --metric, such as val/loss.",
        )
        mode = self.mode
        if mode is None and self.metric is not None:
            mode = mode_of_run([entry.manifest for entry in entries(root) if entry.manifest], self.metric)
        rules = {name: vars(self)[name] for name in ("keep_last", "keep_every_n_steps", "keep_best")}
        retention = CheckpointParameters(**rules, best_metric=self.metric, best_mode=mode)
        if retention.keeps_all and not self.damaged and not self.aside:
            raise ConfigError(
                "no rule was given. Use --keep-last, --keep-every-n-steps, --keep-best, --damaged or --aside."
            )
        options = {"damaged": "damaged", "unfinished": "damaged", "aside": "aside"}  # by the states that they remove
        asked = [state for state, option in options.items() if vars(self)[option]]
        with nullcontext() if self.dry_run else without_jobs(root):
            found = entries(root)
            stay = kept([entry.manifest for entry in found if entry.state == "whole" and entry.manifest], retention)
            going = [e for e in found if (e.step not in stay if e.state == "whole" else e.state in asked)]
            sizes = [entry.size for entry in going]
            for entry in [] if self.dry_run else going:
                discard(entry.path)
        verb = "would remove" if self.dry_run else "removed"
        if going:
            rows = [
                [e.path.name, e.state, metrics_cell(e.manifest.metrics if e.manifest else {}), format_bytes(size)]
                for e, size in zip(going, sizes, strict=True)
            ]
            print_table(f"{verb} from {root}", ["name", "state", "metrics", "size"], rows)
        staying = [entry for entry in found if entry not in going]
        steps = ", ".join(str(entry.step) for entry in staying if entry.state == "whole") or "none"
        print(f"{verb} {len(going)} ({format_bytes(sum(sizes))}); kept steps: {steps}")
        for entry in staying:
            if entry.state != "whole":
                hint = f"; --{options[entry.state]} removes it" if entry.state in options else ""
                print(f"left alone: {entry.path.name} ({entry.state}){hint}")


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """List, check, compare, prune, export and push a run's checkpoints, and train recorded steps again."""

    command: (
        Annotated[Ls, subcommand("ls")]
        | Annotated[Show, subcommand("show")]
        | Annotated[Verify, subcommand("verify")]
        | Annotated[Diff, subcommand("diff")]
        | Annotated[Prune, subcommand("prune")]
        | Annotated[Export, subcommand("export")]
        | Annotated[Push, subcommand("push")]
        | Annotated[RunReplay, subcommand("replay")]
    )

    def run(self) -> int | None:
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


Renames = Annotated[dict[str, str], arg(metavar="PATTERN REPLACEMENT [...]", help_behavior_hint="")]
_SHOWN = 30  # tensors that differ; JSON has all


@dataclass(frozen=True, kw_only=True)
class OneCheckpoint:
    """The arguments of commands on one checkpoint."""

    checkpoint: Annotated[Positional[Path], arg(metavar="CHECKPOINT")]
    """A checkpoint's directory; or a run's, for its newest whole checkpoint."""
    step: Count = None
    """With a run's directory: the checkpoint of this step."""

    def find(self) -> Path:
        from dream_trainer.checkpoint.manifest import find_checkpoint

        return find_checkpoint(as_path(self.checkpoint), self.step)


@dataclass(frozen=True, kw_only=True)
class ModelWeights(OneCheckpoint):
    """The arguments of commands that write a model's weights."""

    model: Name = None
    """Name of the model, if there are several."""
    weights: Annotated[str, arg(metavar="WHICH")] = "model"
    """"model" as trained, "ema" or "swa" as averaged; "ema.1" by the second EMA callback."""
    merge_adapters: Flag = False
    """With peft's adapters: write the base with the adapters added, instead of only the adapters."""
    base: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """The frozen weights that the checkpoint left out, if not where the run loaded them from."""

    def options(self, *others: str) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("model", "weights", "merge_adapters", "base", *others)}


@dataclass(frozen=True, kw_only=True)
class Show(OneCheckpoint, Shows):
    """Show the contents of a checkpoint: counters, metrics, models, optimizers and config."""

    tensors: Flag = False
    """List every tensor with its shape and dtype."""

    def run(self) -> None:
        from dream_trainer.checkpoint.manifest import directory_size
        from dream_trainer.checkpoint.store import read_shared
        from dream_trainer.config.serialize import leaves
        from dream_trainer.weights.export import StoredTensors, tensors_by_owner

        stored = StoredTensors(self.find())
        manifest, groups = stored.manifest, tensors_by_owner(stored, read_shared(stored.manifest.path))
        tensors = {n: {"shape": list(s.shape), "dtype": str(s.dtype)[len("torch.") :]} for n, s in stored.specs.items()}
        holds, rows = {}, []
        for name, specs in groups.items():
            elements = sum(spec.nbytes // spec.dtype.itemsize for spec in specs.values())
            size = sum(spec.nbytes for spec in specs.values())
            holds[name] = {"tensors": len(specs), "elements": elements, "bytes": size}
            rows.append([name, str(len(specs)), format_count(elements), format_bytes(size)])
        if self.as_json:
            facts = {"path": manifest.path, "step": manifest.step, **manifest.facts(), "config": manifest.config}
            files = {name: vars(entry) for name, entry in manifest.files.items()}
            print_json({**facts, "holds": holds, "tensors": tensors, "files": files})
            return
        on_disk = f"{format_bytes(directory_size(manifest.path))} in {len(manifest.files) + 1} files"
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.wall_time))
        counters = {"step": str(manifest.step), "epoch": str(manifest.epoch), "samples": f"{manifest.samples_seen:,}"}
        counters |= {"written": f"{written} ({age_cell(manifest.wall_time)} ago)", "size": on_disk}
        counters |= {"ranks": str(manifest.world_size), "mesh": mesh_cell(manifest.mesh_shape), **manifest.versions}
        print_table(str(manifest.path), [], [list(pair) for pair in counters.items()])
        if manifest.metrics:
            print_table("metrics", [], [[name, number_cell(value)] for name, value in manifest.metrics.items()])
        print_table("holds", ["", "tensors", "elements", "size"], rows)
        if self.tensors:
            listed = [[name, *map(str, kind.values())] for name, kind in tensors.items()]
            print_table("tensors", ["name", "shape", "dtype"], listed)
        if config := [[name, str(value)] for name, value in leaves(manifest.config)]:
            print_table("config", [], config)


@dataclass(frozen=True, kw_only=True)
class Diff(Shows):
    """Compare two checkpoints: counters, metrics, config, and tensors' names, shapes, dtypes and values."""

    a: Annotated[Positional[Path], arg(metavar="A")]
    """A checkpoint's directory; or a run's, for its newest whole checkpoint."""
    b: Annotated[Positional[Path], arg(metavar="B")]
    """The other one."""
    values: bool = True
    """Read the tensors and compare their values, one at a time."""

    def run(self) -> int:
        from dream_trainer.checkpoint.manifest import find_checkpoint
        from dream_trainer.config.serialize import difference
        from dream_trainer.weights.export import StoredTensors, difference_of_tensors

        first, second = (StoredTensors(find_checkpoint(as_path(path))) for path in (self.a, self.b))
        a, b = first.manifest, second.manifest
        names = ("step", "epoch", "samples_seen", "world_size", "mesh_shape", "versions")
        found: dict[str, Any] = {
            "a": a.path,
            "b": b.path,
            "manifest": _unequal(vars(a), vars(b), names),
            "metrics": _unequal(a.metrics, b.metrics, dict.fromkeys([*a.metrics, *b.metrics])),
            "config": difference(a.config, b.config),
            "tensors": difference_of_tensors(first, second, values=self.values),
        }
        if self.as_json:
            print_json(found)
        else:
            _print_difference(found)
        kinds = [found["tensors"][kind] for kind in ("only_in_a", "only_in_b", "other_kind", "max_difference")]
        return int(any([found["manifest"], found["metrics"], found["config"], *kinds]))


@dataclass(frozen=True, kw_only=True)
class Export(ModelWeights):
    """Write a model's weights as safetensors in Hugging Face's layout, or as one .safetensors, .pt or .pth file."""

    out: Annotated[Positional[Path], arg(metavar="OUT")]
    """A directory, or a file that ends in .safetensors, .pt or .pth."""
    dtype: Annotated[Literal["fp32", "bf16", "fp16"] | None, arg(metavar="TYPE", help_behavior_hint="")] = None
    """Cast floating-point tensors to this: fp32, bf16 or fp16. By default each keeps its dtype."""
    max_shard_size: Annotated[str, arg(metavar="SIZE")] = "5GB"
    """Largest file of a directory, such as 2GB (10^9 bytes each) or 500MiB."""
    renames: Renames = field(default_factory=dict)
    """Regular expressions and their replacements in tensor names; a name that becomes empty is left out."""
    overwrite: Flag = False
    """Replace an earlier export."""

    def run(self) -> None:
        import torch

        from dream_trainer.weights.export import export_checkpoint

        dtypes = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        options = self.options("max_shard_size", "renames", "overwrite")
        written = export_checkpoint(checkpoint := self.find(), self.out, dtype=dtypes[self.dtype], **options)
        rows = [[str(path), format_bytes(path.stat().st_size)] for path in written]
        print_table(f"exported {checkpoint}", ["file", "size"], rows)


@dataclass(frozen=True, kw_only=True)
class Push(ModelWeights):
    """Export a model's weights and upload them to the Hugging Face Hub, with a model card made from the checkpoint."""

    repo: Annotated[str, arg(metavar="OWNER/NAME")]
    """The repository; created if it does not exist. Log in before: hf auth login."""
    base_model: Annotated[str | None, arg(metavar="OWNER/NAME", help_behavior_hint="")] = None
    """The base's name on the hub, for the card and the adapters' config."""
    public: Flag = False
    """Create a public repository."""

    def run(self) -> None:
        from dream_trainer.weights.export import push_to_hub

        options = self.options("base_model")
        address = push_to_hub(checkpoint := self.find(), self.repo, private=not self.public, **options)
        print(f"pushed {checkpoint} to {address}")


@dataclass(frozen=True, kw_only=True)
class RunReplay:
    """Train recorded steps of a run again in a scratch directory, started where the run was started. The exit code is 1
    if losses or tensors do not come out as recorded."""

    run_path: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run's directory. Nothing in it is changed."""
    start: Annotated[int | None, arg(name="from", metavar="STEP", help_behavior_hint="")] = None
    """Step of the checkpoint to begin from. Default: the second newest."""
    end: Annotated[int | None, arg(name="to", metavar="STEP", help_behavior_hint="")] = None
    """Step to end at. Default: the next checkpoint."""
    program: Annotated[str, arg(metavar="FILE")] = ""
    """The program, if not as recorded: a Python file or a module."""

    def run(self) -> int:
        from dream_trainer.testing.replay import replay

        is_equal, lines = replay(self.run_path, self.start, self.end, self.program)
        print(*lines, sep="\n")
        return int(not is_equal)


def _unequal(a: Mapping[str, Any], b: Mapping[str, Any], names: Collection[str]) -> dict[str, list[Any]]:
    return {name: [a.get(name), b.get(name)] for name in names if repr(a.get(name)) != repr(b.get(name))}  # NaN is NaN


def _print_difference(found: dict[str, Any]) -> None:
    print(f"a: {found['a']}\nb: {found['b']}")
    pairs = {**found["manifest"], **found["metrics"]}
    if pairs:
        print_table("different", ["", "a", "b"], [[name, *map(value_cell, pair)] for name, pair in pairs.items()])
    tensors = found["tensors"]
    only = {f"tensors only in {side}": tensors[f"only_in_{side}"] for side in "ab"}
    for title, lines in {"config": found["config"], **only}.items():
        if lines:
            print(title, *lines, sep="\n  ")
    if tensors["other_kind"]:
        rows = [[name, *kinds] for name, kinds in tensors["other_kind"].items()]
        print_table("tensors of another shape or dtype", ["name", "a", "b"], rows)
    changed = tensors["max_difference"]
    if changed is None:
        print(f"{tensors['same_kind']} tensors have the same name, shape and dtype; values were not compared")
        return
    # NaN first, then weights, since optimizers' step counters would hide them.
    names = sorted(changed, key=lambda n: (not math.isnan(changed[n]), not n.startswith("models."), -changed[n]))
    if names:
        rows = [[name, number_cell(changed[name])] for name in names[:_SHOWN]]
        print_table("values", ["name", "largest absolute difference"], rows)
    if len(names) > _SHOWN:
        print(f"  and {len(names) - _SHOWN} more; --json lists all")
    print(f"{tensors['equal']} of {tensors['same_kind']} tensors in both are equal bit for bit")
