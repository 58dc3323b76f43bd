"""Which layers of a model make which stage of a pipeline, and a model cut down to the layers of its rank. Names stay
those of the whole model, so a checkpoint does not tell how many stages it came from."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from dream_trainer.checks import spell
from dream_trainer.compat.fully_shard import as_one_backward
from dream_trainer.compat.pipelining import as_tuple, shallow_copy
from dream_trainer.compat.pytorch import is_dtensor
from dream_trainer.errors import ConfigError, HookError, StepError, failing_frame, line_of
from dream_trainer.modules.class_change import Changed, change_class, own_class
from dream_trainer.nested import map_tensors
from dream_trainer.parallel.plain_run import WRONG, Back, all_gather_objects, without_value
from dream_trainer.parallel.sharding import is_held

if TYPE_CHECKING:
    from dream_trainer.parallel.pipeline import Pipeline

_LISTS = (nn.ModuleList, nn.ModuleDict)  # forwards run through them, be they empty
_CONTAINERS = (*_LISTS, nn.Sequential)
Stages = Sequence[Sequence[str]]  # each stage's names of a model's parts


def even_stages(model: nn.Module, blocks: Collection[nn.Module], n_stages: int) -> list[list[str]]:
    """The names that each stage holds: equally many blocks, what comes before them first, and what follows last."""
    parts = list(_parts(model, {id(block) for block in blocks}, ""))
    places = [place for place, (_, is_block) in enumerate(parts) if is_block]
    if len(places) < n_stages:
        found = f"{len(places)} repeated blocks, which are modules of one class in a ModuleList or Sequential"
        fewer = (
            f"Use at most {len(places)} stages, which are pipeline_parallel times the stages of each rank (1 under "
            "1F1B and GPipe, 2 or more under the others)"
        )
        raise ConfigError(
            f"pipeline_parallel needs {n_stages} stages of a block each, and {type(model).__name__} has {found}. "
            f"{fewer if len(places) > 1 else 'Use pipeline_parallel=1'}, name the blocks in model_blocks, or say in "
            "pipeline_stages what each stage holds."
        )
    starts = [0, *(places[len(places) * stage // n_stages] for stage in range(1, n_stages))]
    return [[name for name, _ in parts[start:end]] for start, end in pairwise([*starts, len(parts)])]


def stages_of_models(
    models: Mapping[str, nn.Module],
    stages_of: Callable[[nn.Module, int], Stages | None],
    blocks_of: Callable[[nn.Module], Sequence[nn.Module]],
    n_stages: int,
) -> dict[nn.Module, list[list[str]]]:
    """The names in each stage of each model to cut. Frozen models that are not among these stay whole."""
    trained = {n: model for n, model in models.items() if any(p.requires_grad for p in model.parameters())}
    cut: dict[nn.Module, list[list[str]]] = {}
    for model in trained.values():
        stages = stages_of(model, n_stages)
        if stages is not None:
            check_stages(model, stages, n_stages)
            cut[model] = [list(names) for names in stages]
    if not cut:
        for model in sorted(trained.values(), key=lambda model: len(blocks_of(model)))[-1:]:
            even_stages(model, blocks_of(model), n_stages)  # which says what there is too little of
        names = ", ".join(f"self.{name}" for name in trained) or "none"
        raise ConfigError(
            f"pipeline_parallel has no model to cut into {n_stages} stages: those that are trained are {names}, and "
            "pipeline_stages returns None for each. Say there what each stage holds, or use pipeline_parallel=1."
        )
    owners: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    for model_name, model in trained.items():
        for name, parameter in model.named_parameters():
            other_name, other = owners.setdefault(parameter, (f"self.{model_name}.{name}", model))
            if other is not model and (model in cut or other in cut):
                raise ConfigError(
                    f"{other_name} and self.{model_name}.{name} are one parameter of two models, which "
                    "pipeline_parallel would cut apart. Put both into one module."
                )
    return cut


def _parts(module: nn.Module, blocks: set[int], prefix: str) -> Iterator[tuple[str, bool]]:
    """Names of the parts that go to stages, in order of registration, each with whether it is a block."""
    for name, _ in module.named_parameters(recurse=False):
        yield f"{prefix}{name}", False
    for name, child in module.named_children():
        if id(child) in blocks:
            yield f"{prefix}{name}", True
        elif any(id(part) in blocks for part in child.modules()):
            yield from _parts(child, blocks, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", False


def check_stages(model: nn.Module, stages: Sequence[Collection[str]], n_stages: int) -> None:
    if len(stages) != n_stages or not all(stages):
        counts = ", ".join(str(len(names)) for names in stages)
        raise HookError(
            f"pipeline_stages gave {len(stages)} stages ({counts} names), and {n_stages} are needed, each with a name."
        )
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    known |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    unknown = [name for names in stages for name in names if name not in known]
    if unknown:
        raise HookError(
            f"pipeline_stages names {spell(map(repr, unknown[:3]))}, which {type(model).__name__} does not have. Name "
            "its parts as named_modules() and named_parameters() do."
        )
    for name, _ in model.named_parameters(remove_duplicate=False):
        of = [number for number, names in enumerate(stages) if is_held(name, names)]
        if len(of) != 1:
            wrong = f"in stages {spell(map(str, of))}" if of else "in no stage"
            raise HookError(
                f"pipeline_stages has the parameter {name!r} {wrong}. Name each parameter, or a part around it, in one "
                "stage."
            )
    for number, names in enumerate(stages):
        held = [p for name, p in model.named_parameters(remove_duplicate=False) if is_held(name, names)]
        if not any(p.requires_grad for p in held):
            raise ConfigError(
                f"stage {number} of the pipeline has no parameter that is trained ({', '.join(list(names)[:4])}), and "
                "its rank no optimizer. Say in pipeline_stages what each stage holds, with something to train in each."
            )


def view_of(module: nn.Module, names: Collection[str], prefix: str = "") -> nn.Module:
    """A module like `module` that has what `names` hold of it: the same parts, and a copy of what is around them."""
    view = shallow_copy(module)
    keep_only(view, names, prefix, copies=True)
    return view


def keep_only(module: nn.Module, names: Collection[str], prefix: str = "", *, copies: bool = False) -> None:
    """Removes all but `names` from `module` in place, or from copies of its children. Other buffers stay."""
    for name, _ in list(module.named_parameters(recurse=False, remove_duplicate=False)):
        if not is_held(f"{prefix}{name}", names):
            setattr(module, name, None)
    children = [(name, part) for name, part in module.named_modules(remove_duplicate=False) if name and "." not in name]
    for name, child in children:
        full_name = f"{prefix}{name}"
        if is_held(full_name, names):
            continue
        if isinstance(child, _LISTS) or _has_part(full_name, names):
            if copies:
                setattr(module, name, view_of(child, names, f"{full_name}."))
            else:
                keep_only(child, names, f"{full_name}.")
        elif isinstance(module, _CONTAINERS):
            delattr(module, name)
        else:
            setattr(module, name, None)


class NumberedAsWhole(Changed):
    """A ModuleList whose entries keep their numbers, whichever are left."""

    _called: str
    _stages: Sequence[str]

    def __getitem__(self, index: int | slice) -> Any:
        numbers = range(len(self._stages))
        if isinstance(index, slice):
            return nn.ModuleList(self._modules[str(n)] for n in numbers[index] if str(n) in self._modules)  # type: ignore[misc]
        number = numbers[operator.index(index)]  # raises as a list does
        return self._modules[str(number)] if str(number) in self._modules else self._refuse(number)

    def __setitem__(self, index: int, module: nn.Module) -> None:
        number = range(len(self._stages))[operator.index(index)]
        if str(number) not in self._modules:
            self._refuse(number)
        setattr(self, str(number), module)

    def __reversed__(self) -> Iterator[nn.Module]:
        return reversed(list(self))  # type: ignore[call-overload]

    def _refuse_another_length(self, *_: Any, **__: Any) -> NoReturn:
        raise StepError(
            f"{self._called} is a list of layers that stages of the pipeline share, and none can be added or removed "
            "once it is cut. Do it in configure_models."
        )

    append = insert = extend = pop = __delitem__ = __iadd__ = _refuse_another_length

    def _refuse(self, number: int) -> NoReturn:
        raise IndexError(
            f"{self._called}[{number}] is in stage {self._stages[number]} of the pipeline, and this rank has "
            f"{', '.join(self._modules) or 'none'} of {len(self._stages)}. Run through those that are there (`for "
            f"block in self.{self._called}`), or have pipeline_stages put what is needed together into one stage."
        )


def number_lists(model: nn.Module, stages: Sequence[Collection[str]]) -> None:
    """Has lists around the blocks of `model`, which is still whole, keep their numbers when it is cut."""
    held = [name for names in stages for name in names]
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(name.startswith(f"{around}.") for around in held):
            continue
        change_class(module, NumberedAsWhole)
        vars(module)["_called"] = name
        vars(module)["_stages"] = of_stages = []
        for part in (f"{name}.{number}" for number in range(len(module))):
            held = [str(n) for n, names in enumerate(stages) if is_held(part, names) or _has_part(part, names)]
            of_stages.append(" and ".join(held) or "none")


def _has_part(name: str, names: Collection[str]) -> bool:
    return any(held.startswith(f"{name}.") for held in names)


class Apart:
    """One micro-batch through the stages without a schedule, there and back, for `parallel/verify.py`."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self.group = pipeline, pipeline.messages.group
        self.has_output = pipeline.last in pipeline.own
        self._ran: list[tuple[int, tuple[Any, ...], tuple[Any, ...]]] = []  # a stage, its inputs and its outputs
        self._why = ""

    def there(self, *args: Any, **kwargs: Any) -> Any:
        """The last stage's outputs; ranks of other stages get tensors without values."""
        pipeline = self._pipeline
        with pipeline.running():
            outputs = list(pipeline.forward([(args, kwargs)], self._run))
        self._refuse_failures(HookError)
        form = [map_tensors(without_value, outputs[0])] if outputs else [None]
        last, device = pipeline.messages.last, pipeline.world.device
        dist.broadcast_object_list(form, group=self.group, group_src=last, device=device)
        return outputs[0] if outputs else form[0]

    def buffers(self, path: str) -> list[Tensor]:
        """Those that the stages of this rank have, which may be other ones."""
        found = [dict(stage.named_buffers()).get(path) for stage in self._pipeline.own.values()]
        return [buffer for buffer in found if buffer is not None]

    def _run(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if number > 0 and not args:  # the stage before has failed
            return ()
        pipeline, is_last = self._pipeline, number == self._pipeline.last
        if number > 0:
            args = tuple([value.detach().requires_grad_(value.requires_grad) for value in args])
        given = args if number == 0 else tuple([value.clone() for value in args])
        try:
            output = pipeline.output(number, given, kwargs)
        except WRONG as error:
            self._why = _cannot_run(pipeline, number, error, args)
            return ()
        if not is_last and not (as_tuple(output) and all(isinstance(part, Tensor) for part in as_tuple(output))):
            self._why = (
                f"{_called(pipeline, number)} gave the next one {_kinds(output)}, and only tensors cross. Return a "
                "tensor or a tuple of them to the next stage, and take them as its arguments."
            )
            return ()
        self._ran.append((number, args, () if is_last else as_tuple(output)))
        return output

    def back(self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor], gradients: Back) -> None:
        """Has `gradients` compute those of each stage of this rank."""
        pipeline, sent = self._pipeline, []
        stayed: dict[int, tuple[Tensor, ...]] = {}
        for number, args, gave in reversed(self._ran):
            if number < pipeline.last:
                after = pipeline.ranks[number + 1]
                is_here = after == pipeline.world.stage_rank
                outputs = [part for part in gave if part.requires_grad]
                cotangents = stayed.pop(number) if is_here else pipeline.messages.receive(after)
            trained = [value for value in args if isinstance(value, Tensor) and value.requires_grad] if number else []
            back: tuple[Tensor, ...] = ()  # of a stage that fails, and so of those before
            if not outputs or cotangents:
                back = self._gradients_of(trained, partial(gradients, outputs, cotangents, trained))
            if number > 0:
                before = pipeline.ranks[number - 1]
                if before == pipeline.world.stage_rank:
                    stayed[number - 1] = back
                else:
                    sent += pipeline.messages.send(back, before)
        for work, _ in sent:
            work.wait()
        self._refuse_failures(RuntimeError)

    def _gradients_of(self, inputs: Sequence[Tensor], run: Callable[[], Sequence[Tensor | None]]) -> tuple[Tensor, ...]:
        try:
            with as_one_backward(self._pipeline.wrapped, reduces=False):
                found = run()
        except RuntimeError as error:
            self._why = str(error)
            return ()
        pairs = zip(found, inputs, strict=True)
        given: list[tuple[Any, Tensor]] = [(torch.zeros_like(of) if g is None else g, of) for g, of in pairs]
        return tuple([g.redistribute(placements=of.placements) if is_dtensor(of) else g for g, of in given])

    def _refuse_failures(self, kind: type[Exception]) -> None:
        whys = [why for why in all_gather_objects(self._why, self.group) if why]
        if whys:
            raise kind(whys[0])


