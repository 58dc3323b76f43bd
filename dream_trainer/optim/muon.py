"""Muon with each matrix orthogonalised on one rank; numerics and state are those of `torch.optim.Muon`.

PyTorch's gathers sharded matrices in every product of the iteration. Here two packed collectives a step move them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dream_trainer.compat.pytorch import all_gather_flat, local_tensor, with_local
from dream_trainer.parallel.sharded_model import rows_of
from dream_trainer.parallel.sharding import local_gradient

# -- Parts travel to a matrix's owner in one packed all-to-all, and results travel back. Ranks that hold the same parts
# share the work too.


@dataclass(frozen=True)
class Layout:
    shards: ProcessGroup | None  # ranks that hold a part of it each; None if this rank holds all of it
    dim: int  # the dimension that is cut, as `torch.chunk` cuts
    replicas: ProcessGroup | None  # ranks that hold the same part with the same gradient, bit for bit


def layout_of(tensor: Tensor, replicas: ProcessGroup | None) -> Layout | None:
    """The layout of `tensor`; None if it is cut or copied along several dimensions of its mesh, or strided."""
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(tensor, DTensor):
        return Layout(None, 0, replicas)
    mesh = tensor.device_mesh
    used = [(i, placement) for i, placement in enumerate(tensor.placements) if mesh.size(i) > 1]
    copied = [i for i, placement in used if placement.is_replicate()]
    cut = [(i, placement) for i, placement in used if not placement.is_replicate()]
    if len(copied) > 1 or len(cut) > 1 or not all(isinstance(placement, Shard) for _, placement in cut):
        return None
    shards, dim = None, 0
    for i, placement in cut:
        assert isinstance(placement, Shard)
        shards, dim = mesh.get_group(i), placement.dim
    return Layout(shards, dim, mesh.get_group(copied[0]) if copied else None)


def deal(costs: Sequence[float], n_hands: int) -> list[int]:
    """Owners of matrices: the costliest first, each to the rank with the least work so far; the same on every rank."""
    hands = [(0.0, hand) for hand in range(n_hands)]
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, owners[i] = hands[0]
        heapq.heapreplace(hands, (load + costs[i], owners[i]))
    return owners


class MatrixExchange:
    """The buffers and sizes of one exchange, made once for given matrices of one layout."""

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        costs: Sequence[float],
        layout: Layout,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._layout = layout
        shard, n_shards = _place(layout.shards)
        replica, n_replicas = _place(layout.replicas)
        owners = [divmod(cell, n_shards) for cell in deal(costs, n_replicas * n_shards)]
        lengths = [[rows_of(rank, shape[layout.dim], n_shards)[1] for rank in range(n_shards)] for shape in shapes]
        part_shapes = [
            [torch.Size([*shape[: layout.dim], length, *shape[layout.dim + 1 :]]) for length in lengths_of_shape]
            for shape, lengths_of_shape in zip(shapes, lengths, strict=True)
        ]
        self.wanted = [i for i, (of_replica, _) in enumerate(owners) if of_replica == replica]
        self._owned = [i for i in self.wanted if owners[i][1] == shard]
        self._lengths = lengths

        # A slot for each replica's results, all of one size, as an all-gather wants them. This rank's own holds first
        # what it sends to owners, in the order of the owners.
        slots = [
            sorted((i for i, (of_replica, _) in enumerate(owners) if of_replica == r), key=lambda i: owners[i][1])
            for r in range(n_replicas)
        ]
        slot_size = max(sum(part_shapes[i][shard].numel() for i in slot) for slot in slots)
        # Zeros, since what pads a slot is sent too.
        self._results = torch.zeros(n_replicas * slot_size, dtype=dtype, device=device)
        by_index: dict[int, Tensor] = {}
        for r, slot in enumerate(slots):
            views = _views(self._results[r * slot_size :], [part_shapes[i][shard] for i in slot])
            by_index |= zip(slot, views, strict=True)
        self.parts = [by_index[i] for i in range(len(shapes))]
        self._slot = self._results[replica * slot_size : (replica + 1) * slot_size]
        self._sent = [
            sum(part_shapes[i][shard].numel() for i in self.wanted if owners[i][1] == owner)
            for owner in range(n_shards)
        ]

        # What the owned matrices' parts arrive in, ordered by where they come from.
        self._received = [sum(part_shapes[i][source].numel() for i in self._owned) for source in range(n_shards)]
        self._pieces = [[self.parts[i]] for i in self._owned]
        self._arrived = self._slot
        if layout.shards is not None:
            self._arrived = torch.empty(sum(self._received), dtype=dtype, device=device)
            order = [part_shapes[i][source] for source in range(n_shards) for i in self._owned]
            views = _views(self._arrived, order)
            self._pieces = [views[place :: len(self._owned)] for place in range(len(self._owned))]

    def run(self, work: Callable[[int, Tensor], Tensor]) -> None:
        """Replaces each matrix by the result of `work` for its index and a view of it; every rank calls it."""
        dim, outgoing = self._layout.dim, self._slot[: sum(self._sent)]
        group = self._layout.shards if self.wanted else None
        if group is not None:
            dist.all_to_all_single(self._arrived, outgoing, self._received, self._sent, group=group)
        for i, pieces in zip(self._owned, self._pieces, strict=True):
            result = work(i, pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim))
            for piece, part in zip(pieces, result.split(self._lengths[i], dim), strict=True):
                piece.copy_(part)
        if group is not None:
            dist.all_to_all_single(outgoing, self._arrived, self._sent, self._received, group=group)
        if self._layout.replicas is not None and self._results.numel():
            all_gather_flat(self._results, self._slot, self._layout.replicas)


def _place(group: ProcessGroup | None) -> tuple[int, int]:
    """(rank, number of ranks) in `group`; (0, 1) without one."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def _views(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Tensors of `shapes`, one after the other in `flat`."""
    sizes = [shape.numel() for shape in shapes]
    return [piece.view(shape) for piece, shape in zip(flat[: sum(sizes)].split(sizes), shapes, strict=True)]


