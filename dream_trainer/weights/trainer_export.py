"""Exporting a model of a live, possibly sharded trainer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dream_trainer.checkpoint.model_state import model_configs
from dream_trainer.errors import CheckpointError
from dream_trainer.weights.export import export_model

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer


def export(trainer: AbstractTrainer, path: Path, model: str | None, *, weights: str, **options: Any) -> list[Path]:
    """See `CheckpointMixin.export`, whose arguments these are."""
    models = trainer.named_models()
    if model is None:
        if len(models) > 1:
            raise CheckpointError(f"the trainer has several models: say which of {sorted(models)} to export.")
        model = next(iter(models))
    if model not in models:
        raise CheckpointError(f"the trainer has no model {model!r}; there are {sorted(models)}.")
    with nullcontext() if weights == "model" else _averages(trainer, weights, model):
        trainer._reshard()
        return export_model(
            models[model],
            path,
            world=trainer.world,
            config=model_configs({model: models[model]}).get(model),
            **options,
        )


def _averages(trainer: AbstractTrainer, weights: str, model: str) -> AbstractContextManager[None]:
    from dream_trainer.callbacks.ema import EMA
    from dream_trainer.callbacks.swa import SWA
    from dream_trainer.callbacks.weight_average import WeightAverage

    found: dict[str, WeightAverage] = {}
    for kind in (EMA, SWA):
        for number, callback in enumerate(c for c in trainer.callbacks if isinstance(c, kind)):
            name = kind.__name__.lower()
            found.setdefault(name, callback)
            found[f"{name}.{number}"] = callback
    if weights not in found:
        raise CheckpointError(
            f'weights={weights!r} is not understood: use "model", or the average of an EMA or SWA callback, of which '
            f"the trainer has {list(found) or 'none'}."
        )
    average = found[weights]
    average.averaged(model)  # raises where it averages others only
    return average.averaged_weights()
