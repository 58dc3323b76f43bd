"""The weights that a run starts from where it has nothing to resume: `init_from`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch.nn as nn

from dream_trainer.checkpoint.loading import read_shared
from dream_trainer.checkpoint.manifest import MANIFEST_NAME
from dream_trainer.config.checkpoint_parameters import CheckpointParameters
from dream_trainer.distributed.outcomes import on_all_ranks
from dream_trainer.distributed.ranks import Ranks
from dream_trainer.errors import ConfigError
from dream_trainer.stores.store_path import as_path
from dream_trainer.trainer.user_class.overrides import definers, is_ours
from dream_trainer.weights.adapter_config import refuse_other_adapters
from dream_trainer.weights.adapter_record import adapters_of
from dream_trainer.weights.load import load_weights
from dream_trainer.weights.origins import origin_of

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer


def load_initial_weights(models: Mapping[str, nn.Module], parameters: CheckpointParameters, world: Ranks) -> None:
    """Loads `parameters.init_from` into the models, if it is set; every rank calls it.

    Raises:
        ConfigError: There are several models, and `init_from` is not a checkpoint of ours that has each under its name.
        CheckpointError: The weights are not there, damaged, or do not fit; or they are of adapters that were configured
            otherwise.
    """
    if parameters.init_from is None:
        return
    path = as_path(parameters.init_from)
    if len(models) > 1 and not (path / MANIFEST_NAME).exists():
        raise ConfigError(
            f"init_from={parameters.init_from!r} does not say which of the models {sorted(models)} it is for. "
            "Call load_weights for each in load_pretrained."
        )
    if (path / MANIFEST_NAME).exists():
        _refuse_other_adapters(path, models, world)
    for name, model in models.items():
        load_weights(
            model,
            path,
            model_name=name if len(models) > 1 else None,
            renames=parameters.init_renames,
            strict=parameters.init_strict,
            world=world,
        )


def any_is_loaded(trainer: AbstractTrainer) -> bool:
    """Whether setup gave models weights from elsewhere: by `load_weights`, or in a `load_pretrained` of the user's."""
    loads = any(not is_ours(part) for part in definers(type(trainer), "load_pretrained"))
    parameters = (p for model in trainer.named_models().values() for p in model.parameters())
    return loads or any(origin_of(parameter) is not None for parameter in parameters)


def _refuse_other_adapters(path: Path, models: Mapping[str, nn.Module], world: Ranks) -> None:
    """Of models that have adapters both here and there; a single one may have another name there."""
    saved = on_all_ranks(world, f"load {path}", lambda: read_shared(path)).get("adapters", {})
    if len(models) == len(saved) == 1:
        saved = dict(zip(models, saved.values(), strict=True))
    adapted = {name: model for name, model in models.items() if name in saved and adapters_of(model) is not None}
    refuse_other_adapters(path, adapted, saved, world=world)
