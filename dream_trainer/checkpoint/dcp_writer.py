"""Writes tensors by DCP's planner and writer: one shard file per rank, and `.metadata` by rank 0.

`dcp.save` changes warning filters, hides the file system's error, and needs a second read for checksums."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from dream_trainer.checkpoint.files import FileEntry, NewFile
from dream_trainer.compat.pytorch import is_dtensor, merge_plans_of_parts

if TYPE_CHECKING:
    from dream_trainer.checkpoint.store import KnownPlan


class _HashingFileSystem(FileSystem):
    """DCP's file system, whose files are hashed while they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[str, FileEntry] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        path = Path(path)
        with NewFile(path) as file:
            yield file
        self.entries[path.name] = file.entry

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.entries[Path(new_path).name] = self.entries.pop(Path(path).name)


class TensorWriter:
    """One rank's part in writing a DCP directory; its methods are called in the order of their definitions."""

    def __init__(
        self, directory: Path, tensors: Mapping[str, Tensor], *, rank: int, known: KnownPlan, is_whole: bool = True
    ) -> None:
        files = _HashingFileSystem()
        self.entries = files.entries  # of the files written so far
        # `NewFile` syncs the files, since DCP does so before Python's buffer is flushed. Copying ahead would use a
        # stream of the thread's default device, which may be another rank's.
        self._writer = FileSystemWriter(directory, sync_files=False, per_thread_copy_ahead=0, overwrite=False)
        self._writer.fs = files
        self._planner = DefaultSavePlanner(flatten_state_dict=False)
        self._tensors = dict(tensors)
        self._rank = rank
        self._known = known
        self._is_whole = is_whole
        self._layout = {name: _layout(tensor) for name, tensor in tensors.items()}

    def knows_plan(self) -> bool:
        """Whether this rank's tensors have the layout of the last save."""
        is_main = self._rank == 0
        self._planner.set_up_planner(self._tensors, self._writer.storage_meta(), is_coordinator=is_main)
        self._writer.set_up_storage_writer(is_main, rank=self._rank, use_collectives=True)
        return self._known.plan is not None and self._known.layout == self._layout

    def plan(self) -> SavePlan:
        """The tensors this rank could write; for rank 0."""
        self._known.plan = None
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def merge(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assigns work to each rank, so that everything is written once; on rank 0 only."""
        merge = self._planner.create_global_plan if self._is_whole else merge_plans_of_parts
        merged, self._known.metadata = merge(plans)
        return self._writer.prepare_global_plan(merged)

    def take(self, plan: SavePlan) -> None:
        self._known.plan, self._known.layout = plan, self._layout

    def write(self) -> list[WriteResult]:
        """Writes this rank's shard; the result is for rank 0."""
        assert self._known.plan is not None
        plan = self._planner.finish_plan(self._known.plan)
        try:
            return self._writer.write_data(plan, self._planner).wait()
        except RuntimeError as error:
            said_by_file_system: BaseException | None = error
            while said_by_file_system is not None and not isinstance(said_by_file_system, OSError):
                said_by_file_system = said_by_file_system.__cause__ or said_by_file_system.__context__
            raise said_by_file_system or error from None

    def write_metadata(self, results: Sequence[list[WriteResult]]) -> None:
        """Writes `.metadata`; on rank 0 only."""
        assert self._known.metadata is not None
        self._writer.finish(self._known.metadata, list(results))


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """The inputs that a plan depends on."""
    placed = (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else ()
    return tensor.shape, tensor.dtype, tensor.requires_grad, *placed
