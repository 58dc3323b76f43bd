"""MoE: a feed-forward layer of many experts, of which each token uses a few. No token is dropped."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal, get_args

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from dream_trainer.checks import check_boolean, check_choice, check_integer
from dream_trainer.errors import ConfigError
from dream_trainer.parallel.gated_experts import GatedExperts

Scores = Literal["sigmoid", "softmax"]


class MoE(nn.Module):
    """A mixture of gated experts, in place of a block's feed-forward network.

    Args:
        width: Features of a token.
        hidden: Features inside of each expert.
        n_experts: Experts to choose from.
        top_k: Experts of each token.
        n_shared: Experts that every token uses beside them, as one of `n_shared * hidden` features.
        scores: What a token's affinities are: "sigmoid" of each logit (DeepSeek-V3), or "softmax" over all (Mixtral).
        normalize: Whether the weights of a token's experts are divided by their sum.
        scale: What the weights are multiplied by.
        balance_rate: How much a bias moves per optimizer step; 0 leaves biases as they are.

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
        check_boolean("normalize", normalize)
        if top_k > n_experts:
            raise ConfigError(
                f"top_k={top_k} experts of each token, but there are n_experts={n_experts}. Use top_k of 1 to "
                f"{n_experts}."
            )
        if not balance_rate >= 0:
            raise ConfigError(
                f"balance_rate={balance_rate} is not a rate. Use one such as 0.001, or 0 for no balancing."
            )
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

    def extra_repr(self) -> str:
        """What its parts do not say."""
        return f"top_k={self.top_k}, scores={self.scores}, balance_rate={self.balance_rate}"


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
