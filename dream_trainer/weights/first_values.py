"""What adapters of peft start from: those that start from their base do so again when the base has been loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dream_trainer.compat.peft import adapted_weights, base_names, peft_model
from dream_trainer.meta.derived import Derived, asked, derivations, is_changed_since
from dream_trainer.meta.realize import Plan, fill, plain_name
from dream_trainer.meta.recorded_calls import Ref


@dataclass(frozen=True)
class FirstValues:
    """How the adapters of a model got their first values."""

    derived: Mapping[str, Derived]  # the adapters' tensors that were computed from the base, by name
    changed: str = ""  # a weight of the base that was changed when its adapter was made
    asked: str = ""  # one whose values peft looked at, so that it is not known what came of it
    is_known: bool = True  # whether it was recorded, as of models that are built in `configure_models`


_of_models: list[tuple[nn.Module, FirstValues]] = []  # until load_pretrained is over


def remember_first_values(models: Mapping[str, nn.Module], plan: Plan) -> None:
    """Notes it of the models that peft has wrapped; call `forget_first_values` after they were loaded."""
    forget_first_values()
    for name, model in models.items():
        wrapped = peft_model(model)
        if wrapped is None:
            continue
        names = [*model.state_dict(keep_vars=True), *(name for name, _ in model.named_buffers())]
        base = set(base_names(wrapped, names).values())
        noted = {own: plan.by_name.get(plain_name(f"{name}.{own}")) for own in dict.fromkeys(names)}
        refs = {own: note.ref for own, note in noted.items() if note is not None}
        _of_models.append((model, _first_values(refs, base, adapted_weights(wrapped), plan)))


def _first_values(refs: Mapping[str, Ref], base: set[str], adapted: list[str], plan: Plan) -> FirstValues:
    history = plan.tape.history
    own = [history.storages[ref.storage].writers[0] for name, ref in refs.items() if name not in base]
    if not own or any(name not in refs for name in adapted):
        return FirstValues({}, is_known=False)
    first = min(own)
    found = derivations(refs, base & refs.keys(), history)
    changed = next((name for name in adapted if is_changed_since(refs[name], first, history)), "")
    looked_at = asked({name: refs[name] for name in adapted}, history)
    return FirstValues({name: one for name, one in found.items() if one.sources}, changed, looked_at)


def first_values_of(model: nn.Module) -> FirstValues:
    return next((found for known, found in _of_models if known is model), FirstValues({}, is_known=False))


def forget_first_values() -> None:
    """Frees what it takes to compute them again."""
    _of_models.clear()


@torch.no_grad()
def begin_again(model: nn.Module, derived: Mapping[str, Derived]) -> None:
    """Gives tensors the values that they would have started with, had the base been what it is now."""
    tensors = model.state_dict(keep_vars=True) | dict(model.named_buffers())
    for name, one in derived.items():
        fill(tensors[name], one.computed(lambda source: _whole(tensors[source])))


def _whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()
