"""Deferred builds as the trainer does them, and draws replaced by known numbers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.api import Plan, Tape, default_init, materialize, remember


def planned(make: Callable[[], nn.Module], seed: int = 0) -> tuple[nn.Module, Plan]:
    """The model on meta, configured and initialised, and the plan that makes it real."""
    tape = Tape(seed)
    with tape.recording():
        model = make()
    default_init(model, tape)
    return model, remember({"model": model}, tape)


def deferred(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The whole cycle in one process."""
    model, plan = planned(make, seed)
    materialize({"model": model}, plan, "cpu")
    return model


class KnownDraws(TorchFunctionMode):
    """Replaces every random draw by a ramp, so that builds can be compared bit for bit."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("normal_", "uniform_", "kaiming_uniform_"):
            tensor = args[0] if args else kwargs["tensor"]
            with torch.no_grad():
                return tensor.zero_().add_(self.ramp(tensor))  # copy_ would look like loading
        if name == "randperm":
            return torch.arange(args[0]).flip(0)
        result = func(*args, **kwargs)
        return self.ramp(result) if name in ("randn", "rand", "randn_like") else result

    @staticmethod
    def ramp(like: Tensor) -> Tensor:
        return (torch.arange(like.numel()).reshape(like.shape) * 0.37).sin().to(like.dtype)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, ties and non-persistent ones included."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}
