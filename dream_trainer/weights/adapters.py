"""Models that peft has wrapped: loading their base and their adapters, and exporting them.

peft renames `q_proj.weight` to `base_model.model.q_proj.base_layer.weight`; files have the names that authors gave."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dream_trainer.checkpoint.model_state import model_parameters, model_tensors
from dream_trainer.compat.peft import (
    Adapters,
    LowRank,
    base_names,
    describe_adapters,
    may_start_from_the_base,
    peft_model,
    trained_copies,
    with_defaults,
)
from dream_trainer.compat.pytorch import local_tensor
from dream_trainer.distributed.ranks import Ranks, on_all_ranks
from dream_trainer.errors import CheckpointError, ConfigError
from dream_trainer.modules.class_change import own_class
from dream_trainer.parallel.sharding import is_cut, names_in_whole
from dream_trainer.screen import logger
from dream_trainer.stores.store_path import as_path
from dream_trainer.weights.first_values import begin_again, first_values_of
from dream_trainer.weights.load import LoadReport, load_weights, origin_of
from dream_trainer.weights.weight_files import ADAPTER_CONFIG_NAME, open_weights


def adapters_of(model: nn.Module) -> Adapters | None:
    """The active adapter of a model that peft has wrapped, as far as this rank has it; None of any other model."""
    wrapped = peft_model(model)
    if wrapped is None:
        return None
    tied, own = names_in_whole(model), model.state_dict(keep_vars=True).keys()
    names = [name.removeprefix("models.model.") for name in model_tensors({"model": model})]
    names = [name for name in names if name in own]  # copies have their names in another stage
    parameters = model_parameters({"model": model})
    base = (parameters.get(f"models.model.{name}") for name in base_names(wrapped, names).values())
    base_path = next((origin.path for p in base if p is not None and (origin := origin_of(p))), None)
    base_class = own_class(wrapped.get_base_model())
    return describe_adapters(wrapped, names, tied=tied, base_class=base_class, base_path=base_path)


def whole_adapters(models: Mapping[str, nn.Module], world: Ranks) -> dict[str, Adapters]:
    """The active adapters of those models that have some, of all stages. Every rank calls this."""
    adapted = {name: model for name, model in models.items() if peft_model(model) is not None}
    if not adapted:
        return {}
    own: dict[str, Any] = on_all_ranks(
        world, "describe adapters", lambda: {name: adapters_of(model) for name, model in adapted.items()}
    )
    parts = world.all_gather_object(own) if any(map(is_cut, adapted.values())) else [own]
    return {name: _joined([part[name] for part in parts]) for name in adapted}


def _joined(parts: Sequence[Adapters]) -> Adapters:
    """One of several stages' adapters, which have the same config and other layers."""
    joined = next((part for part in parts if part.config.get("base_model_name_or_path")), parts[0])
    return replace(
        joined,
        names={name: value for part in parts for name, value in part.names.items()},
        base={name: value for part in parts for name, value in part.base.items()},
        low_rank={name: value for part in parts for name, value in part.low_rank.items()},
        cannot_merge=next((part.cannot_merge for part in parts if part.cannot_merge), ""),
    )


def adapters_from(record: Mapping[str, Any]) -> Adapters:
    """Rebuilds adapters from a checkpoint's record, made by `dataclasses.asdict`."""
    low_rank = {name: LowRank(**values) for name, values in record["low_rank"].items()}
    return Adapters(**{**record, "low_rank": low_rank})