def _called(pipeline: Pipeline, number: int) -> str:
    held, model = pipeline.stages.names[number], own_class(pipeline.model).__name__
    names = ", ".join(held[:4]) + (f", ... {held[-1]}" if len(held) > 4 else "")
    return f"stage {number} of {pipeline.last + 1} of {model} ({names})"


def _cannot_run(pipeline: Pipeline, number: int, error: Exception, given: tuple[Any, ...]) -> str:
    frame = failing_frame(error)
    line = "" if frame is None else f", at {line_of(frame[0].f_code, frame[1])}"
    giver = f" by stage {number - 1}" if number else ""
    others_cross = (
        " Other values that a later stage needs, such as one end of a skip connection, must be passed too: return "
        "both, `return x, skip`, and take both as arguments, or have pipeline_stages put its ends into one stage."
    )
    return (
        f"{_called(pipeline, number)} cannot run: {type(error).__name__}: {str(error).rstrip('.')}{line}. It is "
        f"given {_kinds(given)}{giver}. Lists of layers omit other stages' layers, and other names are None: have "
        f"its forward check, `if self.embedding is not None: ...`.{others_cross if number else ''}"
    )


def _kinds(values: Any) -> str:
    if isinstance(values, Tensor):
        return f"a tensor of shape {list(values.shape)}"
    if isinstance(values, tuple | list):
        return _kinds(values[0]) if len(values) == 1 else f"({', '.join(map(_kinds, values))})"
    return f"a {type(values).__name__}"
