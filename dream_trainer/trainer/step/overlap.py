"""Overlap: buckets that cross ranks while the backward which fills them still runs.

A bucket leaves in the window's last micro-batch, in the parameters' order turned round; the rest leaves in `step`.
It is final: a later change of it cannot be seen by other ranks and is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer.compat.pytorch import write_count
from dream_trainer.errors import StepError
from dream_trainer.trainer.step.buckets import Averaging, Bucket, Sent, weight_slots

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from dream_trainer.distributed.world import World

_REMEDY = "Or set device_parameters.overlap_reduce=False, which averages in step()."


class OverlappedAveraging(Averaging):
    """Averages gradients over ranks from within the backward; every rank builds it at the same place."""

    def __init__(self, buckets: Sequence[Bucket], world: World) -> None:
        group, meet_others = world.further_group(), (None, world.step_group, world.data_group)
        # The ranks that have the same part do nothing else together.
        super().__init__([replace(b, group=group) if b.group in meet_others else b for b in buckets], world)
        self._window: list[tuple[Bucket, list[nn.Parameter]]]
        self._number: dict[Tensor, int]  # the place in `_window` of each parameter
        self._awaited: list[set[Tensor]]
        self._sent: list[Sent]
        self._early: list[tuple[nn.Parameter, Tensor, int]]  # values sent in a backward, as they were then
        self._begin()
        self._hooks: dict[Tensor, RemovableHandle] = {}

    @property
    def is_on_the_way(self) -> bool:
        return bool(self._sent)

    def begin_last_batch(self) -> None:
        """The window's last micro-batch begins: from now on a gradient is complete when a backward has added to it."""
        self._window = self._taking()
        self._number = {p: number for number, (_, parameters) in enumerate(self._window) for p in parameters}
        self._awaited = [set(parameters) for _, parameters in self._window]
        for p in (p for awaited in self._awaited for p in awaited):
            if p.requires_grad and p not in self._hooks:  # a frozen one takes no hook, until it is trained
                self._hooks[p] = p.register_post_accumulate_grad_hook(self._gradient_is_there)

    def run(self, weight: Tensor | float | None) -> Tensor | None:
        if not self._window:  # the plan was made in this very step
            self.begin_last_batch()
        self._window += self._trained_since()
        slots = None if weight is None else weight_slots(weight, self._world)
        carrier = None if slots is None else self._carrier(self._window)
        while len(self._sent) < len(self._window):
            self._send_next(slots if self._window[len(self._sent)][0] is carrier else None)
        self._refuse_changes()
        for sent in self._sent:
            sent.receive()
        self._begin()
        self._let_sleep()
        return None if slots is None else self._total(slots, is_carried=carrier is not None)

    def forget(self) -> None:
        """Drops what is on its way; a collective in a window's last batch."""
        while len(self._sent) < len(self._window):
            self._send_next(None)
        for sent in self._sent:
            sent.wait()
        self._begin()

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self.forget()

    def _begin(self) -> None:
        self._window, self._number, self._awaited, self._sent, self._early = [], {}, [], [], []

    def _trained_since(self) -> list[tuple[Bucket, list[nn.Parameter]]]:
        """What `begin_last_batch` did not see, since it was unfrozen in the micro-batch; it leaves by itself."""
        late = [(bucket, [p for p in parameters if p not in self._number]) for bucket, parameters in self._taking()]
        return [(bucket, parameters) for bucket, parameters in late if parameters]

    def _send_next(self, tail: Tensor | None) -> None:
        number = len(self._sent)
        self._sent.append(self._send(*self._window[number], tail, place=number))

    @torch.no_grad()
    def _gradient_is_there(self, parameter: Tensor) -> None:
        number = self._number.get(parameter)
        if number is None:
            return
        if parameter not in self._awaited[number]:  # whether or not its bucket has left, which depends on sizes
            raise StepError(
                f"a second backward in the window's last micro-batch added to a gradient of shape "
                f"{tuple(parameter.shape)}, which leaves for the other ranks after the first. Add the losses and call "
                f"backward once. {_REMEDY}"
            )
        self._awaited[number].remove(parameter)
        while len(self._sent) < len(self._window) - 1 and not self._awaited[len(self._sent)]:
            parameters = self._window[len(self._sent)][1]
            self._early += [(p, p.grad, write_count(p.grad)) for p in parameters if p.grad is not None]
            self._send_next(None)

    def _refuse_changes(self) -> None:
        for p, grad, count in self._early:
            if p.grad is not grad or write_count(grad) != count:
                raise StepError(
                    f"a gradient of shape {tuple(p.shape)} was changed between backward and step(), after it had been "
                    f"sent to the other ranks. Change gradients in pre_optimizer_step. {_REMEDY}"
                )
