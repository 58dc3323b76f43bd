"""What has to be the same on all ranks, compared before it trains something wrong or hangs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from dream_trainer.distributed.ranks import Ranks
from dream_trainer.errors import RanksDifferError

_ABSENT = "none"


def refuse_differences(ranks: Ranks, facts: Mapping[str, Any], advice: str) -> None:
    """Compares what every rank says of itself; a collective.

    Args:
        ranks: All of them call this.
        facts: Values by what they are the value of; compared as they are printed.
        advice: What to do where they differ, as a sentence.

    Raises:
        RanksDifferError: Some differ; the same on every rank, with each rank's value.
    """
    spelled_facts = {name: value if isinstance(value, str) else repr(value) for name, value in facts.items()}
    refuse(told_differences(ranks.all_gather_object(spelled_facts)), advice)


def told_differences(every: Sequence[Mapping[str, str]]) -> list[str]:
    """For each name whose value differs, the name and each value with its ranks; `every` is in rank order."""
    names = dict.fromkeys(name for facts in every for name in facts)
    by_name = {name: [facts.get(name, _ABSENT) for facts in every] for name in names}
    return [f"{name} ({_spelled(values)})" for name, values in by_name.items() if len(set(values)) > 1]


def refuse(differences: Sequence[str], advice: str) -> None:
    """Raises RanksDifferError if there are any, naming the first few."""
    if differences:
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise RanksDifferError(
            f"not the same on all ranks, though the run takes it for that: {', '.join(differences[:5])}{more}. {advice}"
        )


def _spelled(values: Sequence[str]) -> str:
    """Each value with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    spelled = [f"{value[:200]} on {_spelled_ranks(holders)}" for value, holders in list(ranks.items())[:4]]
    return "; ".join([*spelled, "..."] if len(ranks) > 4 else spelled)


def _spelled_ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"


def plain_facts(name: str, value: Any) -> dict[str, str]:
    """The numbers, strings and such in a nested value, each under its own name; what is none of these is left out."""
    if isinstance(value, str | bool | int | float | timedelta | None):
        return {name: repr(value)}
    if isinstance(value, Mapping):
        parts = [plain_facts(f"{name}.{key}", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        parts = [plain_facts(f"{name}[{index}]", item) for index, item in enumerate(value)]
    else:
        parts = []
    return {key: item for part in parts for key, item in part.items()}
