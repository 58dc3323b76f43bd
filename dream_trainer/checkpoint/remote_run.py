"""RemoteRun: a run whose checkpoints lie in an object store, as one job has it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dream_trainer.checkpoint.manifest import Manifest, list_checkpoints, newest_checkpoint
from dream_trainer.checkpoint.run_directory import LOCK_NAME
from dream_trainer.checkpoint.sender import Sender
from dream_trainer.compat.pytorch import HashStore, PrefixStore, Store
from dream_trainer.config.checkpoint_parameters import CheckpointParameters
from dream_trainer.distributed.ranks import Ranks, from_main_rank, on_all_ranks
from dream_trainer.errors import CheckpointError
from dream_trainer.stores.ownership import TOKEN_NAME, Ownership
from dream_trainer.stores.store_path import StorePath

_LOCAL_FILES = (LOCK_NAME, TOKEN_NAME)

logger = logging.getLogger("dream_trainer")


def list_in_both(root: Path, stage: Path) -> list[Manifest]:
    """The whole checkpoints by step: those in `root`, and, where that is in a store, those that wait in `stage`."""
    waiting = list_checkpoints(stage) if isinstance(root, StorePath) else []  # first: it may be sent meanwhile
    found = {manifest.step: manifest for manifest in (*waiting, *list_checkpoints(root))}
    return [found[step] for step in sorted(found)]


def newest_in_both(root: Path, stage: Path) -> Manifest | None:
    """The last of `list_in_both`; of one step the one that was written last. Older ones are not looked at."""
    waiting = newest_checkpoint(stage) if isinstance(root, StorePath) else None  # first: it may be sent meanwhile
    found = [manifest for manifest in (waiting, newest_checkpoint(root)) if manifest is not None]
    return max(found, key=lambda manifest: (manifest.step, manifest.wall_time), default=None)


@dataclass(eq=False)
class RemoteRun:
    """The run's directory in a store: claimed by `begin`, and given back by `end`."""

    run: StorePath
    run_dir: Path
    retention: CheckpointParameters
    world: Ranks
    connect: Callable[[], Store | None]

    def __post_init__(self) -> None:
        self.directory = self.run / "checkpoints"
        self._ownership: Ownership | None = None
        self._sender: Sender | None = None
        self._sent: dict[str, tuple[int, int]] = {}  # the run's files, with size and time of change

    def begin(self, stage: Path) -> Sender:
        """Claims the run and begins to send, first what waits in `stage`; every rank calls it."""
        world, task = self.world, f"claim {self.run}"
        self._ownership = on_all_ranks(world, task, self._claim)
        name = from_main_rank(world, task, lambda: self._ownership.token if self._ownership else "")
        notes = self.connect() or HashStore()
        self._sender = Sender(
            self.directory,
            self.retention,
            rank=world.rank,
            world_size=world.world_size,
            notes=PrefixStore(name, notes),  # a later trainer of this job has others
            ownership=self._ownership,
            after_each=self._send_files,
        )
        for path in from_main_rank(world, task, lambda: [manifest.path for manifest in list_checkpoints(stage)]):
            self._sender.put(path)
        return self._sender

    def _claim(self) -> Ownership | None:
        if not self.world.is_main:
            return None
        try:
            ownership = Ownership(self.run, self.run_dir)
            if not ownership.goes_on_here:
                for entry in self.run.iterdir():  # what it wrote about itself elsewhere goes on here
                    if not entry.is_dir():
                        (self.run_dir / entry.name).write_bytes(entry.read_bytes())
        except OSError as error:
            raise CheckpointError(f"the store cannot be used: {error}") from None
        return ownership

    def _send_files(self) -> None:
        """Sends the run's own files, such as `run.json` and `metrics.jsonl`, where they have changed."""
        for path in sorted(self.run_dir.iterdir()):
            if path.name in _LOCAL_FILES or path.name.startswith(".") or not path.is_file():
                continue
            status = path.stat()
            state = (status.st_size, status.st_mtime_ns)
            if self._sent.get(path.name) != state:
                self.run.store.send(path, f"{self.run.key}/{path.name}")
                self._sent[path.name] = state

    def look_again(self) -> None:
        if self._sender is not None:
            self._sender.look_again()

    def end(self) -> None:
        """Ends what `begin` began; what is not sent waits on the disk."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self._ownership is not None:
            try:
                if not self._ownership.is_lost():
                    self._send_files()
            except OSError as error:
                logger.warning("the run's own files were not sent to %s: %s", self.run, error)
            self._ownership.release()
            self._ownership = None
