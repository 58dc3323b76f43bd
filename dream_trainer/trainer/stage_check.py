"""Whether the stages of a pipeline together compute what the whole model does, found out on meta, without values.

Each rank runs the whole model and then stage after stage, once, and compares which operations made the outputs of which
tensors: so all ranks find the same, before the first of them has sent anything.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer.compat.computation import Computation, on_meta, tensor_names
from dream_trainer.compat.pipelining import as_tuple
from dream_trainer.compat.pytorch import write_count
from dream_trainer.data.nested import leaves, map_tensors
from dream_trainer.distributed.seeds import preserved_random_state
from dream_trainer.errors import HookError
from dream_trainer.modules.cut_models import is_held
from dream_trainer.modules.pipeline_stages import keep_only


class StageCheck:
    """A copy of a model without values, to compare its stages with.

    Args:
        model: The whole model, before it is cut.
        stages: The names that each stage holds.
    """

    def __init__(self, model: nn.Module, stages: Sequence[Sequence[str]]) -> None:
        self._stages = stages
        self._name = type(model).__name__
        without_values: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            without_values[id(tensor)] = _without_values(tensor)
        try:
            self._model: nn.Module | None = copy.deepcopy(model, without_values)
        except (RuntimeError, TypeError):  # something in it cannot be copied
            self._model = None

    def run(self, inputs: tuple[tuple[Any, ...], Mapping[str, Any]], warn: Callable[[str], None]) -> None:
        """Compares, for a micro-batch.

        Args:
            inputs: Positional and named arguments of the model.
            warn: Called with what to say if the whole model cannot run without values.

        Raises:
            HookError: A stage cannot run, or computes something else than the whole model.
        """
        positional, named = map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), inputs)
        names = {leaf: f"input {n}" for n, leaf in enumerate(leaves((positional, named))) if isinstance(leaf, Tensor)}
        whole, expected, why = Computation(), None, "it cannot be copied"
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
        chain = Computation()
        chain.name(names)
        args: tuple[Any, ...] = positional
        output: Any = None
        for number, held in enumerate(self._stages):
            stage = copy.deepcopy(self._model)
            chain.name(tensor_names(stage))
            keep_only(stage, held)
            before = _around(stage, held)
            try:
                with preserved_random_state(), torch.no_grad(), on_meta(), chain:
                    output = stage(*args, **named)
            except (TypeError, AttributeError, KeyError, IndexError, RuntimeError, ValueError) as error:
                raise HookError(self._cannot_run(number, f"{type(error).__name__}: {error}")) from error
            if number < len(self._stages) - 1 and not all(isinstance(part, Tensor) for part in as_tuple(output)):
                raise HookError(self._cannot_run(number, f"it gave the next one a {type(output).__name__}"))
            changed = [name for name, value in _around(stage, held).items() if before.get(name) != value]
            if changed:
                raise HookError(
                    f"stage {number} of {len(self._stages)} of {self._name} changes {', '.join(changed[:3])} in its "
                    "forward, which belongs to what is around the layers: each stage has its own, and checkpoints that "
                    "of the first. Keep it in a module that one stage holds."
                )
            args, named = as_tuple(output), {}
        if _numbers(chain, output) != _numbers(whole, expected):
            others = [operation for value, operation in chain.operations.items() if value not in whole.operations]
            what = f"{others[0]} of something that it does not" if others else "not all that it does"
            raise HookError(
                f"the stages of {self._name} together do not compute what the whole model does, but {what}. Have each "
                "stage's forward do what belongs to the layers that it holds, and nothing else: a position in a list "
                "of layers is that in the stage, and what is neither asked for nor a layer is done in each."
            )

    def _cannot_run(self, number: int, why: str) -> str:
        held = self._stages[number]
        names = ", ".join(held[:4]) + (f", ... {held[-1]}" if len(held) > 4 else "")
        return (
            f"stage {number} of {len(self._stages)} of {self._name} ({names}) cannot run: {why}. Of what other stages "
            "hold, lists of layers have nothing and other names are None: have its forward ask, `if self.embedding is "
            "not None: ...`, return a tensor or a tuple of them to the next stage, and take them as its arguments."
        )


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


def _without_values(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
