"""`dream-trainer runs` and `dream-trainer config ...`: their arguments. run_list.py and run_config.py do the work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg, subcommand

from dream_trainer.cli.checkpoints import Flag, Json


@dataclass(frozen=True, kw_only=True)
class Runs:
    """List runs: how far each is, its best metric, how it goes or why it ended, and what differs between them."""

    directory: Annotated[Positional[Path | None], arg(metavar="DIR", help_behavior_hint="")] = None
    """Directory of runs, or a project or group in it. By default DREAM_TRAINER_RUNS of the environment, else runs."""
    group: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """List the runs of this group alone."""
    metric: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """The metric whose best value is shown, such as val/accuracy, or its last where none was kept; by default the first
    that a run keeps."""
    sort: Literal["name", "state", "step", "best", "took", "seen", "started"] = "started"
    """What to order them by; "best" puts the best first, all others the largest or latest last."""
    columns: Annotated[str, arg(metavar="A,B,...", help_behavior_hint="")] = ""
    """Instead of what differs: fields of the configs, such as learning_rate or training_parameters.n_epochs, and
    metrics, such as val/loss, of which the last value is shown."""
    long: Flag = False
    """Print errors whole, with the calls that led to them."""
    as_json: Json = False
    """Print JSON, with each run's whole record and config."""

    def run(self) -> int:
        """Prints the list."""
        from dream_trainer.cli.run_list import list_runs

        return list_runs(
            self.directory,
            group=self.group,
            metric=self.metric,
            sort=self.sort,
            columns=[column.strip() for column in self.columns.split(",") if column.strip()],
            whole_errors=self.long,
            as_json=self.as_json,
        )


@dataclass(frozen=True, kw_only=True)
class ConfigShow:
    """Show a run's config, one line a field."""

    run_path: Annotated[Positional[Path], arg(metavar="RUN")]
    """A run's directory, a checkpoint's, or a .yaml, .toml or .json file."""
    as_json: Json = False
    """Print the config as JSON."""

    def run(self) -> int:
        """Prints the fields."""
        from dream_trainer.cli.run_config import show_config

        return show_config(self.run_path, as_json=self.as_json)


@dataclass(frozen=True, kw_only=True)
class ConfigDiff:
    """Show the fields in which the configs of two runs, or files, differ; the exit code is 1 if some do."""

    a: Annotated[Positional[Path], arg(metavar="RUN")]
    """A run's directory, a checkpoint's, or a .yaml, .toml or .json file."""
    b: Annotated[Positional[Path], arg(metavar="RUN")]
    """The other one."""
    as_json: Json = False
    """Print JSON: each field with both values."""

    def run(self) -> int:
        """Prints the differences."""
        from dream_trainer.cli.run_config import diff_configs

        return diff_configs(self.a, self.b, as_json=self.as_json)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Show the config of a run, or compare those of two."""

    command: Annotated[ConfigShow, subcommand("show")] | Annotated[ConfigDiff, subcommand("diff")]

    def run(self) -> int:
        """Runs the command."""
        return self.command.run()
