"""The manifest: written last, it makes a directory a checkpoint, and lists every file with size and checksum."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dream_trainer.best_value import is_value, mode_by_name, mode_of
from dream_trainer.checkpoint import typed_json
from dream_trainer.checkpoint.files import (
    ASIDE_NAME,
    REPLACED_NAME,
    TEMPORARY_NAME,
    FileEntry,
    blaming,
    compare_sizes,
    content_checksum,
    discard,
    named_step,
    step_directories,
)
from dream_trainer.checks import refuse
from dream_trainer.config.checkpoint_parameters import CheckpointParameters, Mode
from dream_trainer.distributed.ranks import Ranks, on_all_ranks
from dream_trainer.errors import CheckpointError, ConfigError, DamagedCheckpointError
from dream_trainer.stores.store_path import StorePath

SCHEMA_VERSION = 1  # incremented with every change that an older reader would misread

MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents and the origin of a checkpoint."""

    path: Path  # the checkpoint's directory; not stored, so that a checkpoint may be moved
    step: int  # optimizer steps completed (`global_step`)
    epoch: int  # epoch when it was written, 0-based
    samples_seen: int  # samples consumed by all ranks since the run began
    world_size: int  # number of ranks that wrote it; each has its own rank files
    mesh_shape: dict[str, int]  # size of each dimension of the device mesh at that time
    config: dict[str, Any]  # the run's config as plain values
    metrics: dict[str, Any]  # metrics at that step; NaN and missing ones are allowed
    versions: dict[str, str]  # of torch and dream_trainer
    wall_time: float  # seconds since 1970, UTC, when it was written
    files: dict[str, FileEntry]  # every file but the manifest itself
    parent: dict[str, Any] | None = None
    """For a fork: the `checkpoint` it began from, whose `run` and `step`, and the `words`. Not stored if None."""
    schema_version: int = SCHEMA_VERSION  # version of the directory's layout

    @property
    def shards(self) -> list[str]:
        """The files where DCP keeps tensors."""
        return sorted((name for name in self.files if name.endswith(".distcp")), key=lambda name: (len(name), name))

    def entry(self, name: str) -> FileEntry:
        if name not in self.files:
            raise DamagedCheckpointError(f"{self.path} has no file {name!r}. Resume from another checkpoint.")
        return self.files[name]

    def read(self, name: str) -> bytes:
        """A small file's content, after its size and checksum were compared with what was written."""
        path, entry = self.path / name, self.entry(name)
        with blaming(path):
            content = path.read_bytes()
        entry.compare(path, len(content), content_checksum(content))
        return content

    def facts(self) -> dict[str, Any]:
        """A short summary as values for JSON."""
        names = ("epoch", "samples_seen", "world_size", "mesh_shape", "metrics", "versions", "wall_time")
        return {name: vars(self)[name] for name in names}

    def verify(self, *names: str) -> None:
        for name in names:
            self.entry(name).verify(self.path / name)


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest's content on disk, with its own checksum as the last field."""
    body = {name: value for name, value in vars(manifest).items() if name != "path"}
    if manifest.parent is None:
        del body["parent"]  # earlier readers do not know this field
    body["files"] = {name: vars(entry) for name, entry in sorted(manifest.files.items())}
    return _sealed(body)


def manifest_digest(manifest: Manifest) -> str:
    """Which checkpoint this is, of all that were ever written: the checksum of its manifest."""
    return content_checksum(encode_manifest(manifest))


def _sealed(body: dict[str, Any]) -> bytes:
    """The text of a manifest with these fields: there is only one, so that its checksum can be compared."""
    text = typed_json.dumps(body, name="manifest")
    return typed_json.dumps({**body, "xxh3": content_checksum(text.encode())}).encode()


