"""Verification in the first training step: ranks that share a model compute what one process does. Before its first
forward in training each model runs twice in evaluation mode: as it is, and as in one process, on whole sequences and
with whole weights, which are gathered block by block. Block outputs and parameter gradients are compared before any
weight changes. With pipeline stages, every rank runs the whole model on a micro-batch."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dream_trainer.compat.pytorch import (
    AnyBatchNorm,
    default_generator_of,
    is_dtensor,
    local_tensor,
    unnoticed_writes,
    without_torch_function,
)
from dream_trainer.config.device_parameters import DeviceParameters
from dream_trainer.distributed.seeds import WatchedSeeds, preserved_random_state, seed_device
from dream_trainer.distributed.world import World
from dream_trainer.errors import StepError
from dream_trainer.modules.forward_state import ForwardState, in_evaluation
from dream_trainer.modules.precision import half_dtype, without_autocast
from dream_trainer.nested import leaves, map_tensors
from dream_trainer.parallel.mixture_of_experts import is_shared_by_experts
from dream_trainer.parallel.pipeline_stages import Apart
from dream_trainer.parallel.plain_run import (
    WRONG,
    Gradients,
    PlainRun,
    WholeTensors,
    all_gather_objects,
    copied_without_values,
    plain,
    removed_after,
)
from dream_trainer.parallel.sharding import fsdp_modules
from dream_trainer.screen import show

if TYPE_CHECKING:
    from dream_trainer.parallel.context_attention import AttentionTakeover

_TF32 = 2.0**-10  # spacing of numbers if a GPU computes float32 products in TF32
_SMALL = 0.05  # of a model's largest gradient: the scale for smaller ones, such as those that should be 0
_NOT_ZERO = 0.01
_DRAWS = "random numbers"  # the place of a difference that says whether a forward drew some


class Miss(NamedTuple):
    """The difference of a tensor from its expected value: the largest, or in half precision the mean one."""

    error: float
    rounding: float  # the largest difference that is taken for rounding
    own: float
    whole: float  # the expected value; of a gradient both are about its root mean square


_UNSEEN = Miss(-1.0, 0.0, 0.0, 0.0)  # of a block that only other ranks of the pipeline have


def is_verifiable(devices: DeviceParameters) -> bool:
    """Whether ranks share layers, sequences, experts or stages, and a whole forward can be run to compare with."""
    n_ranks = devices.tensor_parallel * devices.context_parallel * devices.expert_parallel * devices.pipeline_parallel
    # Which tensors of a micro-batch are parts of sequences is not known in a pipeline.
    is_known = devices.pipeline_parallel == 1 or devices.context_parallel == 1
    return devices.verify and n_ranks > 1 and devices.float8 == "none" and is_known


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
            if name not in self._wholes:
                continue
            self._attributes[name] = {place: dict(vars(module)) for place, module in model.named_modules()}
            if self.world.stages == 1:  # of a pipeline only some ranks may call what is whole, and those in stages
                hook = partial(self._before_forward, name)
                self._waiting[name] = model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def _before_forward(self, name: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        takeover = self.takeover()
        if not self.is_in_step() or (takeover is not None and not takeover.is_on()):
            return
        self._waiting.pop(name).remove()
        self.run(name, model, None, args, kwargs)

    def run(
        self, name: str, model: nn.Module, apart: Apart | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Compares `model` on what it is given; with `apart`, which runs its stages, a collective of its pipeline."""
        if name not in self._wholes:
            return
        began, device = time.perf_counter(), self.world.device
        # Without its module, which takes seconds to load, nothing is compiled.
        eagerly = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
        evaluating = _without_draws(model, model if apart is None else None)
        with eagerly, evaluating, preserved_random_state(device), ForwardState([model]), _without_zeros(model):
            misses = self._compare(name, model, apart, args, kwargs)
        for module in fsdp_modules(model):
            module.reshard()
        if misses is not None:
            self._judge(f"self.{name}", misses, time.perf_counter() - began, None if apart is None else apart.group)

    def _compare(
        self, name: str, model: nn.Module, apart: Apart | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Miss] | None:
        """Differences of block outputs in running order, of the model's output, and of gradients."""
        whole, device = self._wholes.pop(name), self.world.device
        group = None if apart is None else apart.group
        own, others = dict(model.named_modules()), dict(whole.named_modules())
        names = {module: place for place, module in own.items()}
        own_blocks = [names[block] for block in self.blocks_of(model) if block is not model]
        blocks = [block for of_rank in all_gather_objects(own_blocks, group) for block in of_rank]
        of_output = f"the output of self.{name}"
        told = {f"self.{name}.{block}": block for block in blocks} | {of_output: ""}
        parts: dict[str, list[Any]] = {place: [] for place in told}
        tensors = WholeTensors(model, device, group)
        of_parameters = Gradients(model, whole, tensors, device)
        self._give_what_was_set_since(name, model, whole, group)
        run = PlainRun(whole, blocks, tensors, of_parameters, device)
        own_args, own_kwargs = map_tensors(lambda tensor: tensor.detach().clone(), (args, kwargs))
        seed_device(0, device)

        def keep(place: str, output: Any) -> None:  # a copy, as the next block may write into it
            parts[place].append(map_tensors(lambda tensor: tensor.detach().clone(), output))

        here = {place: own[block] for place, block in told.items() if block in own and place != of_output}
        with _looked_at(here, keep), of_parameters.of_running_modules():
            run_own = model if apart is None else apart.there
            given = run_own(*own_args, **own_kwargs)  # may remove inputs from its arguments, or write to them
        if apart is None or apart.has_output:
            keep(of_output, given)
        misses: dict[str, Miss] = {}

        def look(place: str, output: Any) -> None:
            misses.setdefault(place, _UNSEEN)
            own_output = parts[place].pop(0) if parts[place] else ()
            for part, expected in zip(leaves(own_output), leaves(output), strict=False):
                misses[place] = max(self._miss(part, expected) or _UNSEEN, misses[place])

        whole_args, whole_kwargs = map_tensors(
            lambda tensor: self._of_whole_sequence(tensor).detach().clone(), (args, kwargs)
        )
        whole_blocks = {place: others[block] for place, block in told.items()}
        seed_device(0, device)
        seeds, generator = WatchedSeeds(0), default_generator_of(device)
        undrawn = generator.get_state()
        try:
            with self._aside(), _looked_at(whole_blocks, look), _without_draws(whole, model if apart is None else None):
                expected = run(whole_args, whole_kwargs)
        except WRONG as error:
            self._cannot(name, f"it fails in one piece ({type(error).__name__}: {error})")
            return None
        has_drawn = bool(seeds.drawn()) or not torch.equal(undrawn, generator.get_state())
        misses[_DRAWS] = Miss(float(has_drawn), torch.inf, 0.0, 0.0)
        if apart is not None:
            for path, buffer in whole.named_buffers():  # also those that each stage copies
                found = [self._miss(part, buffer) or _UNSEEN for part in apart.buffers(path)]
                misses[f"the buffer self.{name}.{path}"] = max(found, default=_UNSEEN)
        misses |= {
            f"the gradient of self.{name}.{path}": miss
            for path, miss in self._misses_of_gradients(name, apart, run, given, expected)
        }
        return misses

    def _aside(self) -> AbstractContextManager[None]:
        return nullcontext() if (takeover := self.takeover()) is None else takeover.aside()

    def _with_cotangents(self, given: Any, expected: Any) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Outputs that have gradients, with fixed random cotangents: this rank's two, and the whole ones."""
        for part, whole in zip(leaves(given), leaves(expected), strict=False):
            if not (isinstance(part, Tensor) and isinstance(whole, Tensor) and part.requires_grad):
                continue
            if not whole.requires_grad or whole.is_complex():
                continue
            part = part.full_tensor() if is_dtensor(part) else part
            generator = torch.Generator(whole.device).manual_seed(0)
            of_whole = torch.randn(whole.shape, generator=generator, dtype=whole.dtype, device=whole.device)
            of_part = self._own_part(of_whole, part.shape)
            if of_part is not None:
                yield part, of_part.to(part.dtype), whole, of_whole

    def _misses_of_gradients(
        self, name: str, apart: Apart | None, run: PlainRun, given: Any, expected: Any
    ) -> Iterator[tuple[str, Miss]]:
        """Differences of parameter gradients, which are summed over ranks that share sequences, experts or stages."""
        outputs = list(self._with_cotangents(given, expected))
        if not outputs:
            return
        gradients = run.gradients
        own_outputs, own_cotangents, whole_outputs, whole_cotangents = zip(*outputs, strict=True)
        with without_autocast(self.devices, run.device)():
            try:
                if apart is None:
                    gradients.from_outputs(own_outputs, own_cotangents)
                else:
                    apart.back(own_outputs, own_cotangents, gradients.from_outputs)
            except RuntimeError as error:  # torch.utils.checkpoint that is reentrant, or whose second run is another
                devices = self.devices
                if devices.context_parallel > 1 and not devices.compile:  # in whose graphs it is no other
                    raise StepError(
                        f"under context_parallel={devices.context_parallel} the gradients of self.{name} may only "
                        f"cover this rank's part of a sequence, and cannot be verified: {error}"
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
        experts = [is_shared_by_experts(p) for p in gradients.parameters.values()]
        flags = torch.stack([torch.tensor(experts, device=own.device), gradients.are_split("tp")]).byte()
        if apart is not None:  # whose other ranks have the other parameters
            dist.all_reduce(own, group=apart.group)
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=apart.group)
        is_expert, is_split = flags.bool()
        of_ranks = own.clone()
        if shape.tp > 1:
            summed = own.clone()
            dist.all_reduce(summed, group=world.mesh["tp"].get_group())
            of_ranks = torch.where(is_split[:, None], summed, own)
        if shape.cp > 1:
            dist.all_reduce(of_ranks, group=world.mesh["cp"].get_group())
        if is_expert.any():  # whose tokens come from all ranks
            of_all, whole_of_all = own / shape.pp, whole / (shape.cp * shape.tp * shape.pp)
            dist.all_reduce(of_all)
            dist.all_reduce(whole_of_all)
            of_ranks = torch.where(is_expert[:, None], of_all, of_ranks)
            whole = torch.where(is_expert[:, None], whole_of_all, whole)
        errors, own_sizes, sizes = (of.square().mean(1).sqrt() for of in (of_ranks - whole, of_ranks, whole))
        floor = torch.finfo(torch.float32).tiny + _SMALL * sizes.nan_to_num(posinf=0.0).max()
        errors = (errors / sizes.clamp(min=floor)).nan_to_num(nan=torch.inf)
        errors[~own_sizes.isfinite() & ~sizes.isfinite()] = 0.0  # which the policy for such gradients looks at
        for number, (path, parameter) in enumerate(gradients.parameters.items()):
            rounding = self._rounding(parameter.dtype)
            yield path, Miss(errors[number].item(), rounding, own_sizes[number].item(), sizes[number].item())

    def _give_what_was_set_since(
        self, name: str, own: nn.Module, whole: nn.Module, group: dist.ProcessGroup | None
    ) -> None:
        """Copies attributes that training set on modules; a parallel plan's attributes only fit the part."""
        kept: dict[str, dict[str, Any]] = {}
        for place, before in self._attributes.pop(name).items():
            now = vars(own.get_submodule(place))
            changed = {key: value for key, value in now.items() if key not in before or value is not before[key]}
            kept[place] = {key: value for key, value in changed.items() if not key.startswith("_")}
        for place, values in (item for of_rank in all_gather_objects(kept, group) for item in of_rank.items()):
            module = whole.get_submodule(place)
            vars(module).update(values)
            for key, value in vars(module).items():  # which both would change
                if not key.startswith("_") and isinstance(value, list | dict):
                    vars(module)[key] = copy.copy(value)

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
        for part, cut_along in attention.given:
            if part is tensor:
                return tensor if cut_along is None else attention.parts.joined(tensor, cut_along)
        dims = [dim for dim, size in enumerate(tensor.shape) if size in attention.lengths]
        if dims and (dims[0] > 0 or tensor.shape[0] != attention.rows):
            return attention.parts.joined(tensor, dims[0])
        if len(dims) > 1:
            return attention.parts.joined(tensor, dims[1])
        if not dims:
            return tensor
        # One value per sample, or per position if their numbers are equal; positions differ between ranks.
        whole = attention.parts.joined(tensor, 0)
        return tensor if torch.equal(whole, attention.parts.as_if_alike(tensor, 0)) else whole

    def _miss(self, part: Any, whole: Any) -> Miss | None:
        """None of what cannot be compared."""
        if not (isinstance(part, Tensor) and isinstance(whole, Tensor) and part.is_floating_point() and part.numel()):
            return None
        part, whole = plain(part), plain(whole)
        expected = self._own_part(whole, part.shape)
        if expected is None:
            return None
        rounding = self._rounding(part.dtype)
        if torch.finfo(part.dtype).bits < 32:
            part, expected = part.float(), expected.float()
        is_same = (part == expected) | (part.isnan() & expected.isnan())
        missed = (part - expected).masked_fill(is_same, 0).abs()
        sizes = expected.abs().nan_to_num(posinf=0.0)
        # Relative to its own size or a usual one: next to a few huge values (masked logits) all would look equal.
        known = sizes[sizes > 0]
        usual = known.kthvalue(len(known) // 4 + 1).values if len(known) else torch.finfo(part.dtype).tiny
        shares = (missed / sizes.clamp(min=usual)).nan_to_num(nan=torch.inf).flatten()
        worst = int(shares.argmax())
        # In half precision by the mean, not the worst: near ties sometimes choose other experts.
        is_exact = half_dtype(self.devices) is None
        share = shares[worst] if is_exact else shares.square().mean().sqrt()
        return Miss(float(share), rounding, part.flatten()[worst].item(), expected.flatten()[worst].item())

    def _own_part(self, whole: Tensor, shape: torch.Size) -> Tensor | None:
        """This rank's part of `whole`, with the given `shape`; None if unknown."""
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
            parts, rows, lengths = takeover.attention.parts, takeover.attention.rows, takeover.attention.lengths
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
        # Between layers, tensor-parallel ranks may have parts of the sequence; a first dimension may be samples.
        if dim == 0 or whole.shape[dim] != tensors * own:
            return None
        return whole.narrow(dim, world.mesh["tp"].get_local_rank() * own, own)

    def _rounding(self, dtype: torch.dtype) -> float:
        half = half_dtype(self.devices)
        eps = max(torch.finfo(dtype).eps, 0.0 if half is None else torch.finfo(half).eps)
        if dtype == torch.float32 and self.world.device.type != "cpu":
            eps = max(eps, _TF32)
        return float(eps**0.5)

    def _judge(self, name: str, misses: Mapping[str, Miss], seconds: float, stages: dist.ProcessGroup | None) -> None:
        """Raises StepError on all ranks of this forward if one of them found a difference."""
        mesh, of_ranks = self.world.mesh, list(misses.values())
        assert mesh is not None  # ranks share something
        for group in (*(mesh[dim].get_group() for dim in ("cp", "tp") if mesh[dim].size() > 1), stages):
            of_ranks = [max(every) for every in zip(*all_gather_objects(of_ranks, group), strict=True)]
        worst = dict(zip(misses, of_ranks, strict=True))
        has_drawn = worst.pop(_DRAWS).error > 0
        worst = {place: miss for place, miss in worst.items() if miss != _UNSEEN}
        if not worst:
            self._cannot(name.removeprefix("self."), "it gives nothing that could be compared")
            return
        wrong = [place for place, miss in worst.items() if miss.error > miss.rounding]
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

    def _refuse(self, name: str, wrong: Sequence[str], misses: Mapping[str, Miss]) -> None:
        outputs = [place for place in wrong if not place.startswith("the gradient")]
        # A wrong gradient spreads to earlier layers, so the last one is at or next to its origin.
        place = outputs[0] if outputs else wrong[-1]
        miss, devices = misses[place], self.devices
        sizes = {axis: vars(devices)[axis] for axis in _CAUSES_OF_OUTPUTS}
        mesh = " and ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        causes = _CAUSES_OF_OUTPUTS if outputs else _CAUSES_OF_GRADIENTS
        likely = "; or ".join(causes[axis] for axis, size in sizes.items() if size > 1)
        which = f"first {place}" if outputs else f"{len(wrong)} differ, and nearest to the cause is {place}"
        raise StepError(
            f"under {mesh} {name} computes other {'values' if outputs else 'gradients'} than one process: {which}, by "
            f"{miss.error:.1e} of its size; rounding makes up to {miss.rounding:.1e} "
            f"({'' if outputs else 'root mean squares: '}{miss.own:.4g} instead of {miss.whole:.4g}). Likely {likely}."
        )


_CAUSES_OF_OUTPUTS = {
    "context_parallel": "it looks at other positions within this rank's part, or counts them from 0 "
    "(docs/context-parallel.md)",
    "expert_parallel": "it sends tokens to other experts (docs/experts.md)",
    "pipeline_parallel": "a stage does what belongs to layers that others hold, or lacks what they compute: one end of "
    "a skip connection has to cross as well (docs/pipeline-parallel.md)",
    "tensor_parallel": "it counts heads or widths by the config, or its plan does not give its layers what they expect "
    "(docs/tensor-parallel.md)",
}
_CAUSES_OF_GRADIENTS = {
    "context_parallel": "attention is called in a torch.autograd.Function, or in torch.utils.checkpoint with "
    "use_reentrant=True, whose backward only sees this rank's part",
    "tensor_parallel": "a layer that each rank has whole is given a part of the activations: use SequenceParallel() "
    "for a norm (on heads with use_local_output=True), PrepareModuleInput(..., desired_input_layouts=Replicate()) for "
    "others",
    "expert_parallel": "tokens' gradients do not come back from other ranks' experts",
    "pipeline_parallel": "a stage's output is detached, or a weight that stages share is no longer one parameter",
}


def _looked_at(places: Mapping[str, nn.Module], look: Callable[[str, Any], None]) -> AbstractContextManager[None]:
    """Inside, `look` is called with the place and the output of each of these modules that runs."""

    def note(place: str, _module: nn.Module, _args: Any, output: Any) -> None:
        look(place, output)

    return removed_after(module.register_forward_hook(partial(note, place)) for place, module in places.items())


@contextmanager
def _without_draws(model: nn.Module, as_in: nn.Module | None) -> Iterator[None]:
    """Inside, modules are in evaluation mode, but batch norms in the mode of those of `as_in`."""
    others = {} if as_in is None else dict(as_in.named_modules())
    norms = [
        (module, others[name].training)
        for name, module in model.named_modules()
        if isinstance(module, AnyBatchNorm) and name in others
    ]
    with in_evaluation([model]):
        for norm, is_training in norms:
            norm.training = is_training
        yield


@contextmanager
@torch.no_grad()
def _without_zeros(model: nn.Module) -> Iterator[None]:
    """Inside, parameters that are 0 have another value: behind these, gradients are 0 whatever ranks do."""
    for module in fsdp_modules(model):
        module.reshard()
    with without_torch_function():
        parts = [local_tensor(parameter.detach()) for parameter in model.parameters()]
    zeros = [part for part in parts if part.numel() and not part.any()]
    with unnoticed_writes(zeros):
        for part in zeros:
            part.fill_(_NOT_ZERO)
    try:
        with torch.enable_grad():
            yield
    finally:
        with unnoticed_writes(zeros):
            for part in zeros:
                part.zero_()
