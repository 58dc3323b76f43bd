"""The tensors of a live model, whichever ranks have them: each rank all, or those of its stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dream_trainer.distributed.ranks import Ranks
from dream_trainer.weights.safetensors_file import TensorSpec


class StageTensors:
    """Brings tensors to rank 0, one at a time. Making one is a collective where there are several stages.

    Args:
        own: What this rank's tensors are written as, by name.
        read: One of them, in whole; a collective of the ranks that have it, called on each in the same order.
        world: The ranks.

    Attributes:
        specs: What all ranks' tensors are written as, by name, stage after stage.
    """

    def __init__(self, own: Mapping[str, TensorSpec], read: Callable[[str], Tensor], world: Ranks) -> None:
        self._own, self._read, self._world = own, read, world
        self.specs = dict(own)
        self._holders: dict[str, int] = {}
        if world.stages == 1:
            return
        for rank, specs in enumerate(world.all_gather_object(dict(own))):
            for name in specs:
                self._holders.setdefault(name, rank)
            self.specs = {**specs, **self.specs} if rank == 0 else self.specs | specs

    def read(self, name: str) -> Tensor:
        """A tensor, in whole, on rank 0; elsewhere whatever is there. Every rank calls this, in the same order."""
        value = self._read(name) if name in self._own else torch.empty(0)
        holder = self._holders.get(name, 0)
        if holder == 0 or self._world.rank not in (0, holder):
            return value
        import torch.distributed as dist

        # Bytes, since not every backend sends every type.
        if self._world.rank == holder:
            sent = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            dist.send(sent, group=self._world.cpu_group, group_dst=0)
            return value
        spec = self.specs[name]
        received = torch.empty(spec.shape, dtype=spec.dtype)
        dist.recv(received.reshape(-1).view(torch.uint8), group=self._world.cpu_group, group_src=holder)
        return received
