"""The fields of a run's config, and beside those that did not hold what trained instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dream_trainer.config.serialize import leaves
from dream_trainer.trainer.run_record import RunRecord

_SPELLINGS = {"lr": ("lr", "learning_rate")}
_BRANCH = "checkpoint_parameters.branch."


def trained_leaves(config: Mapping[str, Any], record: RunRecord | None) -> dict[str, Any]:
    """The config's fields by their dotted names.

    An option of an optimizer that went along from a checkpoint is told in the field that would have set it: the one
    with its name and value. If the config has none, it is told under the optimizer's name.

    Args:
        config: As `config.json` has it.
        record: What the run says about itself; None where it says nothing.
    """
    values = dict(leaves(config))
    if record is None:
        return values
    if record.parent is not None:
        began_with = {_BRANCH + name: word for name, word in record.parent.get("words", {}).items()}
        values |= {name: word for name, word in began_with.items() if name in values}
    trained: dict[str, tuple[Any, list[Any]]] = {}
    for kept in record.kept_options:
        option, asked = kept["option"], kept["config"]
        names = [name for name, value in leaves(config) if _sets(name, option) and value == asked]
        for name in names or [f"{kept['optimizer']}.{option}"]:
            trained.setdefault(name, (asked, []))[1].append(kept["trained"])
    return values | {name: f"{asked} (trained {_listed(found)})" for name, (asked, found) in trained.items()}


def _sets(field: str, option: str) -> bool:
    end = field.rpartition(".")[2]
    return any(end == name or end.endswith(f"_{name}") for name in _SPELLINGS.get(option, (option,)))


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(map(str, values)))
