"""Models that between them do what constructors do: draw, compute, tie, copy, view, read back and initialise late."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations


class Block(nn.Module):
    """A pre-norm MLP block with layer scale and a drop rate from a schedule."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(2 * width, width, bias=False)
        self.gamma = nn.Parameter(1e-5 * torch.ones(width))
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.proj(F.gelu(self.up(self.norm(x))))


class NanoGPT(nn.Module):
    """Tied head, rope table, causal mask, `self.apply` and scaled residual projections, all in the constructor."""

    def __init__(self, vocabulary: int = 24, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.pos = nn.Parameter(torch.empty(8, width))
        rates = torch.linspace(0, 0.1, depth).tolist()
        self.blocks = nn.ModuleList(Block(width, rate) for rate in rates)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight
        frequencies = 1.0 / (10000 ** (torch.arange(0, width, 2).float() / width))
        self.register_buffer("rope", torch.outer(torch.arange(8.0), frequencies).cos(), persistent=False)
        self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu_(1))
        self.register_buffer("clip_mask", torch.empty(8, 8).fill_(float("-inf")).triu_(1))
        self.scale = torch.tensor(1.5)
        self.tables = [torch.arange(3), torch.empty(4).fill_(2.0)]
        self.apply(self._init)
        for name, parameter in self.named_parameters():
            if name.endswith("proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth))
        nn.init.trunc_normal_(self.pos, std=0.5)
        self.wte.weight.no_decay = True

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.pos[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class EveryInit(nn.Module):
    """Each function of torch.nn.init once."""

    def __init__(self) -> None:
        super().__init__()
        calls = {
            "uniform": nn.init.uniform_,
            "normal": nn.init.normal_,
            "trunc_normal": nn.init.trunc_normal_,
            "constant": lambda t: nn.init.constant_(t, 0.3),
            "ones": nn.init.ones_,
            "zeros": nn.init.zeros_,
            "eye": nn.init.eye_,
            "xavier_uniform": nn.init.xavier_uniform_,
            "xavier_normal": nn.init.xavier_normal_,
            "kaiming_uniform": nn.init.kaiming_uniform_,
            "kaiming_normal": nn.init.kaiming_normal_,
            "orthogonal": nn.init.orthogonal_,
            "sparse": lambda t: nn.init.sparse_(t, 0.25),
        }
        for name, call in calls.items():
            setattr(self, name, nn.Parameter(torch.empty(12, 8)))
            call(getattr(self, name))
        self.dirac = nn.Parameter(torch.empty(4, 4, 3))
        nn.init.dirac_(self.dirac)


class Views(nn.Module):
    """Slices, chunks, copies across blocks, `.data` writes, foreach, non-contiguous and complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        with torch.no_grad():
            self.second.weight.copy_(self.first.weight)
            self.first.weight[3].zero_()
            self.first.weight[1:3].normal_()
            query, key = self.second.weight.chunk(2)
            key.copy_(query * 2)
            self.second.bias[torch.tensor([0, 2])] = torch.tensor([7.0, 8.0])
            self.second.bias[self.second.bias < 0] = 0.25
            torch._foreach_mul_(list(self.first.parameters()), 0.5)
            torch._foreach_add_([self.first.bias], [torch.arange(6.0)])
        self.second.weight.data.mul_(0.25)
        self.transposed = nn.Parameter(torch.empty(4, 6).t())
        nn.init.uniform_(self.transposed)
        self.channels_last = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.complex = nn.Parameter(torch.empty(3, 3, dtype=torch.complex64))
        with torch.no_grad():
            self.complex.real.normal_()
            self.complex.imag.fill_(2)
        self.experts = nn.Parameter(torch.empty(3, 4, 5))
        for expert in self.experts.unbind():
            nn.init.kaiming_uniform_(expert, a=math.sqrt(5))
        self.copied = nn.Parameter(self.first.weight.detach().clone().flatten().view_as(self.first.weight))
        self.replaced = nn.Parameter(torch.empty(2, 2))
        self.replaced.data = torch.eye(2)
        self.bf16 = nn.Linear(4, 4).bfloat16()
        self.fp64 = nn.Linear(4, 4, dtype=torch.float64)
        self.factor = nn.Parameter(torch.linalg.qr(torch.empty(5, 5).normal_())[0] * 0.5)
        self.frozen = nn.Parameter(torch.empty(3).fill_(1.0), requires_grad=False)
        total = self.first.weight.abs().sum().item()
        self.register_buffer("norm", torch.tensor(total))
        self.norm.add_(self.fp64.weight.detach().sum().float())
        self.register_buffer("big", torch.ones(1 << 20).cumsum(0)[::4096].clone())
        self.register_buffer("plain_numpy", torch.from_numpy(self.first.weight.detach().numpy().copy()))


class Flat(nn.Module):
    """Parameters that are pieces of one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        vector = nn.utils.parameters_to_vector(self.layers.parameters())
        nn.utils.vector_to_parameters(vector * 2 + 1, self.layers.parameters())


class Late(nn.Module):
    """Leaves its weight to `init_weights`, as torchtitan's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.empty(5, 4))

    def init_weights(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.constant_(self.inner.weight, 0.5)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)


FAMILIES = {
    "linear": lambda: nn.Linear(3, 4),
    "embedding": lambda: nn.Embedding(7, 5, padding_idx=2),
    "conv": lambda: nn.Conv2d(3, 4, 3),
    "batch_norm": lambda: nn.BatchNorm2d(3),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "encoder": encoder,
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 4)),
    "every_init": EveryInit,
    "nano_gpt": NanoGPT,
    "views": Views,
    "flat": Flat,
    "late": Late,
}
