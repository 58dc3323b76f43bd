"""Writing tensors by DCP: one shard file per rank, and `.metadata` by rank 0."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dream_trainer.checkpoint.world import CheckpointWorld, raise_failures


class _Writer(FileSystemWriter):
    """DCP's writer, which says what the file system said.

    A full disk surfaces as "unexpected pos 704 vs 598": `torch.save` cannot close its archive then, and that error
    covers the one that caused it.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise (cause or error) from None


def write_tensors(directory: Path, tensors: Mapping[str, Tensor], *, task: str, world: CheckpointWorld) -> None:
    """Writes this rank's shard; rank 0 writes `.metadata` too. Both are fsynced. Every rank calls this.

    Args:
        directory: An empty directory.
        tensors: DTensors, of which each rank writes its own pieces, and plain tensors, of which one rank writes each.
        task: What is being done, for the message.
        world: The ranks.

    Raises:
        CheckpointError: Some rank failed; the same on every rank.
    """
    failures: dict[int, str] = {}
    cause: BaseException | None = None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(
                dict(tensors),
                storage_writer=_Writer(directory, sync_files=True, overwrite=False),
                planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
                process_group=world.cpu_group,
                no_dist=world.world_size == 1,
            )
    except CheckpointException as error:  # a BaseException, which `except Exception` would miss
        failures = {rank: f"{type(reason).__name__}: {reason}" for rank, (reason, _) in error.failures.items()}
        cause = error
    raise_failures(task, failures, world, cause)
