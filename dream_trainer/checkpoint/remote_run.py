"""RemoteRun: one job's view of a run whose checkpoints are in an object store."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dream_trainer.checkpoint.files import compare_sizes, discard, set_aside
from dream_trainer.checkpoint.manifest import MANIFEST_NAME, Manifest, kept, list_checkpoints, read_manifest
from dream_trainer.checkpoint.run_directory import LOCK_NAME
from dream_trainer.checkpoint.saving import Destination
from dream_trainer.compat.pytorch import HashStore, PrefixStore, Store
from dream_trainer.distributed.ranks import Ranks, from_main_rank, on_all_ranks
from dream_trainer.errors import CheckpointError, DamagedCheckpointError
from dream_trainer.screen import logger
from dream_trainer.stores.ownership import TOKEN_NAME, Ownership
from dream_trainer.stores.store_path import StorePath, without_secrets

PATIENCE_SECONDS = 60.0  # how long the end of a run, or its start, waits for a store that does not answer

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0
_LOOK_SECONDS = 0.1
_OF_A_RANK = re.compile(r"__(\d+)_\d+\.distcp|rank_(\d+)\..*")


@dataclass(eq=False)
class RemoteRun(Destination):
    """The run's directory in a store: claimed by `begin`, and released by `end`. In a thread, each rank sends its files
    of one checkpoint, and then rank 0 the manifest. The threads communicate through the job's note store, not by
    collectives, so a slow line causes no time-out."""

    directory: StorePath  # pyright: ignore[reportIncompatibleVariableOverride]  (nobody sets it)
    run_dir: Path
    connect: Callable[[], Store | None]

    def __post_init__(self) -> None:
        self.run = self.directory.parent
        self._ownership: Ownership | None = None
        self._sent: dict[str, tuple[int, int]] = {}  # the run's files, with size and time of change
        self._waiting: deque[Path] = deque()
        self._count = 0
        self._stored: dict[int, Manifest] | None = None  # on rank 0, by step; None: not looked yet
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._fatal: CheckpointError | None = None
        self._trouble: str | None = None
        self._answered = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="checkpoint sender", daemon=True)

    def begin(self, stage: Path) -> None:
        world, task = self.world, f"claim {self.run}"
        self._ownership = on_all_ranks(world, task, self._claim)
        name = from_main_rank(world, task, lambda: self._ownership.token if self._ownership else "")
        self._notes = PrefixStore(name, self.connect() or HashStore())  # a later trainer of this job has others
        self._thread.start()
        for path in from_main_rank(world, task, lambda: [manifest.path for manifest in list_checkpoints(stage)]):
            self.put(path)

    def _claim(self) -> Ownership | None:
        if not self.world.is_main:
            return None
        try:
            ownership = Ownership(self.run, self.run_dir)
            if not ownership.goes_on_here:
                for entry in self.run.iterdir():  # continues the run's own files from elsewhere
                    if not entry.is_dir():
                        (self.run_dir / entry.name).write_bytes(entry.read_bytes())
        except OSError as error:
            raise CheckpointError(f"the store cannot be used: {error}") from None
        return ownership

    def _send_files(self) -> None:
        """Uploads changed files of the run itself, such as `run.json` and `metrics.jsonl`."""
        for path in sorted(self.run_dir.iterdir()):
            if path.name in (LOCK_NAME, TOKEN_NAME) or path.name.startswith(".") or not path.is_file():
                continue
            status = path.stat()
            state = (status.st_size, status.st_mtime_ns)
            if self._sent.get(path.name) != state:
                (self.run / path.name).upload(path)
                self._sent[path.name] = state

    def put(self, checkpoint: Path) -> None:
        with self._changed:
            self._waiting.append(checkpoint)
            self._changed.notify_all()

    def look_again(self) -> None:
        self._stored = None

    def refuse_if_lost(self, world: Ranks) -> None:
        on_all_ranks(world, "save", self._refuse_if_lost)

    def _refuse_if_lost(self) -> None:
        if self._fatal is not None:
            raise self._fatal

    def finish(self) -> None:
        with self._changed:
            self._answered = time.monotonic()
            while self._waiting:
                self._refuse_if_lost()
                if self._trouble and time.monotonic() - self._answered > PATIENCE_SECONDS:
                    raise CheckpointError(
                        f"{len(self._waiting)} checkpoints could not be sent to {self.directory}: {self._trouble}. "
                        f"They wait in {self._waiting[0].parent}; the same command sends them first."
                    )
                self._changed.wait(_LOOK_SECONDS)
            self._refuse_if_lost()

    def end(self) -> None:
        self._ended.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        if self._ownership is not None:
            try:
                if not self._ownership.is_lost():
                    self._send_files()
            except OSError as error:
                logger.warning("the run's own files were not sent to %s: %s", self.run, error)
            self._ownership.release()
            self._ownership = None

    # -- the thread

    def _run(self) -> None:
        pause = _SHORTEST_PAUSE
        while not self._ended.is_set():
            with self._changed:
                if not self._waiting:
                    self._changed.wait(1.0)
                    continue
                checkpoint = self._waiting[0]
            try:
                self._send(checkpoint)
            except CheckpointError as error:
                self._fatal = error
                self._tell(str(error))
                return
            except OSError as error:
                self._has_trouble(without_secrets(error))
                self._tell(without_secrets(error))
                self._ended.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            except Exception as error:  # otherwise the end of the run would wait forever
                self._fatal = CheckpointError(f"{checkpoint} was not sent: {without_secrets(error)}")
                return
            pause = _SHORTEST_PAUSE
            self._answers()
            if self._ended.is_set():
                return
            with self._changed:
                self._waiting.popleft()
                self._count += 1
                self._changed.notify_all()

    def _has_trouble(self, why: str) -> None:
        if self._trouble is None:
            warning = "%s does not take checkpoints: %s. They wait in %s, and training continues."
            logger.warning(warning, self.directory, why, self._waiting[0].parent)
        self._trouble = why

    def _answers(self) -> None:
        self._answered = time.monotonic()
        if self._trouble is not None:
            self._trouble = None
            self._tell("")
            logger.warning("%s takes checkpoints again; %d are on the way", self.directory, len(self._waiting))

    def _send(self, path: Path) -> None:
        """Sends this rank's files of a checkpoint; rank 0 then makes it one. May be called again after an OSError."""
        if self.world.rank == 0:
            self._note("files", json.dumps(self._files_to_send(path)))
        names = json.loads(self._noted("files", by=0) or "[]")
        target = self.directory / path.name
        for name in names:
            of_rank = _OF_A_RANK.fullmatch(name)
            if (int(of_rank[1] or of_rank[2]) if of_rank else 0) % self.world.world_size == self.world.rank:
                (target / name).upload(path / name)
                self._answers()
        self._note(f"sent by {self.world.rank}", "")
        if self.world.rank == 0 and names:
            for rank in range(self.world.world_size):
                self._noted(f"sent by {rank}", by=rank)
            if not self._ended.is_set():
                self._commit(path)

    def _files_to_send(self, path: Path) -> list[str]:
        """Files of a checkpoint that the store lacks; on rank 0. Also handles files that need no upload."""
        try:
            local = read_manifest(path)
        except CheckpointError as error:
            logger.error("a checkpoint is not sent, since it is no longer whole on the disk: %s", error)
            return []
        stored = self._what_is_stored()
        same = stored.get(local.step)
        if same is not None and same.files == local.files:  # it was killed before it removed the local one
            discard(path)
            return []
        if same is not None and same.wall_time > local.wall_time:
            logger.warning(
                "%s has a newer checkpoint of step %d; the local one is set aside", self.directory, local.step
            )
            set_aside(path)
            return []
        if local.step not in kept((stored | {local.step: local}).values(), self.retention):
            discard(path)
            return []
        self._refuse_if_taken()
        # One of the step that this replaces, or that is damaged.
        (self.directory / path.name / MANIFEST_NAME).remove()
        stored.pop(local.step, None)
        return sorted(local.files)

    def _commit(self, path: Path) -> None:
        """Rank 0: writes the manifest, after which the checkpoint exists, and removes checkpoints that are not kept."""
        content, local = (path / MANIFEST_NAME).read_bytes(), read_manifest(path)
        target, place = self.directory / path.name, self.directory / path.name / MANIFEST_NAME
        try:
            compare_sizes(target, local.files)
        except DamagedCheckpointError as error:
            raise ConnectionError(f"not everything arrived: {error}") from None
        self._refuse_if_taken()
        if not place.create(content) and place.read_bytes() != content:
            raise CheckpointError(f"another job wrote {place}. Stop it, or give this run another experiment name.")
        self._what_is_stored()[local.step] = replace(local, path=target)
        discard(path)
        try:
            stored = self._what_is_stored()
            for step in stored.keys() - kept(stored.values(), self.retention):
                discard(stored[step].path)
                del stored[step]
            self._send_files()
        except OSError as error:  # the checkpoint is there, and the next one tries again
            logger.warning("%s: %s", self.directory, without_secrets(error))

    def _what_is_stored(self) -> dict[int, Manifest]:
        if self._stored is None:
            self._stored = {manifest.step: manifest for manifest in list_checkpoints(self.directory)}
        return self._stored

    def _refuse_if_taken(self) -> None:
        if self._ownership is not None and self._ownership.is_lost():
            raise CheckpointError(
                f"another job has taken {self.run} while this one did not answer. Stop one of them, or give this run "
                "another experiment name."
            )

    # -- messages between ranks

    def _note(self, what: str, value: str) -> None:
        self._notes.set(f"sender/{self._count}/{what}", value)

    def _tell(self, trouble: str) -> None:
        self._notes.set(f"sender/trouble of {self.world.rank}", trouble)

    def _noted(self, what: str, *, by: int) -> str | None:
        """Waits for a rank's note; None if this sender ends first. Until then its trouble is also this rank's."""
        key = f"sender/{self._count}/{what}"
        while not self._notes.check([key]):
            if self._ended.wait(_LOOK_SECONDS):
                return None
            about = f"sender/trouble of {by}"
            trouble = self._notes.get(about).decode() if self._notes.check([about]) else ""
            if trouble:
                self._has_trouble(f"rank {by}: {trouble}")
            else:
                self._answers()
        return self._notes.get(key).decode()
