"""MoE: a feed-forward layer of many experts; each token uses a few. No token is dropped. Ranks may share the experts:
each has the weights of a part of them, and rows go to the rank that has their expert.

All ranks run each layer equally often: sending and giving back are collectives, in forward and in backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dream_trainer.checks import check_between, check_choice, check_instance, check_integer
from dream_trainer.compat.pytorch import has_values, is_dtensor, with_parameters
from dream_trainer.distributed.world import World, gathered_rows, linear
from dream_trainer.errors import ConfigError
from dream_trainer.parallel.micro_batches import even_parts
from dream_trainer.parallel.plain_run import plain
from dream_trainer.parallel.sharding import dim_of_part


class ExpertExchange:
    """Takes rows to the ranks that have their experts, and back.

    Args:
        mesh: One-dimensional mesh of the expert-parallel ranks; rank r has the r-th part of the experts.

    Example:
        ```python
        def forward(self, rows, counts):  # of a layer of experts, sorted by expert
            if self.exchange is None:
                return self.compute(rows, counts, self.weight)
            own = self.exchange.send(rows, counts)
            out = self.compute(own.rows, own.counts, self.exchange.local(self.weight))
            return own.give_back(out)
        ```
    """

    is_off = False  # whether no expert gets a row, and nothing is sent

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group()
        self._size = mesh.size()
        self._alike: Alike | None = None

    def divide_rows(self, mesh: DeviceMesh) -> None:
        """From now on the ranks of `mesh`, which all have the same rows, send a part each and share what comes back."""
        self._alike = Alike(mesh.get_group(), mesh.get_local_rank(), mesh.size())

    def local(self, weight: Tensor) -> Tensor:
        """This rank's experts of a stacked weight, with gradients."""
        assert is_dtensor(weight)  # since `split_experts`
        return weight.to_local()

    def send(self, rows: Tensor, counts: Tensor) -> Visitors:
        """Sends `rows`, sorted by expert, to the ranks of their experts; `counts` has the number of rows per expert."""
        n_rows = len(rows)
        if self.is_off:
            none = counts.new_zeros(len(counts) // self._size)
            return Visitors(rows[:0], none, none[:0], [], [], None, None, n_rows)
        if self._alike is not None:
            rows, counts = self._alike.part(rows), self._alike.part_of_counts(counts)
        from_ranks = torch.empty_like(counts)
        dist.all_to_all_single(from_ranks, counts, group=self._group)
        to_ranks, from_ranks = counts.view(self._size, -1), from_ranks.view(self._size, -1)
        if has_values(counts):
            leaving, coming = torch.stack((to_ranks.sum(1), from_ranks.sum(1))).tolist()
        else:  # without values that would say how many
            leaving = coming = even_parts(len(rows), self._size)
        received = _sent(rows, coming, leaving, self._group)
        experts = torch.arange(1, from_ranks.shape[1] + 1, device=rows.device).repeat(self._size)
        of_rows = experts.repeat_interleave(from_ranks.flatten(), output_size=sum(coming))
        order = of_rows.sort(stable=True).indices
        own = received.index_select(0, order)
        return Visitors(own, from_ranks.sum(0), order, coming, leaving, self._group, self._alike, n_rows)


@dataclass(frozen=True)
class Visitors:
    """The rows of all ranks that are for this one's experts."""

    rows: Tensor  # `[n, ...]`, sorted by expert
    counts: Tensor  # `[experts of this rank]`, int64: rows of each
    _order: Tensor
    _coming: list[int]
    _leaving: list[int]
    _group: ProcessGroup | None  # None if nothing was sent
    _alike: Alike | None
    _n_rows: int

    def give_back(self, rows: Tensor) -> Tensor:
        """Sends the results for `rows`, in their order, to the ranks they came from; a collective."""
        if self._group is None:
            return rows.new_zeros((self._n_rows, *rows.shape[1:])).requires_grad_(rows.requires_grad)
        by_rank = torch.empty_like(rows).index_copy_(0, self._order, rows)
        own = _sent(by_rank, self._leaving, self._coming, self._group)
        return own if self._alike is None else self._alike.whole(own, self._n_rows)


@dataclass(frozen=True)
class Alike:
    group: ProcessGroup
    place: int  # this one's
    size: int

    def part(self, rows: Tensor) -> Tensor:
        """This rank's part: every rank has an equal share of each expert's rows, which are neighbours."""
        # Gradients only cover this part, and all ranks have the same rows: backward gathers.
        return linear(rows, self._own_rows, partial(self._all_rows, n_rows=len(rows)))

    def part_of_counts(self, counts: Tensor) -> Tensor:
        """How many rows of each expert are in this rank's part, given those of all rows."""
        before = (counts.cumsum(0) + (self.size - 1 - self.place)) // self.size
        return before.diff(prepend=before.new_zeros(1))

    def whole(self, part: Tensor, n_rows: int) -> Tensor:
        """All `n_rows` rows, joined from each rank's part; a collective."""
        # All ranks have the same gradients, so backward takes this rank's part.
        return linear(part, partial(self._all_rows, n_rows=n_rows), self._own_rows)

    def _own_rows(self, rows: Tensor) -> Tensor:
        return rows[self.place :: self.size].contiguous()

    def _all_rows(self, part: Tensor, n_rows: int) -> Tensor:
        most, of_row = -(-n_rows // self.size), part.shape[1:]
        padded = torch.cat((part, part.new_zeros((most - len(part), *of_row)))) if len(part) < most else part
        return gathered_rows(padded, self.group).view(self.size, most, *of_row).transpose(0, 1).flatten(0, 1)[:n_rows]


def _exchanged(rows: Tensor, coming: list[int], leaving: list[int], group: ProcessGroup) -> Tensor:
    """Exchanges rows: `leaving` counts rows sent to each rank, `coming` rows received from it."""
    received = rows.new_empty((sum(coming), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), coming, leaving, group=group)
    return received


def _sent(rows: Tensor, coming: list[int], leaving: list[int], group: ProcessGroup) -> Tensor:
    """The same with gradients, which go the other way."""
    return linear(
        rows,
        partial(_exchanged, coming=coming, leaving=leaving, group=group),
        partial(_exchanged, coming=leaving, leaving=coming, group=group),
    )


def split_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Leaves each rank of `mesh` its part of the experts whose stacked weights a module has as its parameters.

    Args:
        experts: A module whose own parameters are all `[n_experts, ...]`; they become DTensors. Its attribute
            `exchange` is then the `ExpertExchange` for its forward; it is None if each rank has all experts.
        mesh: The mesh that `apply_expert_parallel` receives.

    Raises:
        ConfigError: The module has no direct parameters, or the ranks cannot share the experts evenly.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    own = list(experts.named_parameters(recurse=False))
    if not own:
        raise ConfigError(
            f"{type(experts).__name__} has no direct parameters to share by experts. Give split_experts the module "
            "that has the stacked weights."
        )
    for name, weight in own:
        if weight.ndim == 0 or weight.shape[0] % mesh.size():
            raise ConfigError(
                f"{type(experts).__name__}.{name} has shape {list(weight.shape)}, and expert_parallel={mesh.size()} "
                "ranks cannot share its first dimension, the experts, evenly. Use a number of experts that it divides."
            )
        part = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(part, requires_grad=weight.requires_grad))
    vars(experts)["exchange"] = ExpertExchange(mesh)


@contextmanager
def without_exchange(model: nn.Module) -> Iterator[None]:
    """Inside, forwards of `model` give results of the right shapes without communication: no expert gets a token."""
    exchanges = _exchanges(model).values()
    for exchange in exchanges:
        exchange.is_off = True
    try:
        yield
    finally:
        for exchange in exchanges:
            exchange.is_off = False


@contextmanager
def whole_experts(model: nn.Module) -> Iterator[None]:
    """Inside, each rank has the weights of all experts of `model`, and forwards exchange nothing. No gradients."""
    with ExitStack() as stack:
        for part, exchange in _exchanges(model).items():
            split = [(name, p) for name, p in part.named_parameters(recurse=False) if is_shared_by_experts(p)]
            whole: dict[str, Tensor] = {name: nn.Parameter(plain(p), requires_grad=False) for name, p in split}
            stack.enter_context(with_parameters(part, whole))
            stack.callback(vars(part).update, exchange=exchange)
            vars(part)["exchange"] = None
        yield


def _exchanges(model: nn.Module) -> dict[nn.Module, ExpertExchange]:
    found = {part: vars(part).get("exchange") for part in model.modules()}
    return {part: exchange for part, exchange in found.items() if isinstance(exchange, ExpertExchange)}


def is_shared_by_experts(parameter: nn.Parameter) -> bool:
    return dim_of_part(parameter, "ep") is not None


def modules_of_experts(models: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules with own parameters that ranks share by experts."""
    parts = dict.fromkeys(part for model in models for part in model.modules())
    return [part for part in parts if any(map(is_shared_by_experts, part.parameters(recurse=False)))]


def shard_experts(models: Mapping[str, nn.Module], mesh: DeviceMesh, config: dict[str, Any]) -> None:
    """Wraps experts with `fully_shard`, in separate groups, to shard them beyond the expert-parallel ranks."""
    from torch.distributed.fsdp import fully_shard

    shards = mesh["dp_shard"].size()
    if shards == 1:  # left out of `fully_shard`: `step` averages what copies there are
        return
    dims = ("dp_replicate", "dp_shard") if mesh["dp_replicate"].size() > 1 else ("dp_shard",)
    for module in modules_of_experts(models.values()):
        placement = partial(_placement, shards=shards, owner=type(module).__name__)
        fully_shard(module, mesh=mesh[dims], shard_placement_fn=placement, **config)


def _placement(parameter: nn.Parameter, *, shards: int, owner: str) -> Any:
    """Along a dimension that can be shared evenly; the first is that of the experts."""
    from torch.distributed.tensor import Shard

    for dim in range(1, parameter.ndim):
        if parameter.shape[dim] % shards == 0:
            return Shard(dim)
    raise ConfigError(
        f"a weight {list(parameter.shape)} of {owner} cannot be sharded evenly over {shards} ranks, in addition to its "
        "experts over expert_parallel. Use a width that they divide, or another dp_shard."
    )


Scores = Literal["sigmoid", "softmax"]


class MoE(nn.Module):
    """A mixture of gated experts that replaces a block's feed-forward network.

    Args:
        width: Features of a token.
        hidden: Features inside each expert.
        n_experts: Experts to choose from.
        top_k: Experts of each token.
        n_shared: Shared experts that every token also uses, as one of `n_shared * hidden` features.
        scores: A token's affinities: "sigmoid" of each logit (DeepSeek-V3), or "softmax" over all (Mixtral).
        normalize: Whether the weights of a token's experts are divided by their sum.
        scale: Multiplier of the weights.
        balance_rate: Change of a bias per optimizer step; 0 leaves biases as they are.

    Attributes:
        router: Logits of the experts, computed in float32 at least.
        experts: Those to choose from.
        shared: Those of every token; None without.
        balance_bias: `[n_experts]`, a buffer of checkpoints: what is added to scores to choose by.
        loads: `[n_experts]`, int64: tokens of each expert in this rank's forwards since the last optimizer step.

    Raises:
        ConfigError: A size is below 1, `top_k` is above `n_experts`, or `balance_rate` is below 0.
    """

    balance_bias: Tensor
    loads: Tensor

    def __init__(
        self,
        width: int,
        hidden: int,
        n_experts: int,
        top_k: int,
        *,
        n_shared: int = 0,
        scores: Scores = "sigmoid",
        normalize: bool = True,
        scale: float = 1.0,
        balance_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        for name, size in {"width": width, "hidden": hidden, "n_experts": n_experts, "top_k": top_k}.items():
            check_integer(name, size, minimum=1)
        check_integer("n_shared", n_shared, minimum=0)
        check_choice("scores", scores, get_args(Scores))
        check_instance("normalize", normalize, bool)
        if top_k > n_experts:
            raise ConfigError(
                f"top_k={top_k} experts of each token, but there are n_experts={n_experts}. Use top_k of 1 to "
                f"{n_experts}."
            )
        check_between("balance_rate", balance_rate, low=0)
        self.n_experts, self.top_k, self.scores = n_experts, top_k, scores
        self.normalize, self.scale, self.balance_rate = normalize, scale, balance_rate
        self.router = nn.Linear(width, n_experts, bias=False)
        self.experts = GatedExperts(n_experts, width, hidden)
        self.shared = SharedExperts(width, n_shared * hidden) if n_shared else None
        self.register_buffer("balance_bias", torch.zeros(n_experts))
        self.register_buffer("loads", torch.zeros(n_experts, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens `[..., width]` through their experts; the same shape."""
        width = self.router.in_features  # compiled for changing sizes, PyTorch 2.13 loses that of `x`
        tokens = x.reshape(-1, width)
        weights, chosen = self._route(tokens)
        by_expert, order = chosen.flatten().sort(stable=True)
        following = torch.arange(1, self.n_experts + 1, device=x.device)
        counts = torch.searchsorted(by_expert, following).diff(prepend=following.new_zeros(1))
        if self.training and self.router.weight.requires_grad:
            self.loads.add_(counts)
        rows = self.experts(tokens[order // self.top_k], counts)
        of_tokens = torch.empty_like(rows).index_copy_(0, order, rows).view(-1, self.top_k, width)
        out = (of_tokens * weights.unsqueeze(-1)).sum(1).to(rows.dtype)
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out.view(x.shape)

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of each token's experts, and their numbers: `[n, top_k]` each."""
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        with nullcontext() if tokens.is_meta else torch.autocast(tokens.device.type, enabled=False):
            logits = F.linear(tokens.to(dtype), self.router.weight.to(dtype))
            scores = logits.sigmoid() if self.scores == "sigmoid" else logits.softmax(-1)
            chosen = (scores.detach() + self.balance_bias).topk(self.top_k, sorted=False).indices
            weights = scores.gather(1, chosen)
            if self.normalize:
                total = weights.sum(-1, keepdim=True)  # of sigmoids that underflow: 0, and so are the weights
                weights = weights / total.clamp(min=torch.finfo(total.dtype).tiny)
            return weights * self.scale, chosen

    @torch.no_grad()
    def balance(self, loads: Tensor) -> None:
        """Moves the biases after an optimizer step by its `loads` `[n_experts]` on all ranks, and counts from zero."""
        above = loads * self.n_experts - loads.sum()  # whole numbers, so exact
        self.balance_bias.sub_(above.sign().to(self.balance_bias.dtype), alpha=self.balance_rate)
        self.loads.zero_()


class SharedExperts(nn.Module):
    """A gated network that all tokens use."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens `[..., width]`; the same shape."""
        return cast(Tensor, self.down(F.silu(self.gate(x)) * self.up(x)))


class GatedExperts(nn.Module):
    """Gated feed-forward networks of one shape: `down(silu(gate(x)) * up(x))`, without biases (Shazeer, 2020,
    arXiv:2002.05202).

    Args:
        n_experts: How many there are.
        width: Features of a row.
        hidden: Features inside each.

    Attributes:
        gate: `[n_experts, hidden, width]`, each expert's as in an `nn.Linear`.
        up: The same.
        down: `[n_experts, width, hidden]`.
        exchange: Between the ranks that share the experts; None where each rank has all.
    """

    exchange: ExpertExchange | None = None

    def __init__(self, n_experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(n_experts, hidden, width))
        self.up = nn.Parameter(torch.empty(n_experts, hidden, width))
        self.down = nn.Parameter(torch.empty(n_experts, width, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws each expert's weights as `nn.Linear` does."""
        for weight in self.parameters():
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Each of `rows`, `[n, width]` and sorted by expert, through its expert; `counts` are the rows of each."""
        if self.exchange is None:
            return gated(rows, counts, self.gate, self.up, self.down)
        if torch.is_autocast_enabled(rows.device.type):
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))  # halves the traffic
        gate, up, down = (self.exchange.local(weight) for weight in (self.gate, self.up, self.down))
        own = self.exchange.send(rows, counts)
        return own.give_back(gated(own.rows, own.counts, gate, up, down))


def gated(rows: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """`rows` `[n, width]`, sorted by expert, through stacked gated networks; `counts` are the rows of each."""
    if _has_grouped_product(rows, gate):  # nothing is read on the host
        if torch.is_autocast_enabled(rows.device.type):  # which does not know this function
            dtype = torch.get_autocast_dtype(rows.device.type)
            rows, gate, up, down = (each.to(dtype) for each in (rows, gate, up, down))
        apply = partial(_grouped, ends=counts.cumsum(0).to(torch.int32))
        return apply(F.silu(apply(rows, gate)) * apply(rows, up), down)
    # Tensors without values show what is computed, and not how many rows an expert has.
    sizes = counts.tolist() if has_values(counts) else even_parts(len(rows), len(counts))
    parts = zip(rows.split(sizes), gate.unbind(), up.unbind(), down.unbind(), strict=True)
    return torch.cat([F.linear(F.silu(F.linear(part, g)) * F.linear(part, u), d) for part, g, u, d in parts])


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """One product for all experts."""
    return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)


def _has_grouped_product(rows: Tensor, weights: Tensor) -> bool:
    """Whether there is a kernel: on CUDA in bfloat16, of rows that are whole times 16 bytes."""
    if rows.device.type != "cuda":
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else rows.dtype
    return dtype is torch.bfloat16 and all(size % 8 == 0 for size in weights.shape[1:])


class ExpertBalance:
    def __init__(
        self, models: Mapping[str, nn.Module], world: World, log: Callable[[dict[str, Tensor]], None] | None
    ) -> None:
        named = {part: path for name, model in models.items() for path, part in model.named_modules(prefix=name)}
        self.layers = {path: part for part, path in named.items() if isinstance(part, MoE)}
        self._sizes = [layer.n_experts for layer in self.layers.values()]
        self._world, self._log = world, log
        self.logged = list(self.layers)
        if log is not None and world.stages > 1:
            of_ranks = world.all_gather_object(self.logged)
            self.logged = list(dict.fromkeys(path for of_rank in of_ranks for path in of_rank))

    @torch.no_grad()
    def update(self) -> None:
        """Moves the biases by what the window's forwards counted, and logs how even the loads were; a collective."""
        evenness: dict[str, Tensor] = {}
        if self.layers:
            loads = torch.cat([layer.loads for layer in self.layers.values()])
            if self._world.averaging_group() is not None:
                dist.all_reduce(loads, group=self._world.averaging_group())
            for (path, layer), of_layer in zip(self.layers.items(), loads.split(self._sizes), strict=True):
                layer.balance(of_layer)
                if self._log is not None:
                    mean = of_layer.sum().clamp(min=1) / of_layer.numel()
                    evenness[path] = torch.stack((of_layer.amax(), of_layer.amin())) / mean
        if self._log is not None:
            none = torch.zeros(2, device=self._world.device)
            of_all = torch.stack([evenness.get(path, none) for path in self.logged])
            if (stages := self._world.stage_group()) is not None:
                dist.all_reduce(of_all, dist.ReduceOp.MAX, group=stages)  # all have those of models that are whole
            for path, (largest, smallest) in zip(self.logged, of_all, strict=True):
                self._log({f"experts/{path}/max_load": largest, f"experts/{path}/min_load": smallest})
