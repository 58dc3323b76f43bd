"""What the list of runs shows of their configs: the fields in which they differ, or those that were asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from difflib import get_close_matches

from dream_trainer.cli.found_runs import ListedRun
from dream_trainer.cli.output import number_cell
from dream_trainer.cli.run_config import value_cell
from dream_trainer.cli.what_trained import trained_leaves
from dream_trainer.config.dream_trainer_config import DreamTrainerConfig
from dream_trainer.errors import ConfigError

SHOWN_FIELDS = 5
# They are in the run's name, or say nothing of what is trained.
_NOT_COMPARED = ("project", "group", "experiment", "runs_dir", "checkpoint_parameters.resume")
_OF_BRANCHES = "checkpoint_parameters.branch."
_NUMBER = re.compile(r"[-+]?\d[\d.]*(e[-+]?\d+)?")
_OF_OBJECTS = "given_objects"  # the record of a trainer without a class
_SECTIONS = frozenset(field.name for field in fields(DreamTrainerConfig))
_OF_EVERY_CONFIG = _SECTIONS | {_OF_OBJECTS}


def differing(runs: Sequence[ListedRun]) -> list[str]:
    """For each run its values of the fields in which not all of them are alike; a script's own fields come first."""
    flat = [_flat(run) for run in runs]
    known = [values for values in flat if values]
    names = [
        name
        for name in dict.fromkeys(name for values in known for name in values)
        if name not in _NOT_COMPARED and len({values.get(name) for values in known}) > 1
    ]
    names.sort(key=lambda name: _rank(name, {values.get(name, "") for values in known}))
    short = _shortened(names)
    cells = []
    for run, values in zip(runs, flat, strict=True):
        shown = [f"{short[name]} {values[name]}" for name in names if name in values and _is_of(run, name)]
        more = [f"and {len(shown) - SHOWN_FIELDS} more"] if len(shown) > SHOWN_FIELDS else []
        cells.append(", ".join(shown[:SHOWN_FIELDS] + more))
    return cells


def _rank(name: str, cells: set[str]) -> tuple[bool, bool, bool, bool]:
    """A script's own fields first, then numbers of training and optimizers; what only branches have is last."""
    section = name.partition(".")[0]
    is_number = any(_NUMBER.fullmatch(cell) for cell in cells)
    is_main = section in ("training_parameters", _OF_OBJECTS) or section not in _OF_EVERY_CONFIG
    return name.startswith(_OF_BRANCHES), section in _OF_EVERY_CONFIG, not (is_main and is_number), not is_number


def asked_for(runs: Sequence[ListedRun], columns: Iterable[str]) -> list[list[str]]:
    """For each run its cells of `columns`: fields, by their dotted names or the ends of these, and metrics.

    A branch's words end with `branch.schedule` and the like; `schedule` is a field of another section. Of several that
    end alike, it is the one of the script itself or of what was given to a trainer without a class.

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
    found = [name for name in names if name == column] or [name for name in names if _ends_in(name, column)]
    own = [name for name in found if name.partition(".")[0] not in _SECTIONS]
    if len(found) == 1 or len(own) == 1:
        return (own or found)[0]
    if found:
        raise ConfigError(f"--columns {column}: there are {', '.join(found)}. Name one whole.")
    near = get_close_matches(column, names, n=3, cutoff=0.4)
    ends = [name for name in names if column in name][:3]
    advice = f"Did you mean {', '.join(dict.fromkeys([*ends, *near]))}?" if near or ends else "See `config show RUN`."
    raise ConfigError(f"--columns {column}: no run has such a field or metric. {advice}")


def _ends_in(name: str, column: str) -> bool:
    """Words of branches are named as fields of runs are (`optimizer`, `schedule`), so they are asked for as such."""
    is_fit = "branch." in column or not name.startswith(_OF_BRANCHES)
    return is_fit and name.endswith(f".{column}")


def _is_of(run: ListedRun, name: str) -> bool:
    return run.record.parent is not None or not name.startswith(_OF_BRANCHES)


def _flat(run: ListedRun) -> dict[str, str]:
    return {name: value_cell(value) for name, value in trained_leaves(run.config, run.record).items()}


def _shortened(names: list[str]) -> dict[str, str]:
    """Each dotted name by its last part, or whole where several end alike."""
    ends = [_end(name) for name in names]
    return {name: end if ends.count(end) == 1 else name for name, end in zip(names, ends, strict=True)}


def _end(name: str) -> str:
    return f"branch.{name.removeprefix(_OF_BRANCHES)}" if name.startswith(_OF_BRANCHES) else name.rpartition(".")[2]
