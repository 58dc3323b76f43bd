"""Whether the stages of a pipeline together compute what the whole model does, found out on meta, without values.

Each rank compares which operations made the outputs of which tensors, so all find the same before anything is sent.
"""

from __future__ import annotations

import copy
import inspect
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer.compat.computation import Computation, on_meta, tensor_names
from dream_trainer.compat.pipelining import as_tuple
from dream_trainer.compat.pytorch import write_count
from dream_trainer.distributed.seeds import preserved_random_state
from dream_trainer.errors import HookError
from dream_trainer.nested import leaves, map_tensors
from dream_trainer.parallel.pipeline_stages import keep_only
from dream_trainer.parallel.sharding import is_held
from dream_trainer.parallel.verify import copied_without_values
from dream_trainer.users_code import failing_frame, line_of, running_line

_CROSS = (
    "What a later stage needs beside, such as one end of a skip connection, has to cross as well: return both, `return "
    "x, skip`, and take both as arguments, or have pipeline_stages put its ends into one stage."
)


class StageCheck:
    """A copy of a model without values, to compare its stages with."""

    def __init__(self, model: nn.Module, stages: Sequence[Sequence[str]]) -> None:
        self._stages = stages
        self._name = type(model).__name__
        try:
            self._model: nn.Module | None = copied_without_values(model)
        except (RuntimeError, TypeError):  # something in it cannot be copied
            self._model = None

    def run(self, inputs: tuple[tuple[Any, ...], Mapping[str, Any]], warn: Callable[[str], None]) -> None:
        positional, named = map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), inputs)
        names = {leaf: f"input {n}" for n, leaf in enumerate(leaves((positional, named))) if isinstance(leaf, Tensor)}
        whole, expected, why = Computation(running_line), None, "it cannot be copied"
        if self._model is not None:
            whole.name(tensor_names(self._model) | names)
            try:
                with preserved_random_state(), torch.no_grad(), on_meta(), whole:
                    expected = self._model(*positional, **named)
            except Exception as error:  # whatever a model does that needs values
                why = f"{type(error).__name__}: {error}"
        if self._model is None or expected is None:
            warn(
                f"whether the stages of {self._name} compute what the whole model does could not be compared, since it "
                f"does not run without values ({why}). Compare the first loss and gradient norm with those of "
                "pipeline_parallel=1."
            )
            return
        chain = Computation(running_line)
        chain.name(names)
        args: tuple[Any, ...] = positional
        output: Any = None
        begun: list[int] = []
        for number, held in enumerate(self._stages):
            stage = copy.deepcopy(self._model)
            chain.name(tensor_names(stage))
            keep_only(stage, held)
            before = _around(stage, held)
            begun.append(len(chain.operations))
            try:
                with preserved_random_state(), torch.no_grad(), on_meta(), chain:
                    output = stage(*args, **named)
            except (TypeError, AttributeError, KeyError, IndexError, RuntimeError, ValueError) as error:
                raise HookError(self._cannot_run(number, stage, error, args)) from error
            if number < len(self._stages) - 1 and not all(isinstance(part, Tensor) for part in as_tuple(output)):
                raise HookError(
                    f"{self._called(number)} gave the next one {_kinds(output)}, and only tensors cross. Return a "
                    "tensor or a tuple of them to the next stage, and take them as its arguments."
                )
            changed = [name for name, value in _around(stage, held).items() if before.get(name) != value]
            if changed:
                raise HookError(
                    f"stage {number} of {len(self._stages)} of {self._name} changes {', '.join(changed[:3])} in its "
                    "forward, which belongs to what is around the layers: each stage has its own, and checkpoints that "
                    "of the first. Keep it in a module that one stage holds."
                )
            args, named = as_tuple(output), {}
        if _numbers(chain, output) != _numbers(whole, expected):
            raise HookError(
                f"the stages of {self._name} together do not compute what the whole model does, but "
                f"{_difference(chain, whole, begun)}. Have each stage's forward do what belongs to the layers that it "
                "holds, and nothing else: what is neither asked for nor a layer is done in each, and a position in a "
                f"list of layers is that in the stage. {_CROSS}"
            )

    def _called(self, number: int) -> str:
        held = self._stages[number]
        names = ", ".join(held[:4]) + (f", ... {held[-1]}" if len(held) > 4 else "")
        return f"stage {number} of {len(self._stages)} of {self._name} ({names})"

    def _cannot_run(self, number: int, stage: nn.Module, error: Exception, given: tuple[Any, ...]) -> str:
        frame = failing_frame(error)
        code = inspect.unwrap(type(stage).forward).__code__
        line = line_of(code, code.co_firstlineno) if frame is None else line_of(frame[0].f_code, frame[1])
        giver, cross = (f" by stage {number - 1}", f" {_CROSS}") if number else ("", "")
        return (
            f"{self._called(number)} cannot run: {type(error).__name__}: {str(error).rstrip('.')}, at {line}. It is "
            f"given {_kinds(given)}{giver}. Of what other stages hold, lists of layers have nothing and other names "
            f"are None: have its forward ask, `if self.embedding is not None: ...`.{cross}"
        )


def _difference(chain: Computation, whole: Computation, begun: Sequence[int]) -> str:
    """What the stages, which began with these numbers of operations, do otherwise, in words."""
    missing = [done for value, done in whole.operations.items() if value not in chain.operations]
    instead = f", where the whole model does {missing[0][0]}, at {missing[0][1]}" if missing else ""
    for place, (value, (operation, line)) in enumerate(chain.operations.items()):
        if value not in whole.operations:
            stage = bisect_right(begun, place) - 1
            return f"{operation} of something that it does not, first in stage {stage}, at {line}{instead}"
    return f"not all that it does{instead}"


def _kinds(values: Any) -> str:
    if isinstance(values, Tensor):
        return f"a tensor of shape {list(values.shape)}"
    if isinstance(values, tuple | list):
        return _kinds(values[0]) if len(values) == 1 else f"({', '.join(map(_kinds, values))})"
    return f"a {type(values).__name__}"


def _numbers(computation: Computation, output: Any) -> list[int]:
    return [computation.number_of(leaf) for leaf in leaves(output) if isinstance(leaf, Tensor)]


def _around(stage: nn.Module, held: Sequence[str]) -> dict[str, Any]:
    """Of the modules that every stage has: which tensor each buffer is, how often written to, and their numbers."""
    found: dict[str, Any] = {}
    for prefix, module in stage.named_modules():
        if is_held(prefix, held):
            continue
        dot = f"{prefix}." if prefix else ""
        found |= {f"{dot}{n}": (id(b), write_count(b)) for n, b in module.named_buffers(recurse=False)}
        found |= {f"{dot}{n}": value for n, value in vars(module).items() if isinstance(value, int | float)}
    return found
