"""`dream-trainer config`: the config of a run, and the differences between two."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg, subcommand

from dream_trainer.cli.output import Json, print_json, value_cell
from dream_trainer.screen import print_table


@dataclass(frozen=True, kw_only=True)
class ConfigShow:
    """Show a run's config, one line a field."""

    run_path: Annotated[Positional[Path], arg(metavar="RUN")]
    """A run's directory, a checkpoint's, or a .yaml, .toml or .json file."""
    as_json: Json = False
    """Print the config as JSON."""

    def run(self) -> int:
        config, fields = _trained(self.run_path)
        if self.as_json:
            print_json(config)
        else:
            print_table(str(self.run_path), [], [[name, value_cell(value)] for name, value in fields.items()])
        return 0


@dataclass(frozen=True, kw_only=True)
class ConfigDiff:
    """Show the fields in which the configs of two runs or files differ; the exit code is 1 if some do."""

    a: Annotated[Positional[Path], arg(metavar="RUN")]
    """A run's directory, a checkpoint's, or a .yaml, .toml or .json file."""
    b: Annotated[Positional[Path], arg(metavar="RUN")]
    """The other one."""
    as_json: Json = False
    """Print JSON: each field with both values."""

    def run(self) -> int:
        from dream_trainer.config.config_files import is_saved

        (config_a, first), (config_b, second) = _trained(self.a), _trained(self.b)
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

    def run(self) -> int:
        return self.command.run()


def _trained(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from dream_trainer.trainer.run_record import read_config, read_record, trained_fields

    config = read_config(path)
    return config, trained_fields(config, read_record(path))
