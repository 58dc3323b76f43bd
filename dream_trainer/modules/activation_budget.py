"""Activation checkpointing with a budget: each block keeps all, what is expensive, or only what enters it.

A block is measured in its first forward with gradients, which it runs once more for that. It then chooses, so that the
blocks so far keep no more than a fraction of what they would keep without recomputation. Numbers are the same bits
whatever is chosen, so ranks need not agree, but where recomputing sends something of their own sizes: experts that
ranks share, which the config refuses beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Self, cast

import torch
import torch.nn as nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from dream_trainer.compat.kept_bytes import Held, Remembered, noted
from dream_trainer.compat.operations import operation
from dream_trainer.distributed.seeds import preserved_random_state
from dream_trainer.errors import ConfigError
from dream_trainer.modules.block_state import BlockState, Moves
from dream_trainer.modules.class_change import change_class, own_class
from dream_trainer.modules.recompute import Recomputed, named

Way = Literal["none", "selective", "full"]


class KeptBytes(NamedTuple):
    """Bytes that a block keeps for its backward in each way, beside what blocks before it keep.

    Attributes:
        none: Without recomputation.
        selective: With what is expensive.
        full: With what enters it, and copies of what its forward writes into.
        if_none: Without recomputation in the blocks before, too.
    """

    none: int
    selective: int
    full: int
    if_none: int


class Budget:
    """Chooses for the blocks of a model, in the order in which they first run.

    Args:
        fraction: Of what they keep without recomputation, above 0 and at most 1.
        n_blocks: How many there are.
        tell: Called with the budget when all of them have chosen.
    """

    def __init__(self, fraction: float, n_blocks: int, tell: Callable[[Budget], None]) -> None:
        self.fraction = fraction
        self.ways: list[Way] = []
        self.n_bytes = 0  # kept, in the ways that were chosen
        self.n_bytes_without = 0  # that would be kept if nothing was computed again
        self.held, self.held_without = Remembered(), Remembered()  # what these are the bytes of
        self._n_blocks, self._tell = n_blocks, tell

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def choose(self, kept: KeptBytes) -> Way:
        """The way of the next block: what it keeps more is computed again less.

        Of the two ways between which the fraction lies the one that keeps more, if the blocks before have left room
        for it: they take turns then, and none is computed again in full where the expensive part could be kept.
        """
        self.n_bytes_without += kept.if_none
        room = self.fraction * self.n_bytes_without - self.n_bytes
        more: Way = "none"
        less: Way = "full"
        if kept.full < kept.selective < kept.none:
            if kept.selective <= self.fraction * kept.none:
                less = "selective"
            else:
                more = "selective"
        way = more if kept._asdict()[more] <= room else less
        self.ways.append(way)
        self.n_bytes += kept._asdict()[way]
        if len(self.ways) == self._n_blocks:
            self.held, self.held_without = Remembered(), Remembered()
            self._tell(self)
        return way


class Budgeted(Recomputed):
    """Recomputes what a budget asks it to."""

    _budget: Budget
    _operations: Sequence[Any]
    _way: Way | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, checkpointed if that was chosen; measured and chosen if it was not yet."""
        if self._way is None and torch.is_grad_enabled():
            self._way = self._choose(args, kwargs)
            if self._way == "selective":
                self._contexts = partial(create_selective_checkpoint_contexts, self._operations)
        if self._way == "none":
            return super(Recomputed, self).forward(*args, **kwargs)
        return super().forward(*args, **kwargs)

    def _choose(self, args: Any, kwargs: Any) -> Way:
        own, entering, saved, outputs = Held(), Held(), Held(), Held()
        own.add([*self.parameters(), *self.buffers()])
        entering.add((args, kwargs))
        device = next((p.device for p in self.parameters()), None)
        n_writes = entering.n_writes()
        state = BlockState(self, (args, kwargs), Moves())
        with preserved_random_state(device), noted(saved, outputs, self._operations):
            super(Recomputed, self).forward(*args, **kwargs)
        state.look(named(self))
        copied = state.n_bytes_copied()
        state.undo()
        if entering.n_writes() != n_writes:
            raise ConfigError(
                f"The forward of {own_class(self).__name__} changes what it is given in place, so that it cannot be "
                'computed again: activation_checkpointing="budget" would change it twice. Write `x = x + y`, not '
                '`x += y`, or use activation_checkpointing="none".'
            )
        budget = self._budget
        before, full = budget.held, entering.n_bytes(own, budget.held) + copied
        expensive = outputs.n_bytes(entering)
        if_none = saved.n_bytes(own, budget.held_without)
        way = budget.choose(KeptBytes(saved.n_bytes(own, before), full + expensive, full, if_none))
        # What blocks are given, such as a mask, may be the same for all; what was computed here is gone.
        budget.held.add(saved if way == "none" else entering)
        budget.held_without.add(saved)
        return way


def keep_within(module: nn.Module, budget: Budget, keep: Sequence[str], name: str = "") -> None:
    """Makes `module` recompute in backward what `budget` asks it to.

    Args:
        module: Its forward may change attributes and buffers; a second run changes nothing.
        budget: That of its model.
        keep: Operations that are expensive, such as `"aten.mm.default"`.
        name: Its name in errors.

    Raises:
        ValueError: PyTorch has no operation of a given name.
    """
    change_class(module, Budgeted)
    budgeted = cast("Budgeted", module)
    budgeted._budget, budgeted.block_name = budget, name
    budgeted._operations = [op for name in keep if (op := operation(name)) is not None]
