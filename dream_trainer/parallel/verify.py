"""Verification in the first training step: ranks that share a model compute what one process does.

Before its first forward in training each model runs twice in evaluation mode: as it is, and as one process would, on
whole sequences and with whole weights, which are gathered block by block. Block outputs and parameter gradients are
compared before any weight changes.
"""

from __future__ import annotations

import copy
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.autograd import Function
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from dream_trainer.compat.pytorch import (
    default_generator_of,
    is_dtensor,
    local_tensor,
    shard_dim,
    with_local,
    without_hooks,
)
from dream_trainer.distributed.seeds import WatchedSeeds, preserved_random_state, seed_device
from dream_trainer.errors import StepError
from dream_trainer.modules.forward_state import ForwardState, as_before, in_evaluation
from dream_trainer.modules.precision import half_dtype, without_autocast
from dream_trainer.nested import leaves, map_tensors
from dream_trainer.parallel.expert_exchange import is_shared_by_experts
from dream_trainer.parallel.sharding import dim_of_part, fsdp_modules
from dream_trainer.screen import show

if TYPE_CHECKING:
    from dream_trainer.config.device_parameters import DeviceParameters
    from dream_trainer.distributed.world import World
    from dream_trainer.parallel.context_attention import AttentionTakeover

_TF32 = 2.0**-10  # between a number and the next, where float32 products of a GPU may be made of fewer digits
_SMALL = 0.05  # of a model's largest gradient: what smaller ones are measured by, as those that should be 0
_N_SKETCHES = 32
_DRAWS = "random numbers"  # the place of a difference that says whether a forward drew some
_WRONG = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)


class Miss(NamedTuple):
    """The difference of a tensor from its expected value: the largest, or in half precision the mean one."""

    error: float
    rounding: float  # the largest difference that is taken for rounding
    own: float
    whole: float  # the expected value; of a gradient both are about its root mean square

    @property
    def is_wrong(self) -> bool:
        return self.error > self.rounding


def is_verifiable(devices: DeviceParameters) -> bool:
    """Whether ranks share layers, sequences or experts, and a whole forward can be run to compare with."""
    is_shared = devices.tensor_parallel * devices.context_parallel * devices.expert_parallel > 1
    return devices.verify and is_shared and devices.pipeline_parallel == 1 and devices.float8 == "none"


