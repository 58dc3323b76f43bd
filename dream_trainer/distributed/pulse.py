"""The pulse: ranks share their flags before each window and each validation batch, and at ends.

Flags and sums are all-reduced on their own CPU group, before a rank enters any collective of the model's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from dream_trainer.distributed.world import World


class Flags(NamedTuple):
    """One rank's flags; summed over the ranks, they are known to all."""

    stop: int = 0  # ranks on which a stop was requested
    terminate: int = 0  # SIGTERM or SIGHUP
    interrupt: int = 0  # SIGINT
    timeout: int = 0  # `max_time` has passed
    save: int = 0
    saving: int = 0  # the last checkpoint is still being written
    save_failed: int = 0
    validate: int = 0  # a validation is due by rank 0's clock
    waiting: int = 0  # ranks that exchange while waiting for data, and will exchange again when they have it
    short: int = 0  # ranks that cannot fill a window, or have no validation batch left
    clocks: int = 0  # a bit for each callback that is due by rank 0's clock; from rank 0 only
    samples: int = 0  # of a rank's part of the next window, if not known to every rank
    tokens: int = 0
    order: int = 0  # identifies the order of the collectives of sharded models
    order_squared: int = 0  # the sums of both tell whether all ranks said the same


def exchange(world: World, mine: Flags) -> Flags:
    """The sums of all ranks' flags; waits for every rank to call it."""
    return mine if world.world_size == 1 else Flags(*world.all_reduce(torch.tensor(mine)).tolist())


@dataclass(slots=True)
class Requests:
    """Requests on this rank, to stop or to save, until all ranks have heard of them."""

    stop_reason: str | None = None
    terminated: bool = False
    hung_up: bool = False
    interrupted: bool = False
    save_requested: bool = False
    save_signalled: bool = False
    save_is_owed: bool = False
    save_is_known: bool = False

    @property
    def ends_by_signal(self) -> bool:
        return self.terminated or self.interrupted

    def heard_of_save(self) -> None:
        self.save_requested = self.save_signalled = False
        self.save_is_known = self.save_is_owed = True

    def take_save(self) -> bool:
        owed, self.save_is_owed = self.save_is_owed, False
        return owed

    def why_stopped(self, flags: Flags) -> str:
        """Describes why training ends before its limits; `flags` are those of all ranks."""
        if flags.terminate or flags.interrupt:
            return ("SIGHUP" if self.hung_up else "SIGTERM") if flags.terminate else "Ctrl-C"
        if flags.stop:
            return self.stop_reason or "requested on another rank"
        return "max_time has passed"

    def forget_signals(self) -> None:
        self.terminated = self.hung_up = self.interrupted = self.save_signalled = False