def read_manifest(path: Path) -> Manifest:
    """Reads a checkpoint's manifest and compares the sizes of its files; contents are not read."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory. Give the path of a checkpoint, such as .../step_00001000.")
    file = path / MANIFEST_NAME
    with blaming(file):
        text = file.read_bytes()
    try:
        manifest = _parse(path, text)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{file} is damaged: {error}. Resume from another checkpoint.") from error
    if named_step(path) not in (None, manifest.step):
        raise DamagedCheckpointError(
            f"{file} is of step {manifest.step}, which is not the directory's. Give the directory its original name "
            "back."
        )
    compare_sizes(path, manifest.files)
    return manifest


def _parse(path: Path, text: bytes) -> Manifest:
    # The version is read as plain JSON: a newer schema may use types that this reader does not know.
    version = json.loads(text)["schema_version"]
    if version > SCHEMA_VERSION:
        raise CheckpointError(
            f"{path / MANIFEST_NAME} has schema version {version}, and this dream_trainer reads up to "
            f"{SCHEMA_VERSION}. Update dream_trainer."
        )
    body: dict[str, Any] = typed_json.loads(text)
    body.pop("xxh3", None)
    if _sealed(body) != text:
        raise ValueError("its own checksum does not match")
    for name in body["files"]:
        # A manifest may come from a stranger: it must not lead a reader out of its directory.
        if Path(name).name != name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} is not a file of its directory")
    files = {name: FileEntry(**entry) for name, entry in body["files"].items()}
    return Manifest(**{**body, "path": path, "files": files})


def _newest_first(root: Path) -> Iterator[Manifest]:
    for _, path in reversed(step_directories(root)):
        with suppress(CheckpointError):
            yield read_manifest(path)


def list_checkpoints(root: Path) -> list[Manifest]:
    """Complete checkpoints under `root` by step, judged by manifests and sizes; contents are not read."""
    return [*_newest_first(root)][::-1]


def newest_checkpoint(root: Path) -> Manifest | None:
    """The last one of `list_checkpoints`; does not look at older ones."""
    return next(_newest_first(root), None)


def finished_directories(root: Path) -> list[Path]:
    """The directories that are checkpoints, or were; a store writes in place, so there only those with a manifest."""
    paths = [path for _, path in step_directories(root)]
    return [path for path in paths if not isinstance(path, StorePath) or (path / MANIFEST_NAME).is_file()]


def faults(path: Path) -> list[str]:
    """Reads a checkpoint through; returns an error for each file that is not as it was written."""
    found = []
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    for name in sorted(manifest.files):
        try:
            manifest.verify(name)
        except CheckpointError as error:
            found.append(str(error))
    return found


def verify_checkpoint(path: Path, *, world: Ranks, shards: bool = True) -> Manifest:
    """Reads every file and compares its checksum, but of `shards` only on request, since `load_tensors` hashes them.
    The readers of a directory divide its files among them."""
    task = f"verify {path}"
    manifest = on_all_ranks(world, task, lambda: read_manifest(path))
    own = own_share(sorted(set(manifest.files) - set(() if shards else manifest.shards)), path, world)
    on_all_ranks(world, task, lambda: manifest.verify(*own))
    return manifest


def own_share(names: list[str], path: Path, world: Ranks) -> list[str]:
    """This rank's share of a directory's files, which the ranks that read the same directory divide; a collective."""
    paths = world.all_gather_object(str(path))
    readers = [rank for rank, other in enumerate(paths) if other == str(path)]
    return names[readers.index(world.rank) :: len(readers)]


# -- Which checkpoint a path means, be it of a run or of one of its checkpoints, and the checkpoints that a run has.


State = Literal["whole", "damaged", "unreadable", "unfinished", "replaced", "aside"]
_HIDDEN: dict[State, re.Pattern[str]] = {"unfinished": TEMPORARY_NAME, "replaced": REPLACED_NAME, "aside": ASIDE_NAME}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One directory among a run's checkpoints."""

    path: Path
    step: int
    state: State
    # "unreadable": of a newer schema, or closed to this user. "unfinished": being written, or left by a killed job.
    # "replaced": kept until another of its step is whole. "aside": set aside when the run resumed from an older one.
    fault: str | None = None
    manifest: Manifest | None = None

    @property
    def size(self) -> int:
        return directory_size(self.path)


def directory_size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())


def entries(root: Path) -> list[Entry]:
    """All directories under `root` of present, former or unfinished checkpoints, by step. Contents are not verified."""
    found = [_entry(path, step, "whole") for step, path in step_directories(root)]
    for path in root.iterdir():
        for state, pattern in _HIDDEN.items():
            if (match := pattern.fullmatch(path.name)) and path.is_dir():
                found.append(_entry(path, int(match[1]), state))
    return sorted(found, key=lambda entry: (entry.step, entry.path.name.startswith("."), entry.path.name))


