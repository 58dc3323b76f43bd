"""Handling of NaN and infinite gradient norms: the policies "raise", "skip" and "retry". On an accelerator fused
optimizers skip a step on the device by `found_inf`. The norms are only read every `SETTLE_EVERY` steps. Until then
"raise" lets no further step change anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dream_trainer.compat.pytorch import reading_waits
from dream_trainer.config.training_parameters import TrainingParameters
from dream_trainer.distributed.world import World
from dream_trainer.errors import NonFiniteError
from dream_trainer.trainer.counters import Counters

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
        factor = torch.where(self._overflowed, 0.5, torch.where(is_long, 2.0, 1.0))
        self.scale.mul_(factor).clamp_(_SMALLEST_SCALE, _LARGEST_SCALE)
        self._windows = torch.where(is_long, 0.0, windows)
        self._overflowed.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint; equal on all ranks. Waits for the device."""
        return {"scale": float(self.scale), "windows": int(self._windows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale.fill_(state["scale"])
        self._windows.fill_(state["windows"])


SETTLE_EVERY = 50
_EMPTY, _OVERFLOW = -1.0, -2.0


class RetryWindow(BaseException):
    """The window's gradients were not finite and the policy is to run it again."""


class NonFiniteGuard:
    """Watches the gradient norms of a run. Under fp16 an overflow is skipped as long as a lower scale may help."""

    def __init__(
        self,
        parameters: TrainingParameters,
        world: World,
        progress: Counters,
        loss_scale: LossScale | None,
        warn_once: Callable[[str, str], None],
    ) -> None:
        self._policy, self._limit = parameters.on_nonfinite, parameters.max_nonfinite
        self._world, self._progress, self._warn_once = world, progress, warn_once
        self._loss_scale = loss_scale
        device = world.parameter_device
        self._found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self._latch = torch.zeros((), dtype=torch.float32, device=device)
        # A tensor: an operation with a Python number takes more than twice as long.
        self._zero = torch.zeros((), dtype=torch.float32, device=device)
        self._norms: list[Tensor] = []
        self._steps: list[int] = []
        self._in_a_row = 0
        self.reads_the_host = self._policy == "retry" or not reading_waits(device)
        self._may_skip = False
        self.left_out: list[Callable[[Optimizer], None]] = []  # under "skip", while gradients exist

    def read_on_the_host(self, optimizers: Sequence[Optimizer]) -> None:
        """From now on reads the norm at each step of all optimizers, since these cannot skip one on the device."""
        self.settle()
        self.reads_the_host = True
        self._may_skip = False
        names = ", ".join(sorted({type(optimizer).__name__ for optimizer in optimizers}))
        if self._world.device.type != "cpu":
            self._warn_once(
                f"host-{names}",
                f"{names} cannot skip a step on the device, so the gradient norm is read at each step. Pass "
                "fused=True where the optimizer has it.",
            )

    def try_step(self, optimizers: Sequence[Optimizer], norm: Tensor, empty: Tensor | bool, *, can_rerun: bool) -> bool:
        """Steps unless the norm is not finite or the total weight is 0; returns whether the host knows of a skip."""
        if empty is True or (self.reads_the_host and bool(empty)):
            self._progress.skipped_steps += 1
            return True
        if self.reads_the_host:
            return self._host_step(optimizers, norm, can_rerun)
        self._device_step(optimizers, norm, empty)
        return False

    def _device_step(self, optimizers: Sequence[Optimizer], norm: Tensor, empty: Tensor | bool) -> None:
        # 0 * x is NaN exactly for the infinite and NaN x, and NaN != 0: cheaper than isfinite, and it latches when
        # summed.
        weighed = norm if not isinstance(empty, Tensor) else torch.where(empty, 0.0, norm)
        seen = norm
        if self._loss_scale is not None:
            hopeless = self._loss_scale.note(weighed)
            seen = torch.where(torch.isfinite(norm) | hopeless, norm, _OVERFLOW)
            if self._policy == "raise":
                self._latch.add_(torch.where(hopeless, norm, 0.0), alpha=0)
            torch.ne(self._latch + norm * self._zero, self._zero, out=self._found_inf)
        elif self._policy == "raise":
            torch.ne(self._latch.add_(weighed, alpha=0), self._zero, out=self._found_inf)
        else:
            torch.ne(norm * self._zero, self._zero, out=self._found_inf)
        if isinstance(empty, Tensor):
            torch.maximum(self._found_inf, empty.to(self._found_inf.dtype), out=self._found_inf)
            seen = torch.where(empty, _EMPTY, seen)
        self._may_skip = self._policy == "skip" or self._loss_scale is not None or isinstance(empty, Tensor)
        self._norms.append(seen)
        self._steps.append(self._step)
        for optimizer in optimizers:
            optimizer.found_inf = self._found_inf  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf  # type: ignore[attr-defined]

    def _host_step(self, optimizers: Sequence[Optimizer], norm: Tensor, can_rerun: bool) -> bool:
        value = float(norm)
        if math.isfinite(value):
            self._in_a_row = 0
            for optimizer in optimizers:
                optimizer.step()
            return False
        is_overflow = self._loss_scale is not None and not bool(self._loss_scale.note(norm))
        if is_overflow and not (self._policy == "retry" and can_rerun):
            self._progress.skipped_steps += 1
            return True
        if self._policy == "retry":
            if self._loss_scale is not None and can_rerun:
                self._loss_scale.update()
            if is_overflow:
                raise RetryWindow
            self._count_bad(value, self._step, "runs of one window")
            if not can_rerun:
                raise NonFiniteError(
                    f"the gradient norm is {value} in step {self._step}, after another optimizer "
                    'has stepped in the same window, which can therefore not be run again. Use on_nonfinite="skip".'
                )
            raise RetryWindow
        self._judge(value, self._step)
        for listener in self.left_out:
            for optimizer in optimizers:
                listener(optimizer)
        return True

    @property
    def _step(self) -> int:
        """The number that the running optimizer step will have: it is not counted yet."""
        return self._progress.global_step + 1

    @property
    def maybe_skipped(self) -> Tensor | None:
        """On the device, not 0 if the optimizers skipped the step just made; None if they did not."""
        return self._found_inf if self._may_skip else None

    def settle_when_full(self) -> None:
        if len(self._norms) >= SETTLE_EVERY:
            self.settle()

    def settle(self) -> None:
        """Looks at the kept norms now; waits for the device."""
        if not self._norms:
            return
        values, steps = torch.stack(self._norms).tolist(), self._steps
        self._norms, self._steps = [], []
        for value, step in zip(values, steps, strict=True):
            if value in (_EMPTY, _OVERFLOW):
                self._progress.skipped_steps += 1
            elif math.isfinite(value):
                self._in_a_row = 0
            else:
                self._judge(value, step)

    def _judge(self, value: float, step: int) -> None:
        if self._policy == "raise":
            raise NonFiniteError(
                f"the gradient norm of optimizer step {step} is {value}; the weights are those before that step. "
                'Lower the learning rate, clip gradients, look at the batch, or set on_nonfinite="skip".'
            )
        self._progress.skipped_steps += 1
        self._count_bad(value, step, "steps")

    def _count_bad(self, value: float, step: int, what: str) -> None:
        self._in_a_row += 1
        if self._in_a_row > self._limit:
            raise NonFiniteError(
                f"the gradient norm was {value} at step {step}, for more than max_nonfinite={self._limit} "
                f"{what} in a row. Lower the learning rate, clip gradients, or look at the data."
            )
