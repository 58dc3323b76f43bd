"""Whether a model computes of a part of each sequence what it does of whole ones, found out by values.

What mixes positions is told by the functions that a step calls (modules/position_checks.py), and some of it cannot be
told. Here a model's first forward in training is run once more on whole sequences, in evaluation and without gradients,
and what its blocks and it itself give is compared, position by position.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dream_trainer.data.nested import leaves, map_tensors
from dream_trainer.distributed.seeds import preserved_random_state
from dream_trainer.errors import ConfigError, StepError
from dream_trainer.modules.precision import half_dtype
from dream_trainer.modules.sharding import fsdp_modules
from dream_trainer.trainer.step.rerun import MovedByForward

if TYPE_CHECKING:
    from dream_trainer.config.device_parameters import DeviceParameters
    from dream_trainer.modules.attention_takeover import AttentionTakeover
    from dream_trainer.trainer.abstract import AbstractTrainer

_TF32 = 2.0**-10
"""Between a number and the next, where float32 products of a GPU may be made of fewer digits."""


class SequenceComparison:
    """Compares each model once, in its first forward within a training step.

    Args:
        trainer: Its models, blocks and ranks are used.
        takeover: On while a step runs.
    """

    def __init__(self, trainer: AbstractTrainer, takeover: AttentionTakeover) -> None:
        self._trainer, self._takeover, self._attention = trainer, takeover, takeover.attention
        self._waiting: dict[nn.Module, RemovableHandle] = {
            model: model.register_forward_pre_hook(
                partial(self._before_forward, f"self.{name}"), prepend=True, with_kwargs=True
            )
            for name, model in trainer.named_models().items()
        }

    def _before_forward(self, name: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._trainer.training or not self._takeover.is_on():
            return
        self._waiting.pop(model).remove()
        moved = MovedByForward(self._trainer)
        with _in_evaluation(model):
            errors = self._compare(name, model, args, kwargs)
        moved.put_back()
        for module in fsdp_modules(model):
            module.reshard()
        self._judge(name, errors)

    def _compare(
        self, name: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, tuple[float, float]]:
        """How far what each block gives is from what it should be, and how far it may be, in the order they ran."""
        blocks = {} if self._trainer.world.mesh_shape.tp > 1 else self._blocks(name, model)  # these give what is cut
        places = blocks | {f"the output of {name}": model}
        parts = _Outputs(places)
        self._run(model, args, kwargs, parts, nullcontext())
        errors: dict[str, tuple[float, float]] = {}

        def look(place: str, output: Any) -> None:
            given = parts.of[place].pop(0) if parts.of.get(place) else ()
            for part, whole in zip(leaves(given), leaves(output), strict=False):
                error = self._error(part, whole)
                if error is not None:
                    errors[place] = max(error, errors.get(place, error))

        whole_args, whole_kwargs = map_tensors(self._whole, (args, kwargs))
        wholes = _Outputs(places, look)
        try:
            self._run(model, whole_args, whole_kwargs, wholes, self._takeover.aside())
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise StepError(
                f"compare_first_forward ran {name} on whole sequences, which were put together from what ranks have "
                f"(along the first dimension of a part's length, {sorted(self._attention.lengths)}), and that failed: "
                f"{type(error).__name__}: {error} Give the model tensors that hold positions in a dimension after the "
                "batch, of which no other is as large; or leave the comparison out."
            ) from error
        return errors

    def _run(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        outputs: _Outputs,
        within: AbstractContextManager[Any],
    ) -> None:
        with preserved_random_state(self._trainer.world.device), torch.no_grad(), within, outputs.kept():
            model(*args, **kwargs)

    def _blocks(self, name: str, model: nn.Module) -> dict[str, nn.Module]:
        names = {module: place for place, module in model.named_modules()}
        return {f"{name}.{names[block]}": block for block in self._trainer.model_blocks(model) if block is not model}

    def _whole(self, tensor: Tensor) -> Tensor:
        """The whole of what a rank has a part of, told by its shape."""
        rows, lengths = self._attention.shapes.rows, self._attention.lengths
        dims = [dim for dim, size in enumerate(tensor.shape) if size in lengths and (dim > 0 or size != rows)]
        return self._attention.parts.joined(tensor, dims[0]) if dims else tensor

    def _error(self, part: Any, whole: Any) -> tuple[float, float] | None:
        """Over the largest value, and how much of rounding there may be; None of what has no positions."""
        if not isinstance(part, Tensor) or not isinstance(whole, Tensor) or not part.is_floating_point():
            return None
        part, whole = _plain(part), _plain(whole)
        if part.ndim != whole.ndim:
            return None
        size = self._attention.parts.size
        longer = [dim for dim in range(part.ndim) if whole.shape[dim] != part.shape[dim]]
        if len(longer) != 1 or whole.shape[longer[0]] != size * part.shape[longer[0]]:
            return None
        expected = self._attention.parts.cut(whole, longer[0])
        is_same = (part == expected) | (part.isnan() & expected.isnan())
        error = (part - expected).abs().masked_fill(is_same, 0).max()
        largest = expected.abs().masked_fill(~expected.isfinite(), 0).max().clamp(min=torch.finfo(part.dtype).tiny)
        return float((error / largest).nan_to_num(nan=torch.inf)), self._tolerance(part)

    def _tolerance(self, part: Tensor) -> float:
        half = half_dtype(self._trainer.config.device_parameters)
        eps = max(torch.finfo(part.dtype).eps, 0.0 if half is None else torch.finfo(half).eps)
        if part.dtype == torch.float32 and part.device.type != "cpu":
            eps = max(eps, _TF32)
        return float(eps**0.5)

    def _judge(self, name: str, errors: Mapping[str, tuple[float, float]]) -> None:
        """Raises on all ranks what one of them finds."""
        everybody: list[Mapping[str, tuple[float, float]]] = self._trainer.world.all_gather_object(errors)
        worst: dict[str, tuple[float, float]] = {}
        for place, error in (item for rank in everybody for item in rank.items()):
            worst[place] = max(error, worst.get(place, error))
        if not worst:
            self._trainer.warn_once(
                f"comparison of {name}",
                f"compare_first_forward found nothing with positions in what {name} gives, and compared nothing.",
            )
            return
        first = next((place for place, (error, tolerance) in worst.items() if error > tolerance), None)
        if first is None:
            if self._trainer.world.is_main:
                largest = max(error for error, _ in worst.values())
                print(
                    f"{name} computes of parts of sequences what it does of whole ones, within {largest:.1e} of the "
                    "largest value (compare_first_forward)",
                    file=sys.stderr,
                )
            return
        how_far, tolerance = worst[first]
        raise StepError(
            f"under context_parallel={self._attention.parts.size} {name} computes other values than of whole "
            f"sequences: first {first}, by {how_far:.1e} of its largest value, where rounding makes up to "
            f"{tolerance:.1e}. Something in it, or between the block before and it, looks at other positions than its "
            "own, or counts them, within this rank's part (docs/context-parallel.md has what does); or it draws random "
            "numbers in evaluation, too. Have it computed in the loader or in cut_batch, or train with "
            "context_parallel=1."
        )


def refuse_beside(devices: DeviceParameters) -> None:
    """Raises ConfigError where no rank has a whole model to run, or parts are scaled by their own values."""
    beside = {
        f"pipeline_parallel={devices.pipeline_parallel}": devices.pipeline_parallel > 1,
        f'float8="{devices.float8}"': devices.float8 != "none",
    }
    for what, is_asked_for in beside.items():
        if is_asked_for:
            raise ConfigError(
                f"compare_first_forward=True with {what}, where a forward of parts cannot be compared with one of "
                "whole sequences. Compare once without it, and train with it."
            )


class _Outputs:
    """What modules give, in the order in which they ran.

    Args:
        places: The modules, by what they are called.
        look: Told of each output; None: they are kept.

    Attributes:
        of: What each place has given.
    """

    def __init__(self, places: Mapping[str, nn.Module], look: Callable[[str, Any], None] | None = None) -> None:
        self.of: dict[str, list[Any]] = {}
        self._places, self._look = places, look or self._keep

    def _keep(self, place: str, output: Any) -> None:
        copied = map_tensors(torch.clone, output)  # the next block may write into it
        self.of.setdefault(place, []).append(copied)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, outputs are noted."""
        handles = [
            module.register_forward_hook(partial(self._note, place), prepend=False)
            for place, module in self._places.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, place: str, _module: nn.Module, _args: Any, output: Any) -> None:
        self._look(place, output)


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _plain(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
