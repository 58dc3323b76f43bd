"""The mixture of experts: against each token through its experts, one by one, and what keeps their loads even."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.api import ConfigError, MoE, _grouped, recompute

WIDTH, HIDDEN = 6, 10


def one_by_one(layer: MoE, x: Tensor) -> Tensor:
    """What a mixture is by its definition: each token by itself."""
    out = []
    for token in x.reshape(-1, WIDTH):
        logits = layer.router.weight @ token
        scores = torch.sigmoid(logits) if layer.scores == "sigmoid" else torch.softmax(logits, 0)
        chosen = sorted(range(layer.n_experts), key=lambda e: -float(scores[e] + layer.balance_bias[e]))[: layer.top_k]
        total = sum(scores[e] for e in chosen) if layer.normalize else 1.0
        mixed = torch.zeros_like(token)
        for e in chosen:
            gate, up, down = (weight[e] for weight in layer.experts.parameters())
            mixed = mixed + scores[e] / total * layer.scale * (down @ (F.silu(gate @ token) * (up @ token)))
        if layer.shared is not None:
            mixed = mixed + layer.shared(token)
        out.append(mixed)
    return torch.stack(out).view(x.shape)


def gradients(layer: nn.Module, compute: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    weights = dict(layer.named_parameters())
    out = compute(x)
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()
    found = torch.autograd.grad(loss, [x, *weights.values()])
    return dict(zip(["x", *weights], found, strict=True)) | {"out": out.detach()}


@pytest.mark.parametrize(
    "options",
    [
        {"n_experts": 4, "top_k": 2, "n_shared": 2},
        {"n_experts": 5, "top_k": 2, "scores": "softmax", "normalize": False, "scale": 2.5},
        {"n_experts": 64, "top_k": 3},  # most without a token
        {"n_experts": 3, "top_k": 3, "scores": "softmax"},
        {"n_experts": 1, "top_k": 1},
    ],
    ids=str,
)
def test_a_mixture_is_each_token_through_its_own_experts(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = MoE(WIDTH, HIDDEN, **options).double()
    layer.balance_bias += torch.randn(layer.n_experts) / 10
    x = torch.randn(3, 7, WIDTH, dtype=torch.float64)
    found = gradients(layer, layer, x)
    expected = gradients(layer, lambda x: one_by_one(layer, x), x)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)
    assert found["out"].shape == x.shape
    assert layer.loads.sum() == 21 * layer.top_k


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_product_is_the_products_of_the_experts(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, weights = torch.randn(9, 16, dtype=dtype), torch.randn(4, 8, 16, dtype=dtype)
    counts = torch.tensor([3, 0, 6, 0])
    one_by_one = [part @ weight.T for part, weight in zip(rows.split(counts.tolist()), weights, strict=True)]
    torch.testing.assert_close(_grouped(rows, weights, counts.cumsum(0).to(torch.int32)), torch.cat(one_by_one))


def test_biases_move_towards_even_loads() -> None:
    torch.manual_seed(0)
    layer = MoE(WIDTH, HIDDEN, 8, 2, balance_rate=0.01).double()
    x = torch.randn(400, WIDTH, dtype=torch.float64) + 1
    layer(x)
    uneven, loads = layer.loads.max(), layer.loads.clone()
    layer.balance(loads)
    assert torch.equal(layer.balance_bias, 0.01 * (loads < 100).double() - 0.01 * (loads > 100).double())
    assert not layer.loads.any()
    for _ in range(100):
        layer(x)
        layer.balance(layer.loads.clone())
    layer(x)
    assert layer.loads.max() < 120 < 150 < uneven


def test_only_training_counts_and_what_is_computed_again_counts_once() -> None:
    layer = MoE(WIDTH, HIDDEN, 4, 2)
    x = torch.randn(5, WIDTH, requires_grad=True)
    layer.eval()(x)
    layer.train().router.requires_grad_(False)
    layer(x)
    assert not layer.loads.any()
    layer.router.requires_grad_(True)
    block = nn.Sequential(layer)
    for keep in ((), ("aten.mm.default",)):
        recompute(block, keep)
        block(x).sum().backward()
        assert layer.loads.sum() == 10
        layer.balance(layer.loads.clone())


def test_under_autocast_the_router_stays_in_float32() -> None:
    torch.manual_seed(0)
    layer = MoE(WIDTH, HIDDEN, 4, 2).requires_grad_(False)
    x = torch.randn(64, WIDTH)
    weights, chosen = layer._route(x)
    with torch.autocast("cpu", torch.bfloat16):
        again, same = layer._route(x)
        assert layer(x).dtype == torch.bfloat16
    assert torch.equal(weights, again)
    assert torch.equal(chosen, same)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 5}, "top_k=5 experts of each token, but there are n_experts=4. Use top_k of 1 to 4"),
        ({"scores": "relu"}, "scores='relu' is not known. Use 'sigmoid' or 'softmax'"),
        ({"balance_rate": -1.0}, "balance_rate=-1.0 is not a number of at least 0"),
        ({"normalize": 1}, "normalize=1 is of type int. Use True or False"),
    ],
    ids=str,
)
def test_what_cannot_be_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        MoE(WIDTH, HIDDEN, **({"n_experts": 4, "top_k": 2} | options))
