"""Muon with each matrix orthogonalised on one rank; numerics, state and arguments are those of `torch.optim.Muon`.

Keller Jordan's optimizer (https://kellerjordan.github.io/posts/muon/) needs whole matrices. PyTorch's class gathers
sharded ones in every product of the Newton-Schulz iteration, and repeats the iteration on every rank that has the
matrix. Here matrices are dealt to ranks, and two packed collectives a step move them: see matrix_exchange.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dream_trainer.compat.pytorch import local_tensor, with_local
from dream_trainer.modules.shards import local_gradient
from dream_trainer.optim.matrix_exchange import Layout, MatrixExchange, layout_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Coefficients = tuple[float, float, float]
_Matrix = tuple[nn.Parameter, dict[str, Any]]
_Plan = tuple[list[_Matrix], list[tuple[MatrixExchange, list[_Matrix]]]]
_ALONE = Layout(None, 0, None)


class Muon(Optimizer):
    """Momentum, orthogonalised; for matrices inside a network, sharded or not.

    Over ranks, all of them step together, and have gradients for the same parameters: as `fully_shard` and the trainer
    leave them.

    Args:
        params: Parameters of two dimensions, or groups of them: plain, or DTensors of any layout. One that is cut along
            more than one dimension of its mesh (tensor parallel beside FSDP) is gathered by every rank.
        lr: Learning rate.
        weight_decay: Decoupled weight decay.
        momentum: Factor of the momentum.
        nesterov: Whether the momentum is taken one step ahead.
        ns_coefficients: Coefficients of the Newton-Schulz iteration.
        eps: The least norm that a matrix is divided by.
        ns_steps: Number of iterations.
        adjust_lr_fn: How the rate follows the shape: None or "original", or "match_rms_adamw".
        iteration_dtype: What matrices are sent and iterated in; float32 is more exact, and faster on most CPUs.
        replicas: Ranks that hold the same plain parameters, with gradients that are equal bit for bit: they share the
            work. The trainer sets it. None repeats the work on each rank.

    Attributes:
        found_inf: If not None, a 0-dim tensor: where it is not 0, a step changes neither weights nor momentum, and does
            not wait for the device.

    Raises:
        ValueError: A number is out of its range, or a parameter is no matrix.
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
        ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        iteration_dtype: torch.dtype = torch.bfloat16,
        replicas: ProcessGroup | None = None,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name}={value} is not a number from 0 up.")
        if not 0 < ns_steps < 100:
            raise ValueError(f"ns_steps={ns_steps} is not between 1 and 99. Use 5.")
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(f'adjust_lr_fn={adjust_lr_fn!r} is not known. Use "original" or "match_rms_adamw".')
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
            },
        )
        self.iteration_dtype = iteration_dtype
        self.replicas = replicas

    def __getstate__(self) -> dict[str, Any]:
        # Of a copy. A process group is not copied: without one the work is repeated, which changes no number.
        return {**super().__getstate__(), "iteration_dtype": self.iteration_dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # of a copy, or of load_state_dict, after which the groups are other dicts
        self._plan = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of any optimizer; ValueError if a parameter is no matrix."""
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.ndim != 2 or p.is_complex():
                raise ValueError(
                    f"Muon was given a {p.dtype} parameter of shape {tuple(p.shape)}, and steps real matrices. Leave "
                    "it to AdamW, as build_optimizers does."
                )
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
            costs = [_cost(p.shape, group["ns_steps"]) for p, group in members]
            dealt.append((MatrixExchange(shapes, costs, layout, dtype=self.iteration_dtype, device=device), members))
        self._plan, self._plan_key = (gathered, dealt), key
        return self._plan

    def _step_gathered(self, parameter: nn.Parameter, group: dict[str, Any], skip: Tensor | None) -> None:
        """Orthogonalises the matrix on this rank, and on every other that has a part of it."""
        from torch.distributed.tensor import DTensor, Replicate

        update = with_local(parameter, self._momentum_update(parameter, group, skip).to(self.iteration_dtype))
        if isinstance(update, DTensor):
            mesh, placements = update.device_mesh, update.placements
            whole = orthogonalised(update.full_tensor(), group["ns_coefficients"], group["ns_steps"], group["eps"])
            copies = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
            update = local_tensor(copies.redistribute(placements=placements))
        else:
            update = orthogonalised(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        _move(parameter, update, group, skip)

    def _step_dealt(self, exchange: MatrixExchange, members: list[_Matrix], skip: Tensor | None) -> None:
        for place, (parameter, group) in enumerate(members):
            update = self._momentum_update(parameter, group, skip)
            if place in exchange.wanted:
                exchange.parts[place].copy_(update)

        def work(place: int, matrix: Tensor) -> Tensor:
            group = members[place][1]
            return orthogonalised(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])

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


def orthogonalised(matrix: Tensor, coefficients: Coefficients, n_steps: int, eps: float) -> Tensor:
    """About the nearest semi-orthogonal matrix to `matrix` [rows, columns]: `n_steps` of Newton-Schulz in its dtype.

    Singular values end between 0.5 and 1.5 or so, not at 1: steeper steps pay more than exact ones.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)  # its largest singular value is then at most 1
    for _ in range(n_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _cost(shape: torch.Size, n_steps: int) -> float:
    """Multiplications of the iteration."""
    short, long = sorted(shape)
    return float(n_steps * short * short * (2 * long + short))


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
