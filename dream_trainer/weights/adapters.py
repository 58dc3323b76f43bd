"""Models that peft has wrapped: loading their base and their adapters, and what is to be written of them.

peft puts words into the names of what it wraps, `q_proj.weight` being `base_model.model.q_proj.base_layer.weight` then.
Files have the names that the authors gave. Everything else is as for other models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dream_trainer.checkpoint.model_state import model_parameters, model_tensors
from dream_trainer.compat.peft import Adapters, LowRank, base_names, describe_adapters, peft_model, trained_copies
from dream_trainer.compat.pytorch import local_tensor
from dream_trainer.distributed.ranks import Ranks
from dream_trainer.errors import CheckpointError, ConfigError
from dream_trainer.modules.class_change import own_class
from dream_trainer.weights.load import load_weights
from dream_trainer.weights.load_report import LoadReport
from dream_trainer.weights.origins import origin_of


def load_base_weights(
    model: nn.Module,
    path: str | Path,
    *,
    model_name: str | None = None,
    renames: Mapping[str, str] | None = None,
    strict: bool = True,
    world: Ranks | None = None,
) -> LoadReport:
    """Fills the base of a model that peft has wrapped; its adapters keep their values. Every rank calls this.

    Modules that are trained whole beside the adapters (`modules_to_save`) get the base's values too.

    Args:
        model: What `peft.get_peft_model` returned; call this from the trainer's `load_pretrained`.
        path: As for `load_weights`.
        model_name: As for `load_weights`.
        renames: As for `load_weights`, into the names that the base had before it was wrapped.
        strict: As for `load_weights`; the adapters are not expected in the file.
        world: The ranks. Default: those of the default process group, or this process alone if there is none.

    Returns:
        What was loaded and what was not, by the names of the wrapped model.

    Raises:
        CheckpointError: As `load_weights`.
        ConfigError: `model` is not wrapped by peft, or `renames` has a faulty regular expression.
    """
    wrapped = peft_model(model)
    if wrapped is None:
        raise ConfigError(f"{type(model).__name__} is not wrapped by peft. Use load_weights.")
    names = list(model.state_dict(keep_vars=True))
    base = base_names(wrapped, names)
    moved = {author: name for author, name in base.items() if author != name}
    report = load_weights(
        model,
        path,
        model_name=model_name,
        renames={**(renames or {}), **_exactly(moved)},
        strict=strict,
        optional=set(names) - set(base.values()),
        world=world,
    )
    with torch.no_grad():
        for original, copy in trained_copies(wrapped):
            for source, target in zip(original.parameters(), copy.parameters(), strict=True):
                local_tensor(target).copy_(local_tensor(source))
    return report


def load_adapters(model: nn.Module, path: str | Path, *, world: Ranks | None = None) -> LoadReport:
    """Fills the active adapter of a model that peft has wrapped from a directory in peft's layout, or its file.

    Args:
        model: What `peft.get_peft_model` returned, with the adapter's own config; call this from `load_pretrained`.
        path: A directory with `adapter_model.safetensors`, or such a file. Every rank reads its shards of it.
        world: The ranks. Default: those of the default process group, or this process alone if there is none.

    Raises:
        CheckpointError: As `load_weights`, where the adapter's names or shapes are not the file's.
        ConfigError: `model` is not wrapped by peft.
    """
    adapters = adapters_of(model)
    if adapters is None:
        raise ConfigError(f"{type(model).__name__} is not wrapped by peft. Use load_weights.")
    others = set(model.state_dict(keep_vars=True)) - set(adapters.names.values())
    return load_weights(model, path, renames=_exactly(adapters.names), optional=others, world=world)


def _exactly(names: Mapping[str, str]) -> dict[str, str]:
    """Renames of whole names. One that was renamed is never another's: peft's are longer than authors'."""
    return {rf"\A{re.escape(old)}\Z": new.replace("\\", "\\\\") for old, new in names.items()}


def adapters_of(model: nn.Module) -> Adapters | None:
    """The active adapter of a model that peft has wrapped; None of any other."""
    wrapped = peft_model(model)
    if wrapped is None:
        return None
    names = [name.removeprefix("models.model.") for name in model_tensors({"model": model})]
    parameters = model_parameters({"model": model})
    base = (parameters.get(f"models.model.{name}") for name in base_names(wrapped, names).values())
    base_path = next((origin.path for p in base if p is not None and (origin := origin_of(p))), None)
    base_class = own_class(wrapped.get_base_model())
    return describe_adapters(wrapped, names, base_class=base_class, base_path=base_path)


def adapters_from(record: Mapping[str, Any]) -> Adapters:
    """What `dataclasses.asdict` made of adapters for a checkpoint."""
    low_rank = {name: LowRank(**values) for name, values in record["low_rank"].items()}
    return Adapters(**{**record, "low_rank": low_rank})


def merged_reader(adapters: Adapters, read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """Reads tensors of the base, by the names of `adapters.base`, with the adapters added.

    Args:
        adapters: What is added to what.
        read: Reads a whole tensor of the model by its name; called in the same order on every rank.

    Raises:
        CheckpointError: These adapters cannot be merged here.
    """
    if adapters.cannot_merge:
        raise CheckpointError(
            f"these adapters cannot be merged one tensor at a time: {adapters.cannot_merge}. Export the adapters "
            "alone. What peft can merge, PeftModel.from_pretrained(base, path).merge_and_unload() does."
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
