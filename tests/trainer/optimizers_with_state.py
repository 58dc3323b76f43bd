"""Optimizers that keep state where PyTorch's own do not: beside `state`, in lists, and of one rank alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer


class Lookahead(Optimizer):
    """Slow weights that lie beside `state`; saved by its own methods, in the order of the parameters."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.count = base, 0
        self.slow = [p.detach().clone() for group in base.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.count += 1
        parameters = [p for group in self.param_groups for p in group["params"]]
        if self.count % 2 == 0:
            for parameter, slow in zip(parameters, self.slow, strict=True):
                parameter.copy_(slow.lerp_(parameter, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict.pop("base"))
        self.param_groups = self.base.param_groups
        for slow, value in zip(self.slow, state_dict["slow"], strict=True):
            slow.copy_(value)
        self.count = state_dict["count"]


class Around(Optimizer):
    """An optimizer in an attribute, as SAM has it, that nobody's `state_dict` knows of."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.02})
        self.base_optimizer = AdamW(self.param_groups, lr=0.02)

    def step(self, closure: Any = None) -> None:
        self.base_optimizer.step()


class AroundAndLoads(Around):
    """The same, with a `load_state_dict` that forgets its base, as the one that many copied."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class Counting(SGD):
    """A rate that falls by a number which only `state_dict` knows."""

    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        rate = self.param_groups[0]["lr"]
        self.param_groups[0]["lr"] = rate / self.count
        super().step()
        self.param_groups[0]["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        super().load_state_dict(state_dict)


class Nested(Optimizer):
    """Lists, tuples and dicts of moments, and a key that is no parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        counts = self.state["counts"]
        counts["steps"] = counts.get("steps", 0) + 1
        for parameter in self.param_groups[0]["params"]:
            state, grad = self.state[parameter], parameter.grad
            if not state:
                state["moments"] = [torch.zeros_like(grad), (torch.zeros_like(grad), {"name": "second"})]
            first, (second, _) = state["moments"]
            first.lerp_(grad, 0.1)
            second.lerp_(first, 0.5)
            parameter.add_(second, alpha=-0.1 / counts["steps"])


class OfEachRank(Optimizer):
    """Second moments of rows and columns of what this rank has, in lists, as Shampoo and SOAP keep them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            own, grad = _local(parameter), _local(parameter.grad)
            if not grad.numel():
                continue  # this rank has nothing of it
            state = self.state[parameter]
            matrix = grad.reshape(grad.shape[0], -1)
            if not state:
                eye = [torch.eye(n, dtype=grad.dtype) for n in matrix.shape]
                state["factors"], state["norms"] = eye, []
            state["factors"][0].addmm_(matrix, matrix.T)
            state["factors"][1].addmm_(matrix.T, matrix)
            state["norms"].append(float(matrix.norm()))
            left, right = (torch.linalg.inv(factor) for factor in state["factors"])
            own.sub_((left @ matrix @ right).reshape(own.shape), alpha=0.05 / (1 + sum(state["norms"])))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.02)


Build = Callable[[nn.Module], Optimizer]

EXACT: dict[str, Build] = {
    "lookahead": lambda model: Lookahead(adamw(model.parameters())),
    "around": lambda model: Around(model.parameters()),
    "around and loads": lambda model: AroundAndLoads(model.parameters()),
    "counting": lambda model: Counting(model.parameters(), lr=0.1, momentum=0.9),
    "nested": lambda model: Nested(model.parameters()),
}
"""Optimizers that compute the same on any mesh."""

OF_EACH_RANK: dict[str, Build] = {"of each rank": lambda model: OfEachRank(model.parameters())}
