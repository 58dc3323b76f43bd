"""Frozen parameters that checkpoints leave out: their names and digests are compared with what a resumed setup made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from dream_trainer.checkpoint.digests import value_digests
from dream_trainer.checkpoint.model_state import model_parameters
from dream_trainer.distributed.ranks import Ranks
from dream_trainer.errors import CheckpointError

_LISTED = 5


class FrozenWeights:
    """The frozen parameters of a run's models, as its setup made them. Making one is a collective."""

    def __init__(self, models: Mapping[str, nn.Module], world: Ranks) -> None:
        self._models, self._world = models, world
        self._at_setup = value_digests(self._frozen(), world=world)

    @property
    def names(self) -> frozenset[str]:
        """The names of those that were frozen after the setup, as checkpoints have them."""
        return frozenset(self._at_setup)

    def unchanged(self) -> dict[str, str]:
        """The digests of those that are still frozen and still have the values of the setup; a collective."""
        now = value_digests(self._frozen(), world=self._world)
        return {name: digest for name, digest in now.items() if self._at_setup.get(name) == digest}

    def _frozen(self) -> dict[str, Tensor]:
        return {name: p for name, p in model_parameters(self._models).items() if not p.requires_grad}


def refuse_other_weights(
    path: Path, models: Mapping[str, nn.Module], left_out: Mapping[str, Mapping[str, str]], *, world: Ranks
) -> None:
    """Compares the weights that a checkpoint left out with those that are there; a collective."""
    here = {name: p for name, p in model_parameters(models).items() if name in left_out}
    digests = value_digests(here, world=world)
    different = [
        f"{name} ({about['digest']} then, {digests.get(name, 'not here')} now)"
        for name, about in left_out.items()
        if digests.get(name) != about["digest"]
    ]
    if not different:
        return
    paths = sorted({about["path"] for about in left_out.values() if "path" in about})
    more = f" and {len(different) - _LISTED} more" if len(different) > _LISTED else ""
    raise CheckpointError(
        f"Could not load {path}: it was saved without the frozen weights, and {len(different)} of those "
        f"{len(left_out)} are not what this run has: {', '.join(different[:_LISTED])}{more}. "
        "Load the same ones in load_pretrained" + (f"; they came from {', '.join(paths)}." if paths else ".")
    )
