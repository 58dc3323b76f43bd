"""What the list of runs shows of their configs: the fields in which they differ, or those that were asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from difflib import get_close_matches

from dream_trainer.cli.found_runs import ListedRun
from dream_trainer.cli.output import number_cell
from dream_trainer.cli.run_config import value_cell
from dream_trainer.config.dream_trainer_config import DreamTrainerConfig
from dream_trainer.config.serialize import leaves
from dream_trainer.errors import ConfigError

SHOWN_FIELDS = 5
# They are in the run's name, or say nothing of what is trained.
_NOT_COMPARED = ("project", "group", "experiment", "runs_dir", "checkpoint_parameters.resume")
_OF_EVERY_CONFIG = frozenset(field.name for field in fields(DreamTrainerConfig))


def differing(runs: Sequence[ListedRun]) -> list[str]:
    """For each run its values of the fields in which not all of them are alike; a script's own fields come first."""
    flat = [_flat(run) for run in runs]
    known = [values for values in flat if values]
    names = [
        name
        for name in dict.fromkeys(name for values in known for name in values)
        if name not in _NOT_COMPARED and len({values.get(name) for values in known}) > 1
    ]
    names.sort(key=lambda name: name.partition(".")[0] in _OF_EVERY_CONFIG)
    short = _shortened(names)
    cells = []
    for values in flat:
        shown = [f"{short[name]} {values[name]}" for name in names if name in values]
        more = [f"and {len(shown) - SHOWN_FIELDS} more"] if len(shown) > SHOWN_FIELDS else []
        cells.append(", ".join(shown[:SHOWN_FIELDS] + more))
    return cells


def asked_for(runs: Sequence[ListedRun], columns: Iterable[str]) -> list[list[str]]:
    """For each run its cells of `columns`: fields, by their dotted names or the ends of these, and metrics.

    Raises:
        ConfigError: No run has one, or an end is that of several.
    """
    flat = [_flat(run) for run in runs]
    named = {name: None for values in flat for name in values} | {name: None for run in runs for name in run.last}
    full = [_full(column, list(named)) for column in columns]
    return [
        [values.get(name) or (number_cell(run.last[name]["value"]) if name in run.last else "-") for name in full]
        for run, values in zip(runs, flat, strict=True)
    ]


def _full(column: str, names: list[str]) -> str:
    found = [name for name in names if name == column] or [name for name in names if name.endswith(f".{column}")]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"--columns {column}: there are {', '.join(found)}. Name one whole.")
    near = get_close_matches(column, names, n=3, cutoff=0.4)
    ends = [name for name in names if column in name][:3]
    advice = f"Did you mean {', '.join(dict.fromkeys([*ends, *near]))}?" if near or ends else "See `config show RUN`."
    raise ConfigError(f"--columns {column}: no run has such a field or metric. {advice}")


def _flat(run: ListedRun) -> dict[str, str]:
    return {name: value_cell(value) for name, value in leaves(run.config)}


def _shortened(names: list[str]) -> dict[str, str]:
    """Each dotted name by its last part, or whole where several end alike."""
    ends = [name.rpartition(".")[2] for name in names]
    return {name: end if ends.count(end) == 1 else name for name, end in zip(names, ends, strict=True)}
