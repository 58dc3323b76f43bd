"""Which of PyTorch's optimizers cannot step sharded parameters, and why.

Measured with torch 2.13 in float64, three steps under `fully_shard` on 2 ranks and on a 2 x 2 mesh with tensor
parallelism, against one process: Adam, AdamW, SGD, Adagrad, RMSprop, NAdam, RAdam, Adamax, Adadelta and ASGD agree to
4e-14. PyTorch's Muon orthogonalises whole matrices, not shards, but gathers them in each product; ours (muon.py) once a
step. PyTorch's other ones are below.
"""

from __future__ import annotations

import torch
from torch.optim import LBFGS, SGD, Adagrad, Optimizer, Rprop, SparseAdam

from dream_trainer.errors import ConfigError

UNSHARDABLE: dict[type[Optimizer], str] = {
    torch.optim.Adafactor: "takes norms of rows and columns in place, which DTensor refuses",
    LBFGS: "flattens all parameters into one vector, which sharded ones cannot",
    Rprop: "assigns to elements picked by a mask, which DTensor has no rule for",
    SparseAdam: "needs sparse gradients, which fully_shard does not reduce",
}
"""Why each of these cannot step DTensors."""

UNSHARDABLE_FUSED: tuple[type[Optimizer], ...] = (SGD, Adagrad)
"""Optimizers whose fused kernel has no rule for DTensors."""


def refuse_unshardable(optimizer: Optimizer) -> None:
    """Raises where PyTorch would fail at the first step, or step wrong.

    Args:
        optimizer: Any, built by name or by hand.

    Raises:
        ConfigError: It has sharded parameters (DTensors) and cannot step them.
    """
    from torch.distributed.tensor import DTensor

    sharded = [g for g in optimizer.param_groups if any(isinstance(p, DTensor) for p in g["params"])]
    if not sharded:
        return
    refuse_unshardable_class(type(optimizer))
    if isinstance(optimizer, UNSHARDABLE_FUSED) and any(group.get("fused") for group in sharded):
        name = type(optimizer).__name__
        raise ConfigError(
            f"{name}(fused=True) cannot step sharded parameters: its kernel has no rule for DTensors. "
            f"Use {name}(foreach=True)."
        )


def refuse_unshardable_class(cls: type[Optimizer]) -> None:
    """Raises ConfigError if no optimizer of this class can step sharded parameters."""
    for kind, reason in UNSHARDABLE.items():
        if issubclass(cls, kind):
            alone = "" if kind is LBFGS else ", or train in one process"  # where its closure is refused
            raise ConfigError(
                f"torch.optim.{kind.__name__} cannot step sharded parameters: it {reason}. Use AdamW, Adam, SGD, "
                f"Adagrad, RMSprop, NAdam, or Muon of dream_trainer.optim{alone}."
            )
