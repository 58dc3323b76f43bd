"""The pulse: how what one rank knows becomes what all ranks know, before each accumulation window.

A small tensor of flags and sums is all-reduced on a CPU group of its own, when a rank holds its data of the next window
and before it enters any collective of the model's; likewise before each batch of a validation, when an epoch or a
validation is done, and where training begins and ends. So every rank decides the same from the same numbers, and no
rank is held in the model while another waits for data or has to stop. At world size 1 nothing is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from dream_trainer.distributed.world import World


class Flags(NamedTuple):
    """What one rank says, and, summed over the ranks, what all of them know.

    Attributes:
        stop: Ranks on which a stop was requested.
        terminate: Ranks that got SIGTERM or SIGHUP.
        interrupt: Ranks that got SIGINT.
        timeout: Ranks on which `max_time` has passed.
        save: Ranks on which a checkpoint was requested.
        saving: Ranks that still write the last checkpoint.
        save_failed: Ranks on which writing it failed.
        validate: Ranks on which a validation by the clock is due (rank 0's clock decides).
        waiting: Ranks that speak from within their wait for data, and will once more when they have it.
        short: Ranks that cannot fill a window, or have no validation batch left.
        clocks: A bit for each callback that is due by rank 0's clock; from rank 0 alone.
        samples: Samples of a rank's part of the next window, where not every rank knows those of all.
        tokens: Tokens of a rank's part of the next window.
        order: What tells the collectives of sharded models, in their order; the same on ranks that ran the same.
        order_squared: Its square. The sums of both tell whether all ranks said the same.
    """

    stop: int = 0
    terminate: int = 0
    interrupt: int = 0
    timeout: int = 0
    save: int = 0
    saving: int = 0
    save_failed: int = 0
    validate: int = 0
    waiting: int = 0
    short: int = 0
    clocks: int = 0
    samples: int = 0
    tokens: int = 0
    order: int = 0
    order_squared: int = 0


class Pulse:
    """One rank's side of the pulse."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sums = torch.zeros(len(Flags._fields), dtype=torch.int64)

    def exchange(self, mine: Flags) -> Flags:
        """The sums over all ranks of what each says; waits for every rank to call it. At world size 1, `mine`.

        Raises:
            RuntimeError: A rank died, or did not answer within the group's time-out.
        """
        if self._world.world_size == 1:
            return mine
        import torch.distributed as dist

        self._sums.copy_(torch.tensor(mine))
        dist.all_reduce(self._sums, group=self._world.cpu_group)
        return Flags(*self._sums.tolist())