_Matrix = tuple[nn.Parameter, dict[str, Any]]
_Plan = tuple[list[_Matrix], list[tuple[MatrixExchange, list[_Matrix]]]]
_ALONE = Layout(None, 0, None)


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` for sharded matrices too; plain ones are stepped by the same numbers.

    With several ranks, all must step together, with gradients for the same parameters, as under `fully_shard` and the
    trainer.

    Args:
        params: Parameters of two dimensions, or groups of them: plain, or DTensors of any layout. One that is cut along
            more than one dimension of its mesh (tensor parallel with FSDP) is gathered by every rank. This and the
            arguments up to `adjust_lr_fn` are PyTorch's.
        iteration_dtype: Dtype for sending and iterating matrices; float32 is more exact, and faster on most CPUs.
        replicas: Ranks that hold the same plain parameters, with gradients that are equal bit for bit: they share the
            work. The trainer sets it. None repeats the work on each rank.

    Attributes:
        found_inf: If not None, a 0-dim tensor. If it is not 0, a step changes neither weights nor momentum, without
            waiting for the device.
    """

    found_inf: Tensor | None = None
    iteration_dtype: torch.dtype = torch.bfloat16
    replicas: ProcessGroup | None = None
    _plan: _Plan | None = None
    _plan_key: tuple[Any, ...] = ()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        iteration_dtype: torch.dtype = torch.bfloat16,
        replicas: ProcessGroup | None = None,
    ) -> None:
        super().__init__(params, lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn)
        self.iteration_dtype = iteration_dtype
        self.replicas = replicas

    def __getstate__(self) -> dict[str, Any]:
        # For a copy. A process group is not copied: without one the work is repeated, with equal results.
        return {**super().__getstate__(), "iteration_dtype": self.iteration_dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # of a copy, or of load_state_dict, after which the groups are other dicts
        self._plan = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Changes every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        skip = None if self.found_inf is None else self.found_inf != 0
        gathered, dealt = self._plan_for(matrices)
        for parameter, group in gathered:
            self._step_gathered(parameter, group, skip)
        for exchange, members in dealt:
            self._step_dealt(exchange, members, skip)
        torch.autograd.graph.increment_version([p for p, _ in matrices])  # of DTensors, whose shards were written
        return loss

    def _plan_for(self, matrices: list[_Matrix]) -> _Plan:
        """Which matrices every rank gathers, and the exchanges of the others; made again when others have gradients."""
        key = (self.iteration_dtype, self.replicas, *[id(p) for p, _ in matrices])
        if self._plan is not None and self._plan_key == key:
            return self._plan
        by_layout: dict[tuple[Layout, torch.device], list[_Matrix]] = {}
        gathered: list[_Matrix] = []
        for parameter, group in matrices:
            layout = layout_of(parameter, self.replicas)
            if layout is None or layout == _ALONE:
                gathered.append((parameter, group))
            else:
                by_layout.setdefault((layout, local_tensor(parameter).device), []).append((parameter, group))
        dealt = []
        for (layout, device), members in by_layout.items():
            shapes = [p.shape for p, _ in members]
            sides = [sorted(shape) for shape in shapes]  # cost: multiplications of the iteration
            steps = [group["ns_steps"] for _, group in members]
            costs = [float(n * a * a * (2 * b + a)) for n, (a, b) in zip(steps, sides, strict=True)]
            dealt.append((MatrixExchange(shapes, costs, layout, dtype=self.iteration_dtype, device=device), members))
        self._plan, self._plan_key = (gathered, dealt), key
        return self._plan

    def _step_gathered(self, parameter: nn.Parameter, group: dict[str, Any], skip: Tensor | None) -> None:
        """Orthogonalises the matrix on this rank, and on every other that has a part of it."""
        from torch.distributed.tensor import DTensor, Replicate

        part = with_local(parameter, self._momentum_update(parameter, group, skip).to(self.iteration_dtype))
        whole = part.full_tensor() if isinstance(part, DTensor) else part
        update = orthogonalised(whole, group)
        if isinstance(part, DTensor):
            mesh = part.device_mesh
            copies = DTensor.from_local(update, mesh, [Replicate()] * mesh.ndim, run_check=False)
            update = local_tensor(copies.redistribute(placements=part.placements))
        _move(parameter, update, group, skip)

    def _step_dealt(self, exchange: MatrixExchange, members: list[_Matrix], skip: Tensor | None) -> None:
        for place, (parameter, group) in enumerate(members):
            update = self._momentum_update(parameter, group, skip)
            if place in exchange.wanted:
                exchange.parts[place].copy_(update)

        def work(place: int, matrix: Tensor) -> Tensor:
            return orthogonalised(matrix, members[place][1])

        exchange.run(work)
        for (parameter, group), update in zip(members, exchange.parts, strict=True):
            _move(parameter, update, group, skip)

    def _momentum_update(self, parameter: nn.Parameter, group: dict[str, Any], skip: Tensor | None) -> Tensor:
        """Moves this rank's part of the momentum, and returns the part of what is to be orthogonalised."""
        gradient = local_gradient(parameter)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        momentum = local_tensor(state["momentum_buffer"])
        if skip is None:
            momentum.lerp_(gradient, 1 - group["momentum"])
        else:
            moved = torch.lerp(momentum, gradient, 1 - group["momentum"])
            momentum.copy_(torch.where(skip, momentum, moved))
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def orthogonalised(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    """About the nearest semi-orthogonal matrix to `matrix` [rows, columns], with singular values of 0.5 to 1.5."""
    a, b, c = group["ns_coefficients"]
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=group["eps"])  # its largest singular value is then at most 1
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _move(parameter: nn.Parameter, update: Tensor, group: dict[str, Any], skip: Tensor | None) -> None:
    """Decays this rank's part of the parameter, and moves it against `update`; not where `skip` is true."""
    rate = float(group["lr"])
    rows, columns = parameter.shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        adjusted = rate * (0.2 * math.sqrt(max(rows, columns)))
    else:
        adjusted = rate * math.sqrt(max(1, rows / columns))
    local = local_tensor(parameter)
    if skip is None:
        local.mul_(1 - rate * group["weight_decay"]).add_(update, alpha=-adjusted)
    else:
        moved = local.mul(1 - rate * group["weight_decay"]).add_(update, alpha=-adjusted)
        local.copy_(torch.where(skip, local, moved))