@dataclass(eq=False, repr=False)
class Verification:
    """Compares each model once, before its first forward in a training step."""

    models: Mapping[str, nn.Module]
    blocks_of: Callable[[nn.Module], Sequence[nn.Module]]
    devices: DeviceParameters
    world: World
    warn_once: Callable[[str, str], None]
    is_in_step: Callable[[], bool]
    takeover: Callable[[], AttentionTakeover | None]

    def __post_init__(self) -> None:
        self._wholes: dict[str, nn.Module] = {}
        self._waiting: dict[str, RemovableHandle] = {}
        self._attributes: dict[str, dict[str, dict[str, Any]]] = {}
        for name, model in self.models.items():
            try:
                self._wholes[name] = copied_without_values(model)
            except (RuntimeError, TypeError) as error:
                self._cannot(name, f"it cannot be copied ({error})")

    def begin(self) -> None:
        """Waits for the first forward of each model; they are parallelised by now."""
        for name, model in self.models.items():
            if name in self._wholes:
                self._attributes[name] = {place: dict(vars(module)) for place, module in model.named_modules()}
                hook = partial(self._before_forward, name)
                self._waiting[name] = model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def _before_forward(self, name: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        takeover = self.takeover()
        if not self.is_in_step() or (takeover is not None and not takeover.is_on()):
            return
        self._waiting.pop(name).remove()
        began, device = time.perf_counter(), self.world.device
        with self._plainly(model), preserved_random_state(device), as_before(model):
            misses = self._compare(name, model, args, kwargs)
        for module in fsdp_modules(model):
            module.reshard()
        if misses is not None:
            self._judge(f"self.{name}", misses, time.perf_counter() - began)

    def _compare(
        self, name: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Miss] | None:
        """Differences of block outputs in the order in which blocks run, of the model's output, and of gradients."""
        whole = self._wholes.pop(name)
        names = {module: place for place, module in model.named_modules()}
        blocks = [names[block] for block in self.blocks_of(model) if block is not model]
        own, others = dict(model.named_modules()), dict(whole.named_modules())
        told = {f"self.{name}.{block}": block for block in blocks} | {f"the output of self.{name}": ""}
        parts: dict[str, list[Any]] = {place: [] for place in told}
        of_parameters = _Gradients(model, self.world.device)
        self._give_what_was_set_since(name, model, whole)
        run = _WholeRun(model, whole, blocks, of_parameters, self.world.device)
        own_args, own_kwargs = map_tensors(lambda tensor: tensor.detach().clone(), (args, kwargs))
        device = self.world.device
        seed_device(0, device)
        seeds, of_device = WatchedSeeds(0), _state_of(device)

        def keep(place: str, output: Any) -> None:  # a copy, as the next block may write into it
            parts[place].append(map_tensors(lambda tensor: tensor.detach().clone(), output))

        own_blocks = {place: own[block] for place, block in told.items()}
        with _looked_at(own_blocks, keep), of_parameters.of_running_modules():
            given = model(*own_args, **own_kwargs)  # may take out of what it is given, or write
        has_drawn = bool(seeds.drawn()) or not torch.equal(of_device, _state_of(device))
        misses = {_DRAWS: Miss(float(has_drawn), torch.inf, 0.0, 0.0)}

        def look(place: str, output: Any) -> None:
            own_output = parts[place].pop(0) if parts[place] else ()
            for part, expected in zip(leaves(own_output), leaves(output), strict=False):
                miss = self._miss(part, expected)
                if miss is not None:
                    misses[place] = max(miss, misses.get(place, miss))

        whole_args, whole_kwargs = map_tensors(
            lambda tensor: self._of_whole_sequence(tensor).detach().clone(), (args, kwargs)
        )
        whole_blocks = {place: others[block] for place, block in told.items()}
        seed_device(0, device)
        try:
            with self._aside(), _looked_at(whole_blocks, look), _without_draws(whole, model):
                expected = run(whole_args, whole_kwargs)
        except _WRONG as error:
            self._cannot(name, self._why_it_failed(error))
            return None
        misses |= {
            f"the gradient of self.{name}.{path}": miss
            for path, miss in self._misses_of_gradients(name, run, list(self._with_cotangents(given, expected)))
        }
        return misses

    @contextmanager
    def _plainly(self, model: nn.Module) -> Iterator[None]:
        """Inside, nothing is compiled, and all modules but batch norms are in evaluation mode."""
        takeover = self.takeover()
        uncompiled = nullcontext() if takeover is None else takeover.uncompiled()
        # Without its module, which takes seconds to load, nothing is compiled.
        is_loaded = "torch._dynamo" in sys.modules
        eagerly = torch.compiler.set_stance("force_eager") if is_loaded else nullcontext()
        with eagerly, uncompiled, _without_draws(model):
            yield

    def _aside(self) -> Any:
        takeover = self.takeover()
        return nullcontext() if takeover is None else takeover.aside()

    def _with_cotangents(self, given: Any, expected: Any) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Outputs that have gradients, with fixed random cotangents: this rank's two, and the whole ones."""
        for part, whole in zip(leaves(given), leaves(expected), strict=False):
            if not (isinstance(part, Tensor) and isinstance(whole, Tensor) and part.requires_grad):
                continue
            if not whole.requires_grad or whole.is_complex():
                continue
            part = _plain(part)
            generator = torch.Generator(whole.device).manual_seed(0)
            of_whole = torch.randn(whole.shape, generator=generator, dtype=whole.dtype, device=whole.device)
            of_part = self._own_part(of_whole, part.shape)
            if of_part is not None:
                yield part, of_part.to(part.dtype), whole, of_whole

    def _misses_of_gradients(
        self, name: str, run: _WholeRun, outputs: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]
    ) -> Iterator[tuple[str, Miss]]:
        """Differences of parameter gradients, which are summed over ranks that share sequences or experts."""
        if not outputs:
            return
        gradients = run.gradients
        own_outputs, own_cotangents, whole_outputs, whole_cotangents = zip(*outputs, strict=True)
        with without_autocast(self.devices, run.device) or nullcontext():
            try:
                gradients.from_outputs(own_outputs, own_cotangents)
            except RuntimeError as error:  # torch.utils.checkpoint that is reentrant, or whose second run is another
                devices = self.devices
                if devices.context_parallel > 1 and not devices.compile:  # in whose graphs it is no other
                    raise StepError(
                        f"under context_parallel={devices.context_parallel} the gradients of self.{name} may be of "
                        f"this rank's part of a sequence alone, and cannot be verified: {error}"
                    ) from error
                self._cannot(name, f"its gradients cannot be computed apart ({error})")
                return
            try:
                with self._aside():
                    torch.autograd.grad(whole_outputs, [run.anchor], whole_cotangents, allow_unused=True)
            except RuntimeError as error:  # as where whole sequences do not fit
                self._cannot(name, f"its gradients cannot be computed in one piece ({type(error).__name__}: {error})")
                return
        world, shape = self.world, self.world.mesh_shape
        assert world.mesh is not None  # ranks share something
        own, whole = gradients.sketches()
        is_expert = torch.tensor([is_shared_by_experts(p) for p in gradients.parameters.values()], device=own.device)
        of_ranks = own.clone()
        if shape.tp > 1:
            summed = own.clone()
            dist.all_reduce(summed, group=world.mesh["tp"].get_group())
            of_ranks = torch.where(gradients.are_split("tp")[:, None], summed, own)
        if shape.cp > 1:
            dist.all_reduce(of_ranks, group=world.mesh["cp"].get_group())
        if is_expert.any():  # whose tokens come from all ranks
            of_all, whole_of_all = own.clone(), whole / (shape.cp * shape.tp)
            dist.all_reduce(of_all)
            dist.all_reduce(whole_of_all)
            of_ranks = torch.where(is_expert[:, None], of_all, of_ranks)
            whole = torch.where(is_expert[:, None], whole_of_all, whole)
        errors, own_sizes, sizes = (of.square().mean(1).sqrt() for of in (of_ranks - whole, of_ranks, whole))
        floor = torch.finfo(torch.float32).tiny + _SMALL * sizes.nan_to_num(posinf=0.0).max()
        errors = (errors / sizes.clamp(min=floor)).nan_to_num(nan=torch.inf)
        errors[~own_sizes.isfinite() & ~sizes.isfinite()] = 0.0  # which the policy for such gradients looks at
        for number, (path, parameter) in enumerate(gradients.parameters.items()):
            rounding = self._rounding(parameter)
            yield path, Miss(errors[number].item(), rounding, own_sizes[number].item(), sizes[number].item())

    def _give_what_was_set_since(self, name: str, own: nn.Module, whole: nn.Module) -> None:
        """Gives the copy what was set on modules in training; what a plan has set on them is of their part."""
        for place, before in self._attributes.pop(name).items():
            now = vars(own.get_submodule(place))
            changed = {key: value for key, value in now.items() if key not in before or value is not before[key]}
            kept = {key: value for key, value in changed.items() if not key.startswith("_")}
            module = whole.get_submodule(place)
            vars(module).update(kept)
            for key, value in vars(module).items():  # which both would change
                if not key.startswith("_") and isinstance(value, list | dict):
                    vars(module)[key] = copy.copy(value)

    def _why_it_failed(self, error: Exception) -> str:
        takeover = self.takeover()
        lengths = (
            ""
            if takeover is None
            else f" on what is put together along the dimension of {sorted(takeover.attention.lengths)} positions"
        )
        return f"it fails in one piece{lengths} ({type(error).__name__}: {error})"

    def _cannot(self, name: str, why: str) -> None:
        self.warn_once(
            f"verification of self.{name}",
            f"whether ranks compute self.{name} as one process does was not verified: {why}. Compare the first loss "
            "and gradient norm with those of one process, and leave this out with verify=False.",
        )

    def _of_whole_sequence(self, tensor: Tensor) -> Tensor:
        """The whole tensor of a part; if the tensor was computed from what `cut_batch` gave, by its shape."""
        takeover = self.takeover()
        if takeover is None:
            return tensor
        attention = takeover.attention
        for part, cut_along in attention.shapes.given:
            if part is tensor:
                return tensor if cut_along is None else attention.parts.joined(tensor, cut_along)
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
        part, whole = _plain(part.detach()), _plain(whole.detach())
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
        shares = (missed / sizes.clamp(min=usual)).nan_to_num(nan=torch.inf).flatten()
        worst = int(shares.argmax())
        # In half precision, where experts are chosen by a near tie now and then, not by the worst of all.
        is_exact = half_dtype(self.devices) is None
        share = shares[worst] if is_exact else shares.square().mean().sqrt()
        return Miss(float(share), rounding, part.flatten()[worst].item(), expected.flatten()[worst].item())

    def _own_part(self, whole: Tensor, shape: torch.Size) -> Tensor | None:
        """What of it this rank should have, which is of `shape`; None if that cannot be told."""
        if whole.ndim != len(shape):
            return None
        longer = [dim for dim in range(whole.ndim) if whole.shape[dim] != shape[dim]]
        world, takeover = self.world, self.takeover()
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
        half = half_dtype(self.devices)
        eps = max(torch.finfo(part.dtype).eps, 0.0 if half is None else torch.finfo(half).eps)
        if part.dtype == torch.float32 and part.device.type != "cpu":
            eps = max(eps, _TF32)
        return float(eps**0.5)

    def _judge(self, name: str, misses: Mapping[str, Miss], seconds: float) -> None:
        """Raises StepError on all ranks of this forward if one of them found a difference."""
        if misses.keys() <= {_DRAWS}:
            self._cannot(name.removeprefix("self."), "it gives nothing that could be compared")
            return
        worst = dict(zip(misses, self._worst_of_ranks(list(misses.values())), strict=True))
        has_drawn = worst.pop(_DRAWS).error > 0
        wrong = [place for place, miss in worst.items() if miss.is_wrong]
        if wrong and has_drawn:
            self._cannot(name.removeprefix("self."), "it draws random numbers in evaluation mode")
            return
        if wrong:
            self._refuse(name, wrong, worst)
        if self.world.is_main:
            largest = max(miss.error for miss in worst.values())
            show(
                f"{name} computes on {self.world.world_size} ranks what one process does, within "
                f"{largest:.1e} of its size; verified in {seconds:.1f} s",
                sys.stderr,
            )

    def _worst_of_ranks(self, misses: Sequence[Miss]) -> list[Miss]:
        world = self.world
        assert world.mesh is not None  # ranks share something
        worst = torch.tensor(misses, dtype=torch.float64, device=world.device)
        groups = [world.mesh[dim].get_group() for dim in ("cp", "tp") if world.mesh[dim].size() > 1]
        for group in groups:
            of_ranks = [torch.empty_like(worst) for _ in range(dist.get_world_size(group))]
            dist.all_gather(of_ranks, worst, group=group)
            stacked = torch.stack(of_ranks)
            worst = stacked[stacked[..., 0].argmax(0), torch.arange(len(worst), device=worst.device)]
        return [Miss(*values) for values in worst.tolist()]

    def _refuse(self, name: str, wrong: Sequence[str], misses: Mapping[str, Miss]) -> None:
        outputs = [place for place in wrong if not place.startswith("the gradient")]
        # A wrong gradient goes on to what is before it, so the last is where it came up, or next to it.
        place = outputs[0] if outputs else wrong[-1]
        miss, devices = misses[place], self.devices
        sizes = {
            "context_parallel": devices.context_parallel,
            "expert_parallel": devices.expert_parallel,
            "tensor_parallel": devices.tensor_parallel,
        }
        mesh = " and ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        causes = _CAUSES_OF_OUTPUTS if outputs else _CAUSES_OF_GRADIENTS
        likely = "; or ".join(causes[axis] for axis, size in sizes.items() if size > 1)
        which = f"first {place}" if outputs else f"last {place}, of {len(wrong)}"
        raise StepError(
            f"under {mesh} {name} computes other {'values' if outputs else 'gradients'} than one process: {which}, by "
            f"{miss.error:.1e} of its size, where rounding makes up to {miss.rounding:.1e} "
            f"({'' if outputs else 'root mean squares: '}{miss.own:.4g} instead of {miss.whole:.4g}). Likely {likely}."
        )


