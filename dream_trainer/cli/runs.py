"""`dream-trainer runs`: the runs under a directory, their state and best metric, and how their configs differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg, subcommand

from dream_trainer.best_value import mode_by_name
from dream_trainer.checks import nearest
from dream_trainer.cli.output import Name, Shows, age_cell, number_cell, print_json, value_cell
from dream_trainer.errors import ConfigError
from dream_trainer.screen import format_duration, print_table

if TYPE_CHECKING:
    from dream_trainer.trainer.run_record import ListedRun


_SHOWN_FIELDS = 5
_NOT_COMPARED = ("project", "group", "experiment", "runs_dir", "checkpoint_parameters.resume")  # of no effect
_PARENT = "began from"


@dataclass(frozen=True, kw_only=True)
class Runs(Shows):
    """List runs: steps, best metric, state or why it ended, and how their configs differ. Also `runs show RUN`."""

    directory: Annotated[Positional[Path | None], arg(metavar="DIR", help_behavior_hint="")] = None
    """Directory of runs, or a project or group in it. Default: DREAM_TRAINER_RUNS in the environment, or runs."""
    metric: Name = None
    """Metric to show, such as val/accuracy: its best value, or the last if the run keeps no best. Default: the first
    whose best the run keeps."""
    sort: Literal["name", "state", "step", "best", "took", "seen", "started"] = "started"
    """Order; "best" puts the best first, the others the largest or latest last."""

    def run(self) -> None:
        from dream_trainer.config.trainer_config import runs_directory
        from dream_trainer.trainer.run_record import read_run, run_directories

        root = runs_directory() if self.directory is None else self.directory
        if not root.is_dir():
            raise ConfigError(f"{root} is not a directory. Give the directory of your runs, or set DREAM_TRAINER_RUNS.")
        runs = [read_run(path, root) for path in run_directories(root)]
        mode = self._mode(runs)
        for run in runs:
            run.set_best(self.metric, mode)
        runs.sort(key=lambda run: _order(run, self.sort))
        if self.as_json:
            print_json([{**vars(run), "record": asdict(run.record)} for run in runs])
            return
        if not runs:
            print(f"{root} has no runs yet.")
            return
        names = differing(runs)
        hidden, names, header = names[_SHOWN_FIELDS:], names[:_SHOWN_FIELDS], _ends(names)[:_SHOWN_FIELDS]
        if any(run.record.parent for run in runs):
            names, header = [_PARENT, *names], [_PARENT, *header]
        rows = [[*_row(run), *(_cells(run).get(name, "-") for name in names)] for run in runs]
        print_table(str(root), ["run", "state", "step", "best", "took", "seen", *header], rows)
        if hidden:
            print(f"also different: {', '.join(hidden)}")
        for run in runs:
            if run.record.why and run.state != "running":
                print(f"{run.name}: {run.state} at step {run.record.step}: {run.record.why}")

    def _mode(self, runs: Sequence[ListedRun]) -> str | None:
        names = sorted({name for run in runs for name in (*run.record.best, *run.last)})
        if self.metric is None or not names:
            return None
        if self.metric not in names:
            advice = f"Did you mean {near}? " if (near := nearest(self.metric, names)) else ""
            raise ConfigError(f"--metric {self.metric}: no run has it. {advice}There are {', '.join(names)}.")
        kept = [run.record.best[self.metric]["mode"] for run in runs if self.metric in run.record.best]
        mode = kept[0] if kept else mode_by_name(self.metric)
        if mode is None and self.sort == "best":
            raise ConfigError(
                f"--sort best: no run kept its best {self.metric}, and the name does not say whether lower or higher "
                "values are better. Use another order."
            )
        return mode


def _order(run: ListedRun, sort: str) -> tuple[Any, ...]:
    if sort == "best":
        value = run.best["value"] if run.best else math.nan
        sign = -1 if run.best and run.best["mode"] == "max" else 1
        return math.isnan(value), 0.0 if math.isnan(value) else sign * value, run.name
    keys = {**vars(run.record), "name": run.name, "state": run.state, "took": run.record.seconds}
    return keys[sort], run.name


def _row(run: ListedRun) -> list[str]:
    record, best = run.record, run.best or {}
    last = "last, " if best.get("is_last") else ""
    at = f"{best['name']} {number_cell(best['value'])} {last}at {best['step']}" if best else "-"
    took = format_duration(record.seconds) if record.seconds else "-"
    return [run.name, run.state, str(record.step), at, took, f"{age_cell(record.seen)} ago" if record.seen else "-"]


def _cells(run: ListedRun) -> dict[str, str]:
    """Texts for columns: the config's fields, and of a branch what it began from and the words it began with."""
    from dream_trainer.trainer.run_record import BRANCH, config_fields

    parent = run.record.parent
    values = config_fields(run.config, run.record)
    cells = {name: value_cell(value) for name, value in values.items() if parent or not name.startswith(BRANCH)}
    if parent:
        begun = parent.get("run") or "/".join(Path(parent["checkpoint"]).parts[-5:-2])
        cells[_PARENT] = f"{begun} at {parent['step']}"
    return cells


