"""Whether a model whose layers, sequences or experts ranks share computes what it does in one piece, by its values.

Some of what goes wrong there cannot be told from outside: attention of a model's own that sees one rank's positions
alone, heads that a forward counts by the config, a plan that leaves a sum out. So a model's first forward in training
is run twice more, in evaluation and without gradients: as it is, and whole, on whole sequences. What blocks and the
model give is compared, position by position.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dream_trainer.distributed.seeds import preserved_random_state
from dream_trainer.errors import ConfigError, StepError
from dream_trainer.modules.forward_state import as_before, in_evaluation
from dream_trainer.modules.precision import half_dtype
from dream_trainer.modules.sharding import fsdp_modules
from dream_trainer.modules.whole_copies import copied_without_values, plain, run_with_values_of
from dream_trainer.nested import leaves, map_tensors
from dream_trainer.screen import show

if TYPE_CHECKING:
    from dream_trainer.config.device_parameters import DeviceParameters
    from dream_trainer.trainer.abstract import AbstractTrainer

_TF32 = 2.0**-10
"""Between a number and the next, where float32 products of a GPU may be made of fewer digits."""
_WRONG = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)


class Miss(NamedTuple):
    """How far a tensor is from what it should be, where it is worst, or in half precision on average."""

    error: float
    rounding: float
    """How far it may be."""

    @property
    def is_wrong(self) -> bool:
        """Whether it is more than rounding."""
        return self.error > self.rounding


def shares_forwards(devices: DeviceParameters) -> bool:
    """Whether ranks share layers, sequences or experts, so that there is something to compare."""
    return devices.tensor_parallel * devices.context_parallel * devices.expert_parallel > 1


class ForwardComparison:
    """Compares each model once, in its first forward within a training step.

    Raises:
        ConfigError: A model cannot be copied.
    """

    def __init__(self, trainer: AbstractTrainer) -> None:
        self._trainer = trainer
        devices = trainer.config.device_parameters
        self._wholes: dict[str, nn.Module] = {}
        self._waiting: dict[str, RemovableHandle] = {}
        self._attributes: dict[str, dict[str, dict[str, Any]]] = {}
        if devices.tensor_parallel * devices.expert_parallel == 1:
            return  # models stay as they are but for shards, which a forward gathers
        for name, model in trainer.named_models().items():
            try:
                self._wholes[name] = copied_without_values(model)
            except (RuntimeError, TypeError) as error:
                raise ConfigError(
                    f"compare_first_forward=True needs a copy of self.{name}, which cannot be made: {error}. Leave it "
                    "out, and compare the first loss with that of one process."
                ) from error

    def begin(self) -> None:
        """Models are as they will be trained."""
        for name, model in self._trainer.named_models().items():
            self._attributes[name] = {place: dict(vars(module)) for place, module in model.named_modules()}
            hook = partial(self._before_forward, name)
            self._waiting[name] = model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def _before_forward(self, name: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trainer = self._trainer
        is_in_step = trainer.training and trainer.accumulation_window.is_open
        if not is_in_step or (trainer._takeover is not None and not trainer._takeover.is_on()):
            return
        self._waiting.pop(name).remove()
        with in_evaluation([model]), torch.no_grad():
            misses = self._compare(name, model, args, kwargs)
        for module in fsdp_modules(model):
            module.reshard()
        self._judge(f"self.{name}", misses)

    def _compare(self, name: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Miss]:
        """Of what each block gives, in the order in which they run, and of what the model does."""
        takeover, whole = self._trainer._takeover, self._wholes.pop(name, model)
        names = {module: place for place, module in model.named_modules()}
        blocks = [names[block] for block in self._trainer.model_blocks(model) if block is not model]
        own, others = dict(model.named_modules()), dict(whole.named_modules())
        told = {f"self.{name}.{block}": block for block in blocks} | {f"the output of self.{name}": ""}
        parts = _Outputs({place: own[block] for place, block in told.items()})
        device = self._trainer.world.device
        with parts.noted(), preserved_random_state(device), as_before(model):
            own_args, own_kwargs = map_tensors(torch.clone, (args, kwargs))  # a forward may take out, or write
            model(*own_args, **own_kwargs)
        misses: dict[str, Miss] = {}

        def look(place: str, output: Any) -> None:
            given = parts.of[place].pop(0) if parts.of.get(place) else ()
            for part, expected in zip(leaves(given), leaves(output), strict=False):
                miss = self._miss(part, expected)
                if miss is not None:
                    misses[place] = max(miss, misses.get(place, miss))

        whole_args, whole_kwargs = map_tensors(lambda tensor: self._of_whole_sequence(tensor).clone(), (args, kwargs))
        self._give_what_was_set_since(name, model, whole)
        wholes = _Outputs({place: others[block] for place, block in told.items()}, look)
        try:
            aside = nullcontext() if takeover is None else takeover.aside()
            with aside, wholes.noted(), in_evaluation([whole]), preserved_random_state(device), as_before(model):
                if whole is model:
                    model(*whole_args, **whole_kwargs)
                else:
                    run_with_values_of(model, whole, whole_args, whole_kwargs, device)
        except _WRONG as error:
            self._say_what_failed(f"self.{name}", error)
        return misses

    def _give_what_was_set_since(self, name: str, own: nn.Module, whole: nn.Module) -> None:
        """Gives the copy what was set on modules in training; what a plan has set on them is of their part."""
        for place, before in self._attributes.pop(name).items():
            now = vars(own.get_submodule(place))
            changed = {key: value for key, value in now.items() if key not in before or value is not before[key]}
            vars(whole.get_submodule(place)).update({k: v for k, v in changed.items() if not k.startswith("_")})

    def _say_what_failed(self, name: str, error: Exception) -> None:
        takeover = self._trainer._takeover
        put_together = (
            ""
            if takeover is None
            else (
                ", on what was put together from what ranks have, along the first dimension after the batch of "
                f"{sorted(takeover.attention.lengths)} positions"
            )
        )
        raise StepError(
            f"compare_first_forward ran {name} in one piece{put_together}, and that failed: {type(error).__name__}: "
            f"{error} Give the model tensors alone that are a part of such, and no mask that was made for a part; or "
            "leave the comparison out."
        ) from error

    def _of_whole_sequence(self, tensor: Tensor) -> Tensor:
        """The whole of what a rank has a part of, told by its shape."""
        takeover = self._trainer._takeover
        if takeover is None:
            return tensor
        attention = takeover.attention
        dims = [dim for dim, size in enumerate(tensor.shape) if size in attention.lengths]
        if dims and (dims[0] > 0 or tensor.shape[0] != attention.shapes.rows):
            return attention.parts.joined(tensor, dims[0])
        if len(dims) > 1:
            return attention.parts.joined(tensor, dims[1])
        if not dims:
            return tensor
        # One for each sample, or for each of as many positions, of which ranks have others.
        whole = attention.parts.joined(tensor, 0)
        return tensor if torch.equal(whole, attention.parts.as_if_alike(tensor, 0)) else whole

    def _miss(self, part: Any, whole: Any) -> Miss | None:
        """None of what cannot be compared."""
        if not isinstance(part, Tensor) or not isinstance(whole, Tensor):
            return None
        if not part.is_floating_point() or part.numel() == 0:
            return None
        part, whole = plain(part), plain(whole)
        expected = self._own_part(whole, part.shape)
        if expected is None:
            return None
        rounding = self._rounding(part)
        if torch.finfo(part.dtype).bits < 32:
            part, expected = part.float(), expected.float()
        is_same = (part == expected) | (part.isnan() & expected.isnan())
        missed = (part - expected).masked_fill(is_same, 0).abs()
        sizes = expected.abs().nan_to_num(posinf=0.0)
        # Over its own size or a usual one: beside few very large values, as of masked logits, all would look alike.
        known = sizes[sizes > 0]
        usual = known.kthvalue(len(known) // 4 + 1).values if len(known) else torch.finfo(part.dtype).tiny
        shares = missed / sizes.clamp(min=usual)
        # In half precision, where experts are chosen by a near tie now and then, not by the worst of all.
        is_exact = half_dtype(self._trainer.config.device_parameters) is None
        share = shares.max() if is_exact else shares.square().mean().sqrt()
        return Miss(float(share.nan_to_num(nan=torch.inf)), rounding)

    def _own_part(self, whole: Tensor, shape: torch.Size) -> Tensor | None:
        """What of it this rank should have, which is of `shape`; None if that cannot be told."""
        if whole.ndim != len(shape):
            return None
        longer = [dim for dim in range(whole.ndim) if whole.shape[dim] != shape[dim]]
        world, takeover = self._trainer.world, self._trainer._takeover
        if not longer and takeover is None:
            return whole
        if len(longer) != 1 or world.mesh is None:
            return None
        (dim,), tensors = longer, world.mesh_shape.tp
        own = shape[dim]
        if takeover is not None:
            parts, rows, lengths = takeover.attention.parts, takeover.attention.shapes.rows, takeover.attention.lengths
            lengths = lengths | {length // tensors for length in lengths}
            if own not in lengths:  # a batch that is flattened with its positions, as logits are for a loss
                if own % rows or own // rows not in lengths or whole.shape[dim] % rows:
                    return None
                of_rows = self._own_part(
                    whole.unflatten(dim, (rows, -1)), torch.Size((*shape[:dim], rows, own // rows, *shape[dim + 1 :]))
                )
                return None if of_rows is None else of_rows.flatten(dim, dim + 1)
            if whole.shape[dim] % (parts.size * own):
                return None
            whole = parts.cut(whole, dim)
        if whole.shape == shape:
            return whole
        # Between layers each rank that shares them may have a part of the sequence; of what is first it is not known.
        if dim == 0 or whole.shape[dim] != tensors * own:
            return None
        return whole.narrow(dim, world.mesh["tp"].get_local_rank() * own, own)

    def _rounding(self, part: Tensor) -> float:
        half = half_dtype(self._trainer.config.device_parameters)
        eps = max(torch.finfo(part.dtype).eps, 0.0 if half is None else torch.finfo(half).eps)
        if part.dtype == torch.float32 and part.device.type != "cpu":
            eps = max(eps, _TF32)
        return float(eps**0.5)

    def _judge(self, name: str, misses: Mapping[str, Miss]) -> None:
        """Raises on all ranks that shared the forward what one of them finds; others may not have run it."""
        if not misses:
            self._trainer.warn_once(
                f"comparison of {name}",
                f"compare_first_forward found nothing in what {name} gives that could be compared.",
            )
            return
        worst = dict(zip(misses, self._worst_of_ranks(list(misses.values())), strict=True))
        first = next((place for place, miss in worst.items() if miss.is_wrong), None)
        if first is not None:
            self._refuse(name, first, worst[first])
        if self._trainer.world.is_main:
            largest = max(miss.error for miss in worst.values())
            show(
                f"{name} computes on {self._trainer.world.world_size} ranks what it does in one piece, within "
                f"{largest:.1e} of its size (compare_first_forward)",
                sys.stderr,
            )

    def _worst_of_ranks(self, misses: Sequence[Miss]) -> list[Miss]:
        import torch.distributed as dist

        world = self._trainer.world
        assert world.mesh is not None  # ranks share something
        worst = torch.tensor(misses, dtype=torch.float64, device=world.device)
        for dimension in ("cp", "tp"):
            if world.mesh[dimension].size() > 1:
                dist.all_reduce(worst, dist.ReduceOp.MAX, group=world.mesh[dimension].get_group())
        return [Miss(*values) for values in worst.tolist()]

    def _refuse(self, name: str, place: str, miss: Miss) -> None:
        devices = self._trainer.config.device_parameters
        sizes = {
            "context_parallel": devices.context_parallel,
            "expert_parallel": devices.expert_parallel,
            "tensor_parallel": devices.tensor_parallel,
        }
        mesh = " and ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        causes = []
        if devices.context_parallel > 1:
            causes.append(
                "looks at other positions than its own within this rank's part, or counts them "
                "(docs/context-parallel.md has what does)"
            )
        if devices.tensor_parallel > 1:
            causes.append(
                "counts heads or widths by the config, or is cut by a plan that does not give its layers what they "
                "expect (docs/tensor-parallel.md)"
            )
        if devices.expert_parallel > 1:
            causes.append("sends tokens to other experts")
        raise StepError(
            f"under {mesh} {name} computes other values than in one piece: first {place}, by {miss.error:.1e} of its "
            f"size, where rounding makes up to {miss.rounding:.1e}. Something in it, or between the block "
            f"before and it, {'; or '.join(causes)}; or draws random numbers in evaluation, too."
        )


class _Outputs:
    """What modules give, in the order in which they ran."""

    def __init__(self, places: Mapping[str, nn.Module], look: Callable[[str, Any], None] | None = None) -> None:
        self.of: dict[str, list[Any]] = {}
        self._places, self._look = places, look or self._keep

    def _keep(self, place: str, output: Any) -> None:
        copied = map_tensors(torch.clone, output)  # the next block may write into it
        self.of.setdefault(place, []).append(copied)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, outputs are."""
        handles = [module.register_forward_hook(partial(self._note, place)) for place, module in self._places.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, place: str, _module: nn.Module, _args: Any, output: Any) -> None:
        self._look(place, output)
