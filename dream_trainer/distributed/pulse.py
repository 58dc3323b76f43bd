"""The pulse: how what one rank knows becomes what all ranks know, once per accumulation window, without a stall.

A small tensor of flags and sums is all-reduced asynchronously on a CPU group of its own: posted when a window starts,
read when its step is done. Every rank then holds the same numbers and decides alike. At world size 1 nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from dream_trainer.distributed.world import World


class Flags(NamedTuple):
    """What one rank says, and, summed over the ranks, what all of them know.

    Attributes:
        stop: Ranks on which a stop was requested.
        terminate: Ranks that got SIGTERM.
        interrupt: Ranks that got SIGINT.
        timeout: Ranks on which `max_time` has passed.
        save: Ranks on which a checkpoint was requested.
        validate: Ranks on which a validation by the clock is due (rank 0's clock decides).
        short: Ranks that cannot fill the next window.
        samples: Samples of the window that is running.
    """

    stop: int = 0
    terminate: int = 0
    interrupt: int = 0
    timeout: int = 0
    save: int = 0
    validate: int = 0
    short: int = 0
    samples: int = 0


class Pulse:
    """One rank's side of the pulse.

    Args:
        world: The world; its `cpu_group` carries the pulse.
        speak: Returns this rank's flags at the moment of the call.
    """

    def __init__(self, world: World, speak: Callable[[], Flags]) -> None:
        self._world = world
        self._speak = speak
        self._sums = torch.zeros(len(Flags._fields), dtype=torch.int64)
        self._pending = None

    def post(self) -> None:
        """Sends this rank's flags; does not wait."""
        if self._world.world_size > 1:
            import torch.distributed as dist

            self._sums.copy_(torch.tensor(self._speak()))
            self._pending = dist.all_reduce(self._sums, group=self._world.cpu_group, async_op=True)

    def exchange(self) -> Flags:
        """The sums of all ranks' flags as they are now; waits for every rank to call it, so only between windows."""
        self.post()
        return self.read()

    def read(self) -> Flags:
        """The sums over all ranks of what was last posted; at world size 1 this rank's flags as they are now.

        Raises:
            RuntimeError: A rank died, or did not answer within the group's time-out.
        """
        if self._pending is None:
            return self._speak()
        self._pending.wait()
        self._pending = None
        return Flags(*self._sums.tolist())
