"""MoE: a feed-forward layer of many experts; each token uses a few. No token is dropped."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Literal, get_args

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from dream_trainer.checks import check_between, check_choice, check_instance, check_integer
from dream_trainer.compat.pytorch import has_values
from dream_trainer.distributed.world import World
from dream_trainer.errors import ConfigError
from dream_trainer.parallel.expert_exchange import ExpertExchange
from dream_trainer.parallel.micro_batches import even_parts

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
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


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
        own = list(self.layers)
        self._logged = own
        if log is not None and world.stages > 1:
            self._logged = list(dict.fromkeys(path for of_rank in world.all_gather_object(own) for path in of_rank))

    def __bool__(self) -> bool:
        return bool(self.layers or self._logged)

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
            of_all = torch.stack([evenness.get(path, none) for path in self._logged])
            if (stages := self._world.stage_group()) is not None:
                dist.all_reduce(of_all, dist.ReduceOp.MAX, group=stages)  # all have those of models that are whole
            for path, (largest, smallest) in zip(self._logged, of_all, strict=True):
                self._log({f"experts/{path}/max_load": largest, f"experts/{path}/min_load": smallest})