def _entry(path: Path, step: int, state: State) -> Entry:
    try:
        return Entry(path=path, step=step, state=state, manifest=read_manifest(path))
    except CheckpointError as error:
        if state == "whole":
            state = "damaged" if isinstance(error, DamagedCheckpointError) else "unreadable"
        if state == "damaged" and isinstance(path, StorePath) and not (path / MANIFEST_NAME).is_file():
            state = "unfinished"  # written in place, the manifest last
        return Entry(path=path, step=step, state=state, fault=None if state == "unfinished" else str(error))


def checkpoints_root(path: Path) -> Path:
    """The directory of the checkpoints of a run's directory, or `path` itself if it is that."""
    refuse(not path.is_dir(), f"{path} is not a directory with checkpoints. Give a run's directory.", CheckpointError)
    if (path / "checkpoints").is_dir():
        return path / "checkpoints"
    if path.name == "checkpoints" or step_directories(path):
        return path
    raise CheckpointError(f"{path} has no checkpoints. Give a run's directory, such as runs/project/group/experiment.")


def is_checkpoint(path: Path) -> bool:
    return path.is_dir() and (named_step(path) is not None or (path / MANIFEST_NAME).exists())


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """The checkpoint that a path means: itself, or of a run the one of `step`, by default the newest whole one."""
    if is_checkpoint(path):
        refuse(step is not None, f"step={step} chooses among a run's checkpoints, and {path} is one. Leave one out.")
        return path
    root = checkpoints_root(path)
    path_of_step = {manifest.step: manifest.path for manifest in list_checkpoints(root)}
    if step is None and path_of_step:
        return path_of_step[max(path_of_step)]
    if step not in path_of_step:
        asked = "no whole checkpoint" if step is None else f"no whole checkpoint of step {step}"
        raise CheckpointError(f"{root} has {asked}. There are steps {sorted(path_of_step)}.")
    return path_of_step[step]


# -- Retention: which checkpoints are kept after a newer one is on the disk. The newest always is; only valid ones go.


def mode_of_run(manifests: Sequence[Manifest], metric: str) -> Mode:
    """Whether the smallest or the largest value of a metric is best, as the run's config and the metric's name say."""
    parameters = manifests[-1].config.get("checkpoint_parameters", {}) if manifests else {}
    by_run: Mode | None = parameters.get("best_mode") if parameters.get("best_metric") == metric else None
    by_name = mode_by_name(metric)
    if by_run and by_name and by_run != by_name:  # once "min" was the default of all metrics
        raise ConfigError(f"the run took {by_run} for best of {metric}, and its name says {by_name}. Set --mode.")
    return mode_of(metric, by_run, named_by="--metric", set_by="--mode")


def best_checkpoint(manifests: Iterable[Manifest], metric: str, mode: Mode) -> Manifest | None:
    """The checkpoint whose `metric` is best; of equal ones that of the earlier step. None if none has a value."""
    return next(iter(_by_merit(manifests, metric, mode)), None)


def _by_merit(manifests: Iterable[Manifest], metric: str, mode: Mode) -> list[Manifest]:
    sign = 1 if mode == "min" else -1
    valued = [manifest for manifest in manifests if is_value(manifest.metrics.get(metric))]
    return sorted(valued, key=lambda manifest: (sign * manifest.metrics[metric], manifest.step))


def kept(manifests: Iterable[Manifest], retention: CheckpointParameters) -> set[int]:
    """Steps of the checkpoints that stay: all of them while `keep_best` asks for a metric that none has."""
    ordered = sorted(manifests, key=lambda manifest: manifest.step)
    steps = [manifest.step for manifest in ordered]
    if retention.keeps_all:
        return set(steps)
    stay = set(steps[-(retention.keep_last or 1) :])
    if retention.keep_every_n_steps is not None:
        stay |= {step for step in steps if step % retention.keep_every_n_steps == 0}
    if retention.keep_best is not None and retention.best_metric is not None:
        best = _by_merit(ordered, retention.best_metric, retention.known_best_mode())
        if not best:  # a mistyped name, or no validation yet: the best are unknown
            return set(steps)
        stay |= {manifest.step for manifest in best[: retention.keep_best]}
    return stay


def retire(root: Path, retention: CheckpointParameters) -> list[Path]:
    """Removes the checkpoints that the policy lets go, the oldest first, on one rank; returns their paths."""
    if retention.keeps_all:
        return []
    manifests = list_checkpoints(root)
    stay = kept(manifests, retention)
    removed = [manifest.path for manifest in manifests if manifest.step not in stay]
    for path in removed:
        discard(path)
    return removed
