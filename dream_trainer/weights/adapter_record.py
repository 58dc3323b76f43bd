"""A checkpoint's record of a model's adapters: taken from the model, and read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from dream_trainer.checkpoint.model_state import model_parameters, model_tensors
from dream_trainer.compat.peft import Adapters, LowRank, base_names, describe_adapters, peft_model
from dream_trainer.compat.pytorch import OfTensors
from dream_trainer.distributed.ranks import Ranks, on_all_ranks
from dream_trainer.modules.class_change import own_class
from dream_trainer.parallel.sharding import is_cut, names_in_whole


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


class Origin(NamedTuple):
    path: str  # what was loaded, as an absolute path
    name: str  # the tensor's name there


_origins = OfTensors[Origin]()


def remember_origin(tensor: Tensor, origin: Origin) -> None:
    _origins.set(tensor, origin)


def origin_of(tensor: Tensor) -> Origin | None:
    """Where `tensor` was filled from last; None if not by `load_weights`."""
    return _origins.get(tensor)
