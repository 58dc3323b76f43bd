"""Loss scaling for fp16, by the rule of `torch.amp.GradScaler` (arXiv:1710.03740).

An overflow shows in the gradient norm, which all ranks have in common, so all agree without communication.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

INITIAL_SCALE = 2.0**16
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-24, 2.0**100
GROWTH_INTERVAL = 2000
# Thousands of tokens times the initial scale would overflow in the first windows. A power of two, so that it is exact.
WEIGHT_DIVISOR = 1024.0


class LossScale:
    """The scale of a run, updated once per accumulation window."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), INITIAL_SCALE, device=device)  # 0-dim float32
        self._windows = torch.zeros((), device=device)  # without an overflow since the scale last changed
        self._overflowed = torch.zeros((), dtype=torch.bool, device=device)
        self._one = torch.ones((), device=device)

    def scaled(self, loss: Tensor, *, is_weighted: bool) -> Tensor:
        """The scaled loss for `backward`, times its weight if it has one."""
        return loss * (self.scale / WEIGHT_DIVISOR if is_weighted else self.scale)

    def inverse(self, *, is_weighted: bool) -> Tensor:
        return (WEIGHT_DIVISOR if is_weighted else 1.0) / self.scale

    def note(self, norm: Tensor) -> Tensor:
        """Takes a gradient norm; returns whether it is not finite at a scale below 1, which is then not the cause."""
        bad = ~torch.isfinite(norm)
        self._overflowed |= bad
        return bad & (self.scale < 1)

    def update(self) -> None:
        """Ends a window: scales down if a norm in it was not finite, up if none was for `GROWTH_INTERVAL` windows."""
        windows = torch.where(self._overflowed, 0.0, self._windows + 1)
        is_long = windows >= GROWTH_INTERVAL
        factor = torch.where(self._overflowed, 0.5, torch.where(is_long, 2.0, self._one))
        self.scale.mul_(factor).clamp_(_SMALLEST_SCALE, _LARGEST_SCALE)
        self._windows = torch.where(is_long, 0.0, windows)
        self._overflowed.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint; equal on all ranks. Waits for the device."""
        return {"scale": float(self.scale), "windows": int(self._windows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale.fill_(state["scale"])
        self._windows.fill_(state["windows"])