def load_base_weights(
    model: nn.Module,
    path: str | Path,
    *,
    model_name: str | None = None,
    renames: Mapping[str, str] | None = None,
    strict: bool = True,
    world: Ranks | None = None,
) -> LoadReport:
    """Fills the base of a model that peft has wrapped. Every rank calls this.

    Adapters that started from the base's weights, such as DoRA's magnitudes, start again from the loaded ones; all
    others keep their values. Modules that are trained whole in addition to adapters (`modules_to_save`) get the base's
    values too.

    Args:
        model: Result of `peft.get_peft_model`; call this from the trainer's `load_pretrained`.
        path: As for `load_weights`.
        model_name: As for `load_weights`.
        renames: As for `load_weights`, into the names that the base had before it was wrapped.
        strict: As for `load_weights`; the adapters are not expected in the file.
        world: The ranks. Default: those of the default process group, or only this process without one.

    Returns:
        The loaded and the missing tensors, by the names of the wrapped model.

    Raises:
        CheckpointError: As `load_weights`.
        ConfigError: `model` is not wrapped by peft, making its adapters changed the base's weights (PiSSA), or
            `renames` has a faulty regular expression.
    """
    wrapped = peft_model(model)
    if wrapped is None:
        raise ConfigError(f"{type(model).__name__} is not wrapped by peft. Use load_weights.")
    first = first_values_of(model)
    setting = may_start_from_the_base(wrapped)
    if first.touched or (setting and not first.is_known):
        elsewhere = "the model was built before configure_models, or is not loaded in load_pretrained"
        why = f"making them changed or read {first.touched}" if first.touched else elsewhere
        raise ConfigError(
            f"adapters under {setting or 'this config'} may start from the base's weights, and cannot start again from "
            f"the loaded ones: {why}. Call from_pretrained, and get_peft_model on what it returns, in configure_models."
        )
    names = list(model.state_dict(keep_vars=True))
    base = base_names(wrapped, names)
    of_adapters = set(names) - set(base.values())
    renames = {**(renames or {}), **_exactly({author: name for author, name in base.items() if author != name})}
    report = load_weights(
        model, path, model_name=model_name, renames=renames, strict=strict, optional=of_adapters, world=world
    )
    with torch.no_grad():
        for original, copy in trained_copies(wrapped):
            for source, target in zip(original.parameters(), copy.parameters(), strict=True):
                local_tensor(target).copy_(local_tensor(source))
        copies = {id(target) for _, copy in trained_copies(wrapped) for target in copy.parameters()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    begin_again(model, {name: one for name, one in first.derived.items() if id(parameters.get(name)) not in copies})
    return report


def load_adapters(
    model: nn.Module, path: str | Path, *, may_differ: Collection[str] = (), world: Ranks | None = None
) -> LoadReport:
    """Fills the active adapter of a model that peft has wrapped from a directory in peft's layout, or its file.

    The `adapter_config.json` that lies there is compared with the model's: under another `lora_alpha`, say, the same
    weights would be another function.

    Args:
        model: Result of `peft.get_peft_model`, with the adapter's own config; call this from `load_pretrained`.
        path: A directory with `adapter_model.safetensors`, or such a file. Every rank reads its shards of it.
        may_differ: Config fields that may differ in the model on purpose, such as `["lora_alpha"]`.
        world: The ranks. Default: those of the default process group, or only this process without one.

    Raises:
        CheckpointError: The configs differ in what the adapter's function depends on; or as `load_weights`, if the
            adapter's names or shapes are not the file's. The same on every rank, and nothing was written.
        ConfigError: `model` is not wrapped by peft.
    """
    place, ranks = as_path(path).expanduser(), world or Ranks.of_default_group()
    adapters = whole_adapters({"model": model}, ranks).get("model")
    if adapters is None:
        raise ConfigError(f"{type(model).__name__} is not wrapped by peft. Use load_weights.")
    on_all_ranks(ranks, f"load adapters from {path}", lambda: refuse_other_config(place, adapters, may_differ, ranks))
    others = set(model.state_dict(keep_vars=True)) - set(adapters.names.values())
    return load_weights(model, path, renames=_exactly(adapters.names), optional=others, world=world)


def _exactly(names: Mapping[str, str]) -> dict[str, str]:
    """Renames of whole names. One that was renamed is never another's: peft's are longer than authors'."""
    return {rf"\A{re.escape(old)}\Z": new.replace("\\", "\\\\") for old, new in names.items()}


def merged_reader(adapters: Adapters, read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """Reads tensors of the base, by the names of `adapters.base`, with the adapters added."""
    if adapters.cannot_merge:
        raise CheckpointError(
            f"these adapters cannot be merged one tensor at a time: {adapters.cannot_merge}. Only export the "
            "adapters. PeftModel.from_pretrained(base, path).merge_and_unload() merges all that peft can."
        )

    def merged(author_name: str) -> Tensor:
        weight, product = read(adapters.base[author_name]), adapters.low_rank.get(author_name)
        if product is None:
            return weight
        up, down = read(product.up), read(product.down)
        wide = torch.promote_types(up.dtype, torch.float32)
        added = (up.to(wide) @ down.to(wide)) * product.scaling
        return weight + (added.t() if product.is_transposed else added).to(weight.dtype)

    return merged


# -- Configs of adapters, compared: equal weights under another config are another function.


_DESCRIBES = {  # fields that say where adapters are from, how they began, or how they are trained
    *("base_model_name_or_path", "revision", "auto_mapping", "task_type", "inference_mode", "peft_version"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying"),
    *("lora_dropout", "module_dropout", "rank_dropout", "rank_dropout_scale", "orth_reg_weight"),
    *("total_step", "tinit", "tfinal", "deltaT", "beta1", "beta2"),
}

# Fields that say which layers have adapters, in one of several spellings; the tensors' names say it in one.
_PLACES = {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"}


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
            changes = _changes_of_all(adapters_from(saved[name]), adapters[name])
            if changes:
                raise CheckpointError(
                    f"the adapters of model {name!r} are {_otherwise(changes)}. Give get_peft_model the config of the "
                    "checkpoint. To take the weights under another one on purpose, export them (dream-trainer "
                    f'checkpoints export {path} adapters) and begin a run with load_adapters(model, "adapters", '
                    f"may_differ={sorted(changes)}) in load_pretrained."
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
    refused = {name: change for name, change in changes.items() if name not in may_differ}
    if refused:
        raise CheckpointError(
            f"they are {_otherwise(refused)}. Give get_peft_model the config in {file}, or take the weights under the "
            f"new one on purpose, by may_differ={sorted(refused)}."
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


def _otherwise(changes: Changes) -> str:
    listed = ", ".join(f"{name} was {before!r} and is {now!r}" for name, (before, now) in changes.items())
    return f"configured otherwise, so that the same weights would be another function: {listed}"