def differing(runs: Sequence[ListedRun]) -> list[str]:
    """The fields that differ between the configs of the runs: the script's own first, then those of training."""
    from dream_trainer.config.trainer_config import DreamTrainerConfig
    from dream_trainer.trainer.run_record import BRANCH, config_fields

    known = [config_fields(run.config, run.record) for run in runs if run.config]
    names = [name for name in dict.fromkeys(name for values in known for name in values) if name not in _NOT_COMPARED]
    framework = {field.name for field in fields(DreamTrainerConfig)} - {"training_parameters"}

    def rank(name: str) -> tuple[bool, bool, bool]:
        section = name.partition(".")[0]
        return name.startswith(BRANCH), section in framework, section == "training_parameters"

    differ = [name for name in names if len({value_cell(values.get(name, "-")) for values in known}) > 1]
    return sorted(differ, key=rank)


def _ends(names: Sequence[str]) -> list[str]:
    """Dotted names by their last parts, or whole if several have the same end."""
    ends = [name.removeprefix("checkpoint_parameters.") for name in names]
    ends = [end if end.startswith("branch.") else end.rpartition(".")[2] for end in ends]
    return [end if ends.count(end) == 1 else name for name, end in zip(names, ends, strict=True)]


# -- `dream-trainer runs show`: one run.


@dataclass(frozen=True, kw_only=True)
class RunShow(Shows):
    """Show one run: how far it is, why it ended, its best and last values, and how it was started."""

    run_path: Annotated[Positional[Path], arg(metavar="RUN")]
    """A run's directory."""

    def run(self) -> None:
        from dream_trainer.trainer.run_record import PARTS, read_run, receipt, run_directories

        path = self.run_path
        if run_directories(path) != [path]:
            raise ConfigError(f"{path} is no run's directory. `dream-trainer runs` lists the runs.")
        run = read_run(path, path)
        if self.as_json:
            print_json({**vars(run), "record": asdict(run.record)})
            return
        record = run.record
        best = {name: f"{number_cell(one['value'])} at step {one['step']}" for name, one in record.best.items()}
        rows = {
            "state": run.state,
            "why": record.why,
            "step": f"{record.step} (epoch {record.epoch}, {record.samples} samples)",
            "began": record.started and f"{age_cell(record.started)} ago",
            "seen": record.seen and f"{age_cell(record.seen)} ago",
            "trained for": format_duration(record.seconds),
            "starts": record.starts,
            "resumed from": record.resumed_from,
            _PARENT: record.parent and f"{record.parent['checkpoint']} at {record.parent['step']}",
            **{f"best {name}": value for name, value in best.items()},
            **{f"last {name}": f"{number_cell(one['value'])} at step {one['step']}" for name, one in run.last.items()},
            "ranks": record.world_size,
            "host": record.host and f"{record.host}, process {record.pid}",
            "versions": ", ".join(f"{name} {version}" for name, version in record.versions.items()),
            "command": " ".join(record.argv),
        }
        print_table(str(path), [], [[name, str(value)] for name, value in rows.items() if value])
        if (told := receipt(record.times)) is not None:
            parts = [(words, told.seconds[name]) for name, words in PARTS.items() if told.seconds[name] > 0]
            cells = [[words, format_duration(seconds), f"{seconds / told.total:.1%}"] for words, seconds in parts]
            print_table(f"time: goodput {told.goodput:.1%}", ["part", "time", "share"], cells)
        if record.error:
            print(record.error, end="")


# -- `dream-trainer config`: the config of a run, and the differences between two.


@dataclass(frozen=True, kw_only=True)
class ConfigShow(Shows):
    """Show a run's config, one line a field."""

    run_path: Annotated[Positional[Path], arg(metavar="RUN")]
    """A run's directory, a checkpoint's, or a .yaml, .toml or .json file."""

    def run(self) -> None:
        config, fields = _config_and_fields(self.run_path)
        if self.as_json:
            print_json(config)
        else:
            print_table(str(self.run_path), [], [[name, value_cell(value)] for name, value in fields.items()])


@dataclass(frozen=True, kw_only=True)
class ConfigDiff(Shows):
    """Show the fields that differ between the configs of two runs or files. The exit code is 1 if any differ."""

    a: Annotated[Positional[Path], arg(metavar="RUN")]
    """A run's directory, a checkpoint's, or a .yaml, .toml or .json file."""
    b: Annotated[Positional[Path], arg(metavar="RUN")]
    """The other one."""

    def run(self) -> int:
        from dream_trainer.config.config_files import is_saved

        (config_a, first), (config_b, second) = _config_and_fields(self.a), _config_and_fields(self.b)
        compared = {**first, **second}
        if is_saved(config_a) != is_saved(config_b):  # a file is compared in the fields that it sets
            compared = second if is_saved(config_a) else first
        names = [n for n in compared if (n in first) != (n in second) or repr(first.get(n)) != repr(second.get(n))]
        if self.as_json:
            print_json({name: [first.get(name), second.get(name)] for name in names})
        elif names:
            rows = [[name, value_cell(first.get(name, "-")), value_cell(second.get(name, "-"))] for name in names]
            print_table(f"a: {self.a}\nb: {self.b}", ["field", "a", "b"], rows)
        else:
            print(f"the configs of {self.a} and {self.b} are the same")
        return 1 if names else 0


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Show the config of a run, or compare those of two."""

    command: Annotated[ConfigShow, subcommand("show")] | Annotated[ConfigDiff, subcommand("diff")]

    def run(self) -> int | None:
        return self.command.run()


def _config_and_fields(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from dream_trainer.trainer.run_record import config_fields, read_config, read_record

    config = read_config(path)
    return config, config_fields(config, read_record(path))
