"""What happened to each name when weights were loaded, and a hint for names that do not fit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dream_trainer.checks import listed

_LISTED = 20


@dataclass(frozen=True)
class LoadReport:
    """What `load_weights` did, by the names of the model's `state_dict()`; of all ranks together."""

    loaded: tuple[str, ...]
    """Filled from the file. A tied tensor appears under each of its names."""
    missing: tuple[str, ...]
    """In the model and not in the file: these keep the values they had."""
    unexpected: tuple[str, ...]
    """In the file, after the renames, and not in the model."""
    mismatched: Mapping[str, str]
    """In both but not loaded, each with the reason, such as the two shapes."""

    @property
    def is_complete(self) -> bool:
        """Whether file and model have the same names and shapes."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        total = len({*self.loaded, *self.missing, *self.mismatched})
        return "\n  ".join([f"{len(self.loaded)} of the model's {total} tensors loaded", *_problems(self)])


def _problems(report: LoadReport) -> list[str]:
    reasons = [f"{name} ({reason})" for name, reason in report.mismatched.items()]
    kinds = (
        (report.missing, "missing (not in the file)"),
        (report.unexpected, "unexpected (not in the model)"),
        (reasons, "mismatched"),
    )
    return [f"{len(names)} {kind}: {listed(names, _LISTED)}" for names, kind in kinds if names]


def merged(reports: Sequence[LoadReport]) -> LoadReport:
    """One report of all ranks. Under a pipeline each rank has other names: unexpected is only what no rank expects."""
    missing = tuple(dict.fromkeys(name for report in reports for name in report.missing))
    mismatched = {name: reason for report in reports for name, reason in report.mismatched.items()}
    failed = {*missing, *mismatched}
    loaded = dict.fromkeys(name for report in reports for name in report.loaded if name not in failed)
    unexpected = set.intersection(*(set(report.unexpected) for report in reports))
    return LoadReport(
        loaded=tuple(loaded),
        missing=missing,
        unexpected=tuple(name for name in reports[0].unexpected if name in unexpected),
        mismatched=mismatched,
    )


def refusal(report: LoadReport) -> str:
    what = "it does not fit the model" if report.loaded else "nothing in it fits the model"
    advice = rename_hint(report)
    if not advice:
        ways = ["use renames to turn the file's names into the model's"] if report.missing and report.unexpected else []
        ways += ["use strict=False to load what fits"] if report.loaded else []
        advice = (", or ".join(ways) or "is it a file of this model").capitalize() + ("." if ways else "?")
        if report.missing and report.unexpected:
            advice += (
                " If the model's own load_state_dict translates these names (fused or packed weights), call it or "
                "from_pretrained in configure_models."
            )
    return "\n  ".join([f"{what}; nothing was written.", *_problems(report), advice])


def rename_hint(report: LoadReport) -> str:
    """The rename that would match most of the names that do not fit, by adding or removing one prefix; "" if none."""
    missing, unexpected = set(report.missing), set(report.unexpected)
    counts: Counter[tuple[str, str]] = Counter()
    for name in unexpected:
        for prefix, rest in _splits(name):
            counts["^" + re.escape(prefix), ""] += rest in missing
    for name in missing:
        for prefix, rest in _splits(name):
            counts["^", prefix] += rest in unexpected
    if not counts:
        return ""
    (pattern, replacement), matches = counts.most_common(1)[0]
    if 2 * matches < min(len(missing), len(unexpected)) or not matches:
        return ""
    return f"Adding renames={{{pattern!r}: {replacement!r}}} would match {matches} of them."


def _splits(name: str) -> Iterable[tuple[str, str]]:
    parts = name.split(".")
    return ((".".join(parts[:at]) + ".", ".".join(parts[at:])) for at in range(1, len(parts)))
