"""Names of what a stage of a pipeline holds of a model; apart from the stages, since every step asks for ties."""

from __future__ import annotations

from collections.abc import Collection


def is_held(name: str, names: Collection[str]) -> bool:
    """Whether `names` has `name`, or a part around it."""
    return any(name == held or name.startswith(f"{held}.") for held in names)
