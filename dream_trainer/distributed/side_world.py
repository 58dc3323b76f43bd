"""The ranks as a background thread sees them: on a process group of its own, so that its collectives meet no others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

    from dream_trainer.distributed.world import World


@dataclass(frozen=True)
class SideWorld:
    """A second way for all ranks to talk, beside the one of the training thread.

    Attributes:
        rank: This rank, 0-based.
        world_size: Number of ranks.
        cpu_group: A gloo group of its own; None at world size 1.
    """

    rank: int
    world_size: int
    cpu_group: dist.ProcessGroup | None

    @classmethod
    def beside(cls, world: World) -> SideWorld:
        """Makes the group; every rank calls it."""
        return cls(world.rank, world.world_size, world.new_cpu_group())

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def all_gather_object(self, value: Any, /) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank."""
        if self.cpu_group is None:
            return [value]
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self.cpu_group)
        return gathered