_CAUSES_OF_OUTPUTS = {
    "context_parallel": "it looks at other positions within this rank's part, or counts them from 0 "
    "(docs/context-parallel.md)",
    "tensor_parallel": "it counts heads or widths by the config, or its plan does not give its layers what they expect "
    "(docs/tensor-parallel.md)",
    "expert_parallel": "it sends tokens to other experts (docs/experts.md)",
}
_CAUSES_OF_GRADIENTS = {
    "context_parallel": "attention is called in a torch.autograd.Function, or in torch.utils.checkpoint with "
    "use_reentrant=True, whose backward sees this rank's part alone",
    "tensor_parallel": "a layer that each rank has whole is given a part of the activations: use SequenceParallel() "
    "for a norm, PrepareModuleInput(..., desired_input_layouts=Replicate()) for others",
    "expert_parallel": "tokens' gradients do not come back from other ranks' experts",
}


@contextmanager
def removed_after(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Inside, the hooks of these handles are called."""
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


def _looked_at(places: Mapping[str, nn.Module], look: Callable[[str, Any], None]) -> AbstractContextManager[None]:
    """Inside, `look` is called with the place and the output of each of these modules that runs."""

    def note(place: str, _module: nn.Module, _args: Any, output: Any) -> None:
        look(place, output)

    return removed_after(module.register_forward_hook(partial(note, place)) for place, module in places.items())


class _Gradients:
    """Gradients of a model's parameters, this rank's and the expected ones, as sketches: no gradient is kept.

    A sketch is `_N_SKETCHES` sums of a gradient with random signs, over the root of its number of elements: so it is
    linear in the gradient, parts of a parameter add up, and its mean square is about the gradient's.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        every = [(path, p) for path, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
        first: dict[int, str] = {}
        self._model, self._path = model, {path: first.setdefault(id(p), path) for path, p in every}
        self.parameters = {path: p for path, p in every if self._path[path] == path}
        self._running: dict[str, Tensor] = {}
        self._own: dict[str, Tensor] = {}
        self._whole: dict[str, Tensor] = {}

    def of_running_modules(self) -> AbstractContextManager[None]:
        """Records parameters as they are when their modules run, which is unsharded."""
        units = {module: place for place, module in self._model.named_modules()}
        wrapped = set(fsdp_modules(self._model))
        return removed_after(
            module.register_forward_pre_hook(partial(self._note, place))
            for module, place in units.items()
            if module is self._model or module in wrapped
        )

    def _note(self, place: str, module: nn.Module, _args: Any) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):  # of units inside until they run
            path = self._path.get(f"{place}.{name}" if place else name)
            if path is not None:
                self._running[path] = parameter

    def from_outputs(self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> None:
        """Computes this rank's gradients; `grad` stays as it is."""
        parameters = list(self._running.values())
        taking = (p.register_hook(partial(self._take_own, path)) for path, p in self._running.items())
        with without_hooks(parameters), removed_after(taking):
            torch.autograd.grad(outputs, parameters, cotangents, allow_unused=True)

    def _take_own(self, path: str, gradient: Tensor) -> Tensor:
        """Returns a gradient of 0, which takes no memory."""
        parameter, places = self._running[path], [torch.arange(size) for size in gradient.shape]
        if is_dtensor(gradient) and is_dtensor(parameter):
            gradient = gradient.redistribute(placements=parameter.placements)
            for mesh_dim, placement in enumerate(parameter.placements):
                dim = shard_dim(placement)
                if dim is not None:
                    parts = places[dim].chunk(parameter.device_mesh.size(mesh_dim))
                    rank = parameter.device_mesh.get_local_rank(mesh_dim)
                    places[dim] = parts[rank] if rank < len(parts) else places[dim][:0]
        local = local_tensor(gradient)
        self._own[path] = self._sketch(path, local, places)
        return with_local(gradient, local.new_zeros(()).expand(local.shape))

    def add_whole(self, path: str, gradient: Tensor) -> None:
        """Adds to the expected gradient of the parameter at `path`."""
        path = self._path[path]
        sketch = self._sketch(path, gradient, [torch.arange(size) for size in gradient.shape])
        self._whole[path] = self._whole[path] + sketch if path in self._whole else sketch

    def _sketch(self, path: str, gradient: Tensor, places: Sequence[Tensor]) -> Tensor:
        """The sketch of a part, whose elements along each dimension lie at `places` of the parameter."""
        if gradient.is_complex():
            gradient, places = torch.view_as_real(gradient), [*places, torch.arange(2)]
        gradient = gradient.reshape(1, -1) if gradient.ndim < 2 else gradient.flatten(0, -2)
        if torch.finfo(gradient.dtype).bits < 32:
            gradient = gradient.float()
        generator = torch.Generator().manual_seed(zlib.crc32(path.encode()))
        shape = self.parameters[path].shape
        signs = [torch.ones(_N_SKETCHES, 1)]
        for size, place in zip(shape if len(shape) == len(places) else (*shape, 2), places, strict=True):
            of_dim = torch.randint(2, (_N_SKETCHES, size), generator=generator, dtype=torch.float32).mul_(2).sub_(1)
            signs.append(of_dim[:, place])
        if len(signs) == 1:  # of a number
            signs *= 2
        rows, *of_rows, of_columns = (of.to(gradient) for of in signs)
        for of in of_rows:
            rows = (rows[:, :, None] * of[:, None, :]).flatten(1)
        sums = ((rows @ gradient) * of_columns).sum(1)
        sketch: Tensor = sums.double() / max(1, shape.numel()) ** 0.5
        return sketch

    def sketches(self) -> tuple[Tensor, Tensor]:
        """This rank's and the expected sketches, `[parameters, _N_SKETCHES]`; 0 if there is no gradient."""
        zero = torch.zeros(_N_SKETCHES, dtype=torch.float64, device=self._device)
        own, whole = (torch.stack([of.get(path, zero) for path in self.parameters]) for of in (self._own, self._whole))
        return own, whole

    def are_split(self, mesh_dim: str) -> Tensor:
        """Whether ranks along `mesh_dim` have parts of each parameter."""
        dims = [dim_of_part(self._running.get(path), mesh_dim) for path in self.parameters]
        return torch.tensor([dim not in (None, -1) for dim in dims], device=self._device)


class _WholeRun:
    """A copy of a model that runs with whole parameters; each block gathers its own, and again in backward.

    All gathered parameters depend on the leaf `anchor`, so that backward reaches them.
    """

    def __init__(
        self, model: nn.Module, whole: nn.Module, blocks: Sequence[str], gradients: _Gradients, device: torch.device
    ) -> None:
        self.anchor, self.device = torch.zeros((), requires_grad=True), device
        self._model, self._whole, self.gradients = model, whole, gradients
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, buffer in model.named_buffers(remove_duplicate=False):
            place, _, own = name.rpartition(".")
            whole.get_submodule(place).register_buffer(own, _plain(buffer.detach()).to(device, copy=True))
        inner = {place for place in blocks if any(place.startswith(f"{outer}.") for outer in blocks)}
        self._blocks = [place for place in dict.fromkeys(blocks) if place not in inner]
        for place in self._blocks:
            self._gather_when_it_runs(place, whole.get_submodule(place))

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outside = [
            name
            for name, _ in self._whole.named_parameters()
            if not any(name.startswith(f"{place}.") for place in self._blocks)
        ]
        return functional_call(self._whole, {name: self._gathered(name) for name in outside}, args, kwargs)

    def _gather_when_it_runs(self, place: str, block: nn.Module) -> None:
        bare = _WithoutHooks(block)
        names = [name for name, _ in block.named_parameters()]

        def forward(*args: Any, **kwargs: Any) -> Any:
            state, calls = ForwardState([block]), iter((True,))

            def run() -> Any:
                if next(calls, False) is False:  # once more, in backward
                    state.put_back()
                values = {f"module.{name}": self._gathered(f"{place}.{name}") for name in names}
                return functional_call(bare, values, args, kwargs)

            if not torch.is_grad_enabled():
                return run()
            return checkpoint(run, use_reentrant=False, preserve_rng_state=False)

        block.forward = forward

    def _gathered(self, name: str) -> Tensor:
        """A whole parameter; a collective if ranks have parts of it."""
        parameter = self._parameters[name]

        def gather() -> Tensor:
            return _plain(parameter.detach()).to(self.device)

        if not parameter.requires_grad:
            return gather()
        found: Tensor = _Gathered.apply(self.anchor, gather, partial(self.gradients.add_whole, name))  # type: ignore[no-untyped-call]
        return found


class _WithoutHooks(nn.Module):
    """A module without its hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self._compute = module, module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._compute(*args, **kwargs)


class _Gathered(Function):
    """A whole parameter whose gradient goes to `note`, and which autograd does not keep alive."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gather: Callable[[], Tensor], note: Callable[[Tensor], None]) -> Tensor:
        ctx.note = note
        return gather()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, None, None]:
        ctx.note(grad_outputs[0].detach())
        return None, None, None


@contextmanager
def _without_draws(model: nn.Module, as_in: nn.Module | None = None) -> Iterator[None]:
    """Inside, modules are in evaluation mode, but batch norms in the mode of those of `as_in`."""
    others = dict((as_in or model).named_modules())
    norms = [
        (module, others[name].training)
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and name in others
    ]
    with in_evaluation([model]):
        for norm, is_training in norms:
            norm.training = is_training
        yield


def copied_without_values(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are on the meta device; RuntimeError or TypeError if there can be none."""
    without_values: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        is_parameter = isinstance(tensor, nn.Parameter)
        without_values[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, without_values)


def _plain(tensor: Tensor) -> Tensor:
    """A whole tensor; a collective if ranks have parts of it."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def _state_of(device: torch.device) -> Tensor:
    """Of the device's default generator; of the CPU's it is looked at by `WatchedSeeds`."""
    return torch.empty(0) if device.type == "cpu" else default_generator_of(device).get_state()
