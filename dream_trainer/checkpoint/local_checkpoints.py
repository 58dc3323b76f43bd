"""LocalCheckpoints: the newest state, kept in each host's memory, so that a restart on the same hosts reads no store.

    <local_directory>/dream_trainer_<user>/<experiment>-<run>/
      ranks_0-7/                                     this host's part: the state of its ranks
        3f6c...-91d0...-000004/step_00001010/        a directory for each save

The name of a save's directory is the digest of the run's newest checkpoint, the job's start and the save's number, so
that two hosts never confuse different saves. The previous save stays until the new one is whole on all hosts.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dream_trainer.checkpoint.files import content_checksum, remove_tree, step_name, within
from dream_trainer.checkpoint.manifest import Manifest, manifest_digest, newest_checkpoint, read_manifest
from dream_trainer.checkpoint.saving import HostSaves
from dream_trainer.checkpoint.store import KnownPlan, Snapshot, write_checkpoint
from dream_trainer.compat.pytorch import is_dtensor, local_tensor
from dream_trainer.distributed.ranks import Ranks, from_all_ranks, from_main_rank, on_all_ranks
from dream_trainer.errors import CheckpointError, ConfigError, in_a_line
from dream_trainer.screen import logger

# Bytes that are left free, or a tenth of the room: loaders' workers share the memory, and die without any.
LEFT_TO_OTHERS = 1 << 30


@dataclass(eq=False)
class LocalCheckpoints(HostSaves):
    """The saves that a run keeps on each of its hosts. Every rank has this object, and calls each method."""

    directory: Path
    experiment: str
    root: Path
    mesh_shape: dict[str, int]
    ranks: Sequence[int]
    world: Ranks
    beside: Ranks
    host: Ranks

    def __post_init__(self) -> None:
        ranks, world = self.ranks, self.world
        self._of_user = self.directory / f"dream_trainer_{os.getuid()}"
        self._run = self._of_user / f"{self.experiment}-{content_checksum(str(self.root).encode())[:16]}"
        self._part = self._run / f"ranks_{ranks[0]}-{ranks[-1]}"
        of_stage = world.world_size // world.stages
        self._writes_plain = world.rank == max(ranks[0], world.rank // of_stage * of_stage)
        self._start: str | None = None  # this start of the job, once it trains
        self._count = 0
        self._follows: str | None = None  # the newest checkpoint of the run, and so of what is written here
        self._kept: Path | None = None  # the save that is whole on all hosts
        self._known_plan = KnownPlan()
        self._has_failed = False

    # -- at the start

    def find(self, newest: Manifest) -> Manifest | None:
        task = f"look for what {self._run} keeps"
        try:
            on_all_ranks(self.world, task, self._refuse_strangers)
            found = from_all_ranks(self.world, task, lambda: self._whole_saves(manifest_digest(newest)))
            common = set.intersection(*map(set, found))
            if not common:
                return None
            name = max(common, key=lambda save: (found[0][save], save))
            path = self._part / name / step_name(found[0][name])
            return on_all_ranks(self.world, task, lambda: read_manifest(path))
        except CheckpointError as error:
            if self.world.is_main:
                logger.warning("local checkpoints are not used: %s", in_a_line(error))
            return None

    def _whole_saves(self, digest: str) -> dict[str, int]:
        """The steps of this host's saves after the checkpoint with that digest, by their directory."""
        saves = [save for save in within(self._part) if save.name.startswith(f"{digest}-")]
        found = {save.name: newest_checkpoint(save) for save in saves}
        layout = self.mesh_shape, self.world.world_size
        return {name: one.step for name, one in found.items() if one and (one.mesh_shape, one.world_size) == layout}

    def loaded(self, manifest: Manifest, *, is_own: bool) -> None:
        is_found = manifest.path.parent.parent == self._part
        digest = manifest_digest(manifest) if is_own else None
        self._kept = manifest.path.parent if is_found else None
        self._follows = manifest.path.parent.name.partition("-")[0] if is_found else digest

    def begin(self) -> None:
        """Raises ConfigError if hosts share the directory."""
        self._start = from_main_rank(self.world, "begin", lambda: secrets.token_hex(4))
        self._tidy(self.world)
        task = f"make {self._part}"
        with suppress(CheckpointError):  # the first save reports it
            on_all_ranks(self.world, task, self._make_part)
            has_others = from_all_ranks(self.world, task, lambda: within(self._run) != [self._part])
            if any(has_others) and self.host.world_size < self.world.world_size:
                raise ConfigError(
                    f"local_directory: several hosts have the same {self._of_user.parent}, but each needs a directory "
                    "in its own memory or on its own disk. Name such a directory, or leave local_directory=None; "
                    "`directory` is for a place that all hosts share."
                )

    # -- in the thread that writes

    def follow(self, path: Path) -> None:
        self._follows = from_main_rank(self.beside, f"read {path}", lambda: manifest_digest(read_manifest(path)))

    def write(self, snapshot: Snapshot) -> None:
        if self._follows is None or self._start is None:
            return
        self._count += 1
        save = self._part / f"{self._follows}-{self._start}-{self._count:06d}"
        task = f"keep step {snapshot.step} in {self._run}"
        try:
            on_all_ranks(self.beside, task, lambda: self._write(save, snapshot))
        except CheckpointError as error:
            if self.world.is_main and not self._has_failed:
                logger.warning("training continues without a newer local checkpoint: %s", in_a_line(error))
            self._has_failed = True
        else:
            self._kept, self._has_failed = save, False
        self._tidy(self.beside)

    def _write(self, save: Path, snapshot: Snapshot) -> None:
        size = sum(self.host.all_gather_object(self._bytes(snapshot)))
        on_all_ranks(self.host, "make room", lambda: self._make_room(size))
        job = None if self.host.world_size == self.beside.world_size else self.beside
        write_checkpoint(save, snapshot, world=self.host, known=self._known_plan, job=job)

    def _bytes(self, snapshot: Snapshot) -> int:
        own = [tensor for tensor in snapshot.tensors.values() if self._writes_plain or is_dtensor(tensor)]
        return sum(local_tensor(tensor).nbytes for tensor in (*own, *snapshot.rank_tensors.values()))

    def _make_part(self) -> None:
        if not self.host.is_main:
            return
        self._of_user.parent.mkdir(parents=True, exist_ok=True)
        self._of_user.mkdir(mode=0o700, exist_ok=True)
        self._refuse_strangers()
        self._part.mkdir(parents=True, exist_ok=True)

    def _make_room(self, size: int) -> None:
        self._make_part()
        if not self.host.is_main:
            return
        room = shutil.disk_usage(self._part)
        if room.free < size + min(LEFT_TO_OTHERS, room.total // 10):
            raise CheckpointError(
                f"{self._part} has {room.free >> 20} MiB free of {room.total >> 20}, and {size >> 20} are needed, and "
                "some for others. Make room for two states of this host's ranks, or set local_directory=None."
            )

    # -- at any time

    def clear(self) -> None:
        if self.host.is_main:
            remove_tree(self._run)
            with suppress(OSError):  # other runs', or none
                self._of_user.rmdir()

    def _tidy(self, world: Ranks) -> None:
        """Removes all of this run's saves here except the one that is whole on all hosts; a collective."""
        world.barrier()  # no rank reads or writes any more
        if self.host.is_main:
            try:
                for entry in (*within(self._run), *within(self._part)):
                    if entry not in (self._part, self._kept):
                        remove_tree(entry)
            except OSError as error:
                logger.warning("%s could not be tidied: %s", self._run, in_a_line(error))
        world.barrier()

    def _refuse_strangers(self) -> None:
        """A shared directory of memory is open to all users, and a checkpoint of another's making is not read."""
        try:
            status = self._of_user.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise CheckpointError(
                f"{self._of_user} is not only this user's directory. Remove it, or set another local_directory."
            )
