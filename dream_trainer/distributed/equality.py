"""What has to be the same on all ranks, compared before it trains something wrong or hangs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from dream_trainer.checks import listed
from dream_trainer.distributed.ranks import Ranks
from dream_trainer.errors import RanksDifferError

_ABSENT = "none"


def refuse_differences(ranks: Ranks, facts: Mapping[str, Any], advice: str, *, among: int = 0) -> None:
    """Raises RanksDifferError on every rank if facts differ; a collective, of digests first."""
    for of_group in differing_facts(ranks, facts, among=among):
        refuse(told_differences(of_group), advice)


def differing_facts(ranks: Ranks, facts: Mapping[str, Any], *, among: int = 0) -> list[dict[int, dict[str, str]]]:
    """What ranks say that do not all say the same, by rank, for each group of them; a collective."""
    if ranks.world_size == 1:
        return []
    spelled_facts = {name: value if isinstance(value, str) else repr(value) for name, value in facts.items()}
    digest = hashlib.sha256(repr(sorted(spelled_facts.items())).encode(errors="surrogatepass")).digest()
    digests = ranks.all_gather_object((among, digest))
    groups = [group for group, _ in dict.fromkeys(digests)]
    if len(set(groups)) == len(groups):
        return []
    every = ranks.all_gather_object((among, spelled_facts))
    return [
        {rank: of_rank for rank, (other, of_rank) in enumerate(every) if other == group}
        for group in dict.fromkeys(groups)
        if groups.count(group) > 1
    ]


def told_differences(every: Mapping[int, Mapping[str, str]]) -> list[str]:
    """For each name whose value differs, the name and each value with its ranks; `every` is by rank."""
    names = dict.fromkeys(name for facts in every.values() for name in facts)
    by_name = {name: {rank: facts.get(name, _ABSENT) for rank, facts in every.items()} for name in names}
    return [f"{name} ({_spelled(values)})" for name, values in by_name.items() if len(set(values.values())) > 1]


def refuse(differences: Sequence[str], advice: str) -> None:
    if differences:
        raise RanksDifferError(
            f"not the same on all ranks, though the run takes it for that: {listed(differences, 5)}. {advice}"
        )


def _spelled(values: Mapping[int, str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
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
