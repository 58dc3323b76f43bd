"""Random operations on DTensors that lie on a GPU: from which generators they draw.

PyTorch keeps a tracker for them in private names of `torch.distributed.tensor._random`. It makes one at the first such
operation of a process, and then gives rank 0's generator to the whole world, by a collective: from there on ranks would
draw the same where they must not, as data-parallel ones in dropout, and wait for stages that run no such operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def keep_own_generators(mesh: DeviceMesh) -> None:
    """Has DTensors draw from the generator that each rank has; to be called before any of them draws.

    Generators stay as they are: it is the trainer's to make them alike on ranks that share layers. On the CPU PyTorch
    has no tracker, and DTensors draw from each rank's generator anyway.
    """
    if mesh.device_type == "cpu":
        return
    from torch.distributed.tensor._random import manual_seed

    device = torch.get_device_module(mesh.device_type).current_device()
    with torch.random.fork_rng(devices=[device], device_type=mesh.device_type):
        manual_seed(0, mesh)  # makes the tracker, without a collective
