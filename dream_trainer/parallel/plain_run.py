"""A model as one process runs it, on ranks that share it: whole weights, which are gathered block by block."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from dream_trainer.compat.pytorch import is_dtensor, local_tensor, with_local, without_hooks, without_torch_function
from dream_trainer.distributed.world import linear
from dream_trainer.modules.forward_state import ForwardState
from dream_trainer.parallel.sharding import dim_of_part, fsdp_modules, local_indices

N_SKETCHES = 32
WRONG = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)  # what a forward raises
Back = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor | None]]
"""Computes gradients from outputs and their cotangents; returns those of inputs."""


class WholeTensors:
    """Whole parameters and buffers of a model; all ranks of a pipeline request them in the same order."""

    def __init__(self, model: nn.Module, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._device, self._group = device, group
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self.own: dict[str, Tensor] = parameters | dict(model.named_buffers(remove_duplicate=False))
        looks = {name: (name not in parameters, without_value(tensor)) for name, tensor in self.own.items()}
        # Which rank of the pipeline has it, whether it is a buffer, and a tensor like it.
        self._looks: dict[str, tuple[int, bool, Tensor]] = {}
        for rank, of_rank in enumerate(all_gather_objects(looks, group)):
            for name, look in of_rank.items():
                self._looks.setdefault(name, (rank, *look))

    def buffers(self) -> list[str]:
        return [name for name, (_, is_buffer, _) in self._looks.items() if is_buffer]

    def is_trained(self, name: str) -> bool:
        return self._looks[name][2].requires_grad

    def __getitem__(self, name: str) -> Tensor:
        """A collective if ranks have parts of it, or stages."""
        (owner, _, like), group = self._looks[name], self._group
        is_here = group is None or owner == dist.get_rank(group)
        value = plain(self.own[name]).to(self._device) if is_here else torch.empty_like(like, device=self._device)
        if group is not None:
            value = value.contiguous()
            dist.broadcast(value.flatten().view(torch.uint8), group=group, group_src=owner)
        return value


def all_gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of the ranks of `group`, by rank; only `value` without a group."""
    if group is None:
        return [value]
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, value, group=group)
    return of_ranks


