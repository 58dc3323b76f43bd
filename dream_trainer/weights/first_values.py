"""Values that peft's adapters, or a large frozen part, need before training: adapters that are computed from their base
are computed again when it has been loaded; and a base that was not loaded is found by its random values.

A base may be filled in any way: a few values of each of its parameters are checked afterwards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dream_trainer.compat.peft import adapted_weights, base_names, peft_model
from dream_trainer.compat.pytorch import is_dtensor, local_tensor
from dream_trainer.meta.realize import Plan, fill, plain_name
from dream_trainer.meta.tape import CASTS, Ref, Tape, name_of


@dataclass(frozen=True, slots=True)
class Derived:
    """How a tensor got its first values."""

    ref: Ref
    tape: Tape
    sources: Mapping[str, tuple[Ref, ...]]
    """The names of the tensors that it was computed from, with what was read of each: it, or it before a cast."""

    def computed(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The values that it has when those that it was computed from are as in `tensors`, whole on the CPU."""
        given: dict[int, torch.UntypedStorage] = {}
        for name, refs in self.sources.items():
            source = tensors[name]
            values = (source.full_tensor() if is_dtensor(source) else source).detach().cpu()
            for ref in refs:
                if ref.storage not in given:
                    given[ref.storage] = torch.UntypedStorage(self.tape.storages[ref.storage].meta.nbytes())
                ref.view(given[ref.storage]).copy_(values)
        return self.ref.view(self.tape.replay(self.ref, given)[0])


def _derivations(refs: Mapping[str, Ref], sources: Collection[str], tape: Tape) -> dict[str, Derived]:
    """How each tensor that is not of `sources` got its first values, if it was computed from those of `sources`."""
    readable: dict[int, list[tuple[str, Ref]]] = {}
    for name in sources:
        for ref in _before_casts(refs[name], tape):
            readable.setdefault(ref.storage, []).append((name, ref))
    found = {}
    for name in [name for name in refs if name not in sources]:  # in the order of all ranks
        read: dict[str, tuple[Ref, ...]] = {}
        for number in tape.calls_behind(refs[name].storage):
            for source, part in (pair for storage in tape.ops[number].reads for pair in readable.get(storage, ())):
                if part not in read.get(source, ()):
                    read[source] = (*read.get(source, ()), part)
        if read:
            found[name] = Derived(refs[name], tape, read)
    return found


def _is_changed_since(ref: Ref, first: int, tape: Tape) -> bool:
    """Whether a tensor was recomputed from its values before call number `first`, and not only cast."""
    numbers = tape.calls_behind(_before_casts(ref, tape)[-1].storage)
    return numbers[0] < first <= numbers[-1]


def _asked(refs: Mapping[str, Ref], tape: Tape) -> str:
    """The name of a tensor whose values, or values computed from them, were seen by code; "" if there is none."""
    seen: dict[int, int] = {}
    for storage, number in tape.asked.items():
        seen[storage] = max(number, seen.get(storage, -1))
        for read in (read for call in tape.calls_behind(storage) for read in tape.ops[call].reads):
            seen[read] = max(number, seen.get(read, -1))
    for name, ref in refs.items():
        chain = _before_casts(ref, tape)
        if any(seen.get(part.storage, -1) >= tape.storages[part.storage].writers[-1] for part in chain):
            return name
    return ""


def _before_casts(ref: Ref, tape: Tape) -> list[Ref]:
    """`ref`, the tensor it was cast from, and so on."""
    chain = [ref]
    while True:
        writers = tape.storages[chain[-1].storage].writers
        op = tape.ops[writers[0]]
        is_cast = len(writers) == 1 and name_of(op.func) in CASTS and len(op.reads) == 1
        if not is_cast or not isinstance(op.args[0], Ref) or op.args[0].size != ref.size:
            return chain
        chain.append(op.args[0])


@dataclass(frozen=True)
class FirstValues:
    """How the adapters of a model got their first values."""

    derived: Mapping[str, Derived]  # named adapter tensors that were computed from the base
    touched: str = ""  # a weight of the base that was changed, or whose values were seen, when its adapter was made
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
        refs = {own: note.ref for own in names if (note := plan.by_name.get(plain_name(f"{name}.{own}"))) is not None}
        tape, adapted = plan.tape, adapted_weights(wrapped)
        written = [tape.storages[ref.storage].writers[0] for own, ref in refs.items() if own not in base]
        if not written or any(own not in refs for own in adapted):
            continue
        first = min(written)
        touched = next((own for own in adapted if _is_changed_since(refs[own], first, tape)), "")
        touched = touched or _asked({own: refs[own] for own in adapted}, tape)
        _of_models.append((model, FirstValues(_derivations(refs, base & refs.keys(), tape), touched)))


def first_values_of(model: nn.Module) -> FirstValues:
    return next((found for known, found in _of_models if known is model), FirstValues({}, is_known=False))


def forget_first_values() -> None:
    """Frees what it takes to compute them again."""
    _of_models.clear()


@torch.no_grad()
def begin_again(model: nn.Module, derived: Mapping[str, Derived]) -> None:
    """Gives tensors the values that they would have started with from the present base."""
    tensors = model.state_dict(keep_vars=True) | dict(model.named_buffers())
    for name, one in derived.items():
        fill(tensors[name], one.computed(tensors))


def frozen_draws(models: Mapping[str, nn.Module], plan: Plan) -> dict[str, Tensor]:
    """Some values of each frozen parameter whose recorded initialisation draws them, once it is real."""
    noted = {name: one for name, one in _parameters(models) if name in plan.by_name and not one.requires_grad}
    is_drawn = plan.tape.is_drawn
    return {name: _some_of(one) for name, one in noted.items() if is_drawn(plan.by_name[name].ref)}


def warn_of_unloaded_bases(
    drawn: Mapping[str, Tensor],
    models: Mapping[str, nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    warn_once: Callable[[str, str], None],
) -> None:
    """Warns of each model that is mostly frozen as it was drawn, and trains the rest; once the resume is over."""
    if not drawn:
        return
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    stepped = {id(parameter) for group in groups for parameter in group["params"]}  # may be thawed later
    for model_name, model in models.items():
        trained = unloaded = total = 0
        for name, parameter in _parameters({model_name: model}):
            total += parameter.numel()
            if parameter.requires_grad or id(parameter) in stepped:
                trained += parameter.numel()
            elif name in drawn and torch.equal(_some_of(parameter), drawn[name]):
                unloaded += parameter.numel()
        if trained and 2 * unloaded > total:
            warn_once(
                f"unloaded {model_name}",
                f"model {model_name!r} trains {trained:,} of its {total:,} parameters, and {unloaded:,} are frozen at "
                "random initial values: no weights were loaded into them. Load them in load_pretrained, by "
                "load_base_weights under adapters of peft and by load_weights otherwise, or set init_from. If they "
                "are meant to be random, all is well.",
            )


def _parameters(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for model_name, model in models.items():
        for name, parameter in model.named_parameters(prefix=model_name):
            yield plain_name(name), parameter


def _some_of(parameter: nn.Parameter) -> Tensor:
    """Values spread over this rank's part: the first row by itself may be padding, which is zero in every file."""
    values = local_tensor(parameter).detach().flatten()
    return values[:: max(1, len(values) // 8)].clone()
