"""Compares the configs of adapters that are loaded, since equal weights under another config are another function."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from dream_trainer.compat.peft import Adapters, with_defaults
from dream_trainer.distributed.ranks import Ranks, on_all_ranks
from dream_trainer.errors import CheckpointError
from dream_trainer.screen import logger
from dream_trainer.weights.adapter_record import adapters_from, adapters_of
from dream_trainer.weights.export_files import ADAPTER_CONFIG_NAME
from dream_trainer.weights.weight_files import open_weights

_DESCRIBES = {  # fields that say where adapters are from, or how they began
    *("base_model_name_or_path", "revision", "auto_mapping", "task_type", "inference_mode", "peft_version"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying"),
}

# Fields that say which layers have adapters, in one of several spellings; the tensors' names say it in one.
_PLACES = {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"}

_OF_TRAINING = {  # fields that only training looks at: dropout, and the schedule of AdaLoRA
    *("lora_dropout", "module_dropout", "rank_dropout", "rank_dropout_scale", "orth_reg_weight"),
    *("total_step", "tinit", "tfinal", "deltaT", "beta1", "beta2"),
}

Changes = dict[str, tuple[Any, Any]]


def refuse_other_adapters(
    path: Path, models: Mapping[str, nn.Module], saved: Mapping[str, Any] | None, *, world: Ranks
) -> None:
    """Compares a checkpoint's adapter configs (None of an older one) with the models', before anything is loaded."""

    def compare() -> None:
        adapters = {name: found for name, model in models.items() if (found := adapters_of(model)) is not None}
        if saved is None:
            if adapters and world.is_main:
                logger.warning("%s: %s", path, _UNCHECKED)
            return
        for name in sorted({*adapters, *saved} & models.keys()):
            if (name in adapters) != (name in saved):
                had, has = ("had", "has none") if name in saved else ("had no", "has some")
                raise CheckpointError(f"model {name!r} {had} adapters of peft there, and {has} in this run.")
            before, now = adapters_from(saved[name]), adapters[name]
            changes = _changes_of_all(before, now)
            refused = {field: change for field, change in changes.items() if not _is_of_training(field)}
            if refused:
                raise CheckpointError(
                    f"the adapters of model {name!r} are configured otherwise, so that the same weights would be "
                    f"another function: {_listed(refused)}. Give get_peft_model the config of the checkpoint. To take "
                    f"the weights under another one on purpose, export them (dream-trainer checkpoints export {path} "
                    'adapters) and begin a run with load_adapters(model, "adapters", '
                    f"may_differ={sorted(refused)}) in load_pretrained."
                )
            if changes and world.is_main:
                logger.warning(
                    "the adapters of model %r differ from the checkpoint's in options that only training uses: %s. The "
                    "new values apply.",
                    name,
                    _listed(changes),
                )

    on_all_ranks(world, f"load {path}", compare)


def refuse_other_config(path: Path, adapters: Adapters, may_differ: Collection[str], world: Ranks) -> None:
    """Compares the `adapter_config.json` of a peft directory, or next to a peft file, with a model's adapters."""
    same_places = set(open_weights(path, None).shapes) == set(adapters.names)
    file = (path if path.is_dir() else path.parent) / ADAPTER_CONFIG_NAME
    if not file.exists():
        if world.is_main:
            logger.warning("%s: %s", path, _UNCHECKED)
        return
    try:
        saved = dict(json.loads(file.read_text()))
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}.") from error
    changes = _changes(saved, adapters.config, same_places=same_places)
    refused = {name: change for name, change in changes.items() if not (_is_of_training(name) or name in may_differ)}
    if refused:
        raise CheckpointError(
            f"they are configured otherwise than the model's, so that the same weights would be another function: "
            f"{_listed(refused)}. Give get_peft_model the config in {file}, or take the weights under the new one on "
            f"purpose, by may_differ={sorted(refused)}."
        )


_UNCHECKED = (
    "it has no config of its adapters, so it could not be checked that they mean the same here (lora_alpha and so on)."
)


def _changes_of_all(before: Adapters, now: Adapters) -> Changes:
    """The differences of all active adapters; an older checkpoint only has the config of the first one."""
    if before.active and list(before.active) != list(now.active):
        return {"active adapters": (list(before.active), list(now.active))}
    same_places = dict(before.names) == dict(now.names)
    if len(now.active) == 1 or not before.active:
        return _changes(before.config, now.config, same_places=same_places)
    return {
        f"{name}.{field}": change
        for name, config in now.active.items()
        for field, change in _changes(before.active[name], config, same_places=same_places).items()
    }


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], *, same_places: bool) -> Changes:
    """Fields that differ, each with both values; a field that one version of peft does not have counts as empty."""
    if before.get("peft_type") != now.get("peft_type"):
        return {"peft_type": (before.get("peft_type"), now.get("peft_type"))}
    passed_over = _DESCRIBES | (_PLACES if same_places else set())
    if now.get("peft_type") == "ADALORA":
        passed_over |= {"rank_pattern"}  # which it finds in training
    before, now = with_defaults(before), with_defaults(now)
    return {
        name: (before.get(name), now.get(name))
        for name in sorted({*before, *now} - passed_over)
        if not name.startswith("init_")
        and before.get(name) != now.get(name)
        and (before.get(name) or now.get(name))  # None, False and an empty list say the same
    }


def _is_of_training(name: str) -> bool:
    return name.rpartition(".")[2] in _OF_TRAINING


def _listed(changes: Changes) -> str:
    return ", ".join(f"{name} was {before!r} and is {now!r}" for name, (before, now) in changes.items())