@contextmanager
def removed_after(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Inside, the hooks of these handles are called."""
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


class Gradients:
    """Gradients of a model's parameters, this rank's and the expected ones, as sketches: no gradient is kept. A sketch
    is `N_SKETCHES` sums of a gradient with random signs, over the root of its number of elements. It is linear in the
    gradient: parts of a parameter add up. Its mean square is about the gradient's."""

    def __init__(self, model: nn.Module, whole: nn.Module, tensors: WholeTensors, device: torch.device) -> None:
        self._device = device
        every = [name for name, _ in whole.named_parameters(remove_duplicate=False) if tensors.is_trained(name)]
        first: dict[int, str] = {}
        self._model, own = model, dict(model.named_parameters(remove_duplicate=False))
        self._path = {path: first.setdefault(id(whole.get_parameter(path)), path) for path in every}
        self.parameters = {path: own.get(path, whole.get_parameter(path)) for path in first.values()}
        self._running: dict[str, Tensor] = {}
        self._own: dict[str, Tensor] = {}
        self._whole: dict[str, Tensor] = {}

    def of_running_modules(self) -> AbstractContextManager[None]:
        """Records parameters as they are when their modules run, which is unsharded."""
        units: set[nn.Module] = {self._model, *fsdp_modules(self._model)}  # type: ignore[arg-type]
        return removed_after(
            module.register_forward_pre_hook(partial(self._note, place))
            for place, module in self._model.named_modules()
            if module in units
        )

    def _note(self, place: str, module: nn.Module, _args: Any) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):  # of units inside until they run
            path = self._path.get(f"{place}.{name}" if place else name)
            if path is not None:
                self._running[path] = parameter

    def from_outputs(
        self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Sequence[Tensor] = ()
    ) -> Sequence[Tensor | None]:
        """Computes this rank's gradients; `grad` stays as it is. Returns those of `inputs`."""
        parameters = list(self._running.values())
        if not outputs or not (parameters or inputs):
            return [None for _ in inputs]
        taking = (p.register_hook(partial(self._take_own, path)) for path, p in self._running.items())
        with without_hooks(parameters), removed_after(taking):
            found = torch.autograd.grad(outputs, [*parameters, *inputs], cotangents, allow_unused=True)
        return found[len(parameters) :]

    def _take_own(self, path: str, gradient: Tensor) -> Tensor:
        """Returns a gradient of 0, which takes no memory."""
        parameter, places = self._running[path], [torch.arange(size) for size in gradient.shape]
        if is_dtensor(gradient) and is_dtensor(parameter):
            gradient = gradient.redistribute(placements=parameter.placements)
            places = [local_indices(gradient, dim) for dim in range(gradient.ndim)]
        local = local_tensor(gradient)
        self._own[path] = self._own.get(path, 0) + self._sketch(path, local, places)
        return with_local(gradient, local.new_zeros(()).expand(local.shape))

    def add_whole(self, path: str, gradient: Tensor) -> None:
        path = self._path[path]
        places = [torch.arange(size) for size in gradient.shape]
        self._whole[path] = self._whole.get(path, 0) + self._sketch(path, gradient, places)

    def _sketch(self, path: str, gradient: Tensor, places: Sequence[Tensor]) -> Tensor:
        """The sketch of a part, whose elements along each dimension lie at `places` of the parameter."""
        if gradient.is_complex():
            gradient, places = torch.view_as_real(gradient), [*places, torch.arange(2)]
        gradient = gradient.reshape(1, -1) if gradient.ndim < 2 else gradient.flatten(0, -2)
        if torch.finfo(gradient.dtype).bits < 32:
            gradient = gradient.float()
        generator = torch.Generator().manual_seed(zlib.crc32(path.encode()))
        shape = self.parameters[path].shape
        signs = [torch.ones(N_SKETCHES, 1)]
        for size, place in zip(shape if len(shape) == len(places) else (*shape, 2), places, strict=True):
            of_dim = torch.randint(2, (N_SKETCHES, size), generator=generator, dtype=torch.float32).mul_(2).sub_(1)
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
        """This rank's and the expected sketches, `[parameters, N_SKETCHES]`; 0 if there is no gradient."""
        zero = torch.zeros(N_SKETCHES, dtype=torch.float64, device=self._device)
        own, whole = (torch.stack([of.get(path, zero) for path in self.parameters]) for of in (self._own, self._whole))
        return own, whole

    def are_split(self, mesh_dim: str) -> Tensor:
        """Whether ranks along `mesh_dim` have parts of each parameter."""
        dims = [dim_of_part(self._running.get(path), mesh_dim) for path in self.parameters]
        return torch.tensor([dim not in (None, -1) for dim in dims], device=self._device)


class PlainRun:
    """A copy of a model with whole parameters: each block gathers its own, in backward too, by way of `anchor`."""

    def __init__(
        self, whole: nn.Module, blocks: Sequence[str], tensors: WholeTensors, gradients: Gradients, device: torch.device
    ) -> None:
        self.anchor, self.device = torch.zeros((), requires_grad=True), device
        self._whole, self._tensors, self.gradients = whole, tensors, gradients
        for name in tensors.buffers():
            place, _, own = name.rpartition(".")
            whole.get_submodule(place).register_buffer(own, tensors[name].clone())
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
        bare = nn.Module()  # calls no hooks of the block
        bare.module, bare.forward = block, block.forward
        names = [name for name, _ in block.named_parameters()]

        def forward(*args: Any, **kwargs: Any) -> Any:
            state, calls = ForwardState([block]), iter((True,))

            def run() -> Any:
                if next(calls, False) is False:  # again, in backward
                    state.put_back()
                values = {f"module.{name}": self._gathered(f"{place}.{name}") for name in names}
                return functional_call(bare, values, args, kwargs)

            if not torch.is_grad_enabled():
                return run()
            return checkpoint(run, use_reentrant=False, preserve_rng_state=False)

        block.forward = forward

    def _gathered(self, name: str) -> Tensor:
        if not self._tensors.is_trained(name):
            return self._tensors[name]

        def note(gradient: Tensor) -> Tensor:
            self.gradients.add_whole(name, gradient)
            return torch.zeros(())  # the anchor's

        return linear(self.anchor, lambda _: self._tensors[name], note)  # which keeps no tensor alive


def copied_without_values(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are on the meta device; RuntimeError or TypeError if there can be none."""
    without_values: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        is_parameter = isinstance(tensor, nn.Parameter)
        without_values[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, without_values)


def without_value(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


def plain(tensor: Tensor) -> Tensor:
    """A whole tensor without its graph; a collective if ranks have parts of it. Shards stay sharded."""
    with without_torch_function():
        tensor = tensor.detach()
        return tensor.full_tensor() if is_dtensor(tensor) else tensor
