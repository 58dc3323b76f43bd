"""What a checkpoint says of a model's adapters: taken from the model, and read back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from dream_trainer.checkpoint.model_state import model_parameters, model_tensors
from dream_trainer.compat.peft import Adapters, LowRank, base_names, describe_adapters, peft_model
from dream_trainer.modules.class_change import own_class
from dream_trainer.weights.origins import origin_of


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
